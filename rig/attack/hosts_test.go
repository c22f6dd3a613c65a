package attack

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/kvconn/kvconn/wire"
)

// TestManyHosts: hosts to which a client has sent a decode agent ask it with long messages, each
// as fast as it is read. 24 of them made the agent hold 1.6 GiB, and one start_load took 0.5 s. Now
// little waits of each, and one long message of all hosts is decoded at a time.
func TestManyHosts(t *testing.T) {
	p := start(t, map[string]any{"role": "prefill"})
	d := start(t, map[string]any{"role": "decode"})
	calm := before(t, p, d)
	long, err := (&wire.Request{Kind: wire.KindHello, Hello: &wire.Agent{Version: wire.Version, Shapes: make([]wire.Shape, 60000)}}).MarshalMsg(nil)
	if err != nil {
		t.Fatal(err)
	}
	const hosts = 24
	flooding := make(chan struct{}, hosts)
	over := make(chan struct{})
	defer close(over)
	for i := range hosts {
		address, _ := newAttacker(t).host("kvconn - -\n", func(s *session) {
			fmt.Fprint(s.conn, "ok\nINFO {\"server_id\":\"x\",\"version\":\"2.11.0\",\"proto\":1,\"headers\":true,\"max_payload\":8388608}\r\n")
			go func() {
				<-over
				_ = s.conn.Close()
			}()
			for {
				line, err := s.br.ReadString('\n')
				if err != nil {
					return
				}
				if strings.HasPrefix(line, "PING") {
					fmt.Fprint(s.conn, "PONG\r\n")
				}
				if strings.HasPrefix(line, "SUB kvconn.v1.agent.") { // the id under which d is here
					f := strings.Fields(line)
					ask := fmt.Sprintf("MSG %s %s _INBOX.%s.x %d\r\n%s\r\n", strings.Replace(f[1], "*", s.id, 1), f[len(f)-1], s.id, len(long), long)
					select {
					case flooding <- struct{}{}:
					default: // it comes again
					}
					go func() {
						for err := error(nil); err == nil; {
							_, err = s.conn.Write([]byte(ask))
						}
					}()
				}
			}
		})
		d.say("load mine%d 10 2 %s", i, address)
	}
	for range hosts {
		select {
		case <-flooding:
		case <-time.After(bound):
			t.Fatal("the agent does not come to the hosts")
		}
	}
	h := &honest{}
	for i := range loadsBefore {
		h.load(t, p, d, fmt.Sprint("honest", i))
	}
	got(t, "1.6 GiB held (at d8c09e5)", "start_load at most %.2f ms, %s, %s", d.slowest, h.comparedWith(t, calm), d.growth(t))
	settle(t, p, d)
}
