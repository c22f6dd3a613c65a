package local

import (
	"bufio"
	"fmt"
	"net"
	"os"
	"testing"
	"time"

	"github.com/kvconn/kvconn/rig/leaktest"
)

// crowdEnv tells a test binary to open many sockets to the P of that name, and to say when P has them.
const crowdEnv = "KVCONN_TEST_CROWD"

func init() {
	if name := os.Getenv(crowdEnv); name != "" {
		crowd(name)
	}
}

func crowd(name string) {
	var c *net.UnixConn
	for range 40 {
		var err error
		if c, err = net.DialUnix("unix", nil, &net.UnixAddr{Name: "@" + name, Net: "unix"}); err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
		defer c.Close()
	}
	_, _ = c.Write(hello{newRandom(), newRandom()}.bytes())
	_, err := read(c, challengeSize) // P takes sockets in their order
	fmt.Println("the last is answered:", err)
	_, _ = bufio.NewReader(os.Stdin).ReadString('\n')
	os.Exit(0)
}

// TestPendingOfAnother: the sockets that one process opens and leaves open push out its own, and none of another process.
func TestPendingOfAnother(t *testing.T) {
	leaktest.Check(t)
	p := start(t, "p", Config{ConnectTimeout: time.Minute, MaxPending: 4}, nil)
	ticket := random(p.ticket("d"))
	honest := p.socket()
	c := startChild(t, crowdEnv+"="+p.tr.here.name)
	if said := c.line(); said != "the last is answered: <nil>" {
		t.Fatal(said)
	}
	if w := p.hail(honest, hello{ticket.name(), newRandom()}); w.refused != 0 {
		t.Errorf("%+v", w)
	}
	c.quit()
}
