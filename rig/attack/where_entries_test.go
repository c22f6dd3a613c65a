package attack

import (
	"encoding/base64"
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/kvconn/kvconn/wire"
)

// entryAs is the entry of a prefill engine of the attacker's under another engine id, signed with the attacker's key.
func (s *scenario) entryAs(nc *nats.Conn, e *victim, engine string) *nats.Msg {
	s.Helper()
	own, err := nc.Request("$JS.API.DIRECT.GET."+natsStream+"."+entryAt(e.names), nil, bound)
	if err != nil {
		s.Fatal(err)
	}
	a := new(wire.Agent)
	if err := wire.Decode(own.Data, a); err != nil || a.ID != e.id {
		s.Fatalf("the attacker's own entry is of %q, %v", a.ID, err)
	}
	a.EngineID = engine
	m := nats.NewMsg(entryAt(engine))
	if m.Data, err = a.MarshalMsg(nil); err != nil {
		s.Fatal(err)
	}
	since, ends := strconv.FormatInt(time.Now().UnixNano(), 10), strconv.FormatInt(time.Now().Add(time.Hour).UnixNano(), 10)
	signature, err := s.hostileP.Sign([]byte("\xffkvconn entry 1\x00" + m.Subject + "\x00" + since + "\x00" + ends + "\x00" + string(m.Data)))
	if err != nil {
		s.Fatal(err)
	}
	m.Header.Set("Kvconn-Since", since)
	m.Header.Set("Kvconn-Ends", ends)
	m.Header.Set("Kvconn-Signature", base64.RawURLEncoding.EncodeToString(signature))
	return m
}

// TestEntryOfAnotherEngine: a prefill engine of a cluster writes its own agent under another engine's id. New decode engines that
// were to load from the other took the attacker's bytes, and reported them well. With the permissions file it writes nothing there.
// With the file of before it does, and nobody believes it: new decode engines load when the engine has renewed its entry.
func TestEntryOfAnotherEngine(t *testing.T) {
	for _, m := range []deployment{
		{name: "cluster-nkeys", cluster: true, nkeys: true},
		{name: "earlier-file", cluster: true, nkeys: true, earlier: true},
	} {
		t.Run(m.name, func(t *testing.T) {
			const newcomers, own, foreign = 4, 7, 99
			s := newScenario(t, m)
			p, d := s.start("prefill", nil), s.start("decode", nil)
			e := s.start("prefill", map[string]any{"nats_nkey_seed_file": s.hostileP.file, "engine_id": s.hostileP.engine("evil")})
			p.say("fill %d", own)
			e.say("fill %d", foreign)
			calm := before(s, p, d)
			var fresh []*victim
			for i := range newcomers {
				fresh = append(fresh, s.start("decode", map[string]any{"engine_id": fmt.Sprint("new", i)}))
			}
			nc := s.user(s.hostileP)
			entry := s.entryAs(nc, e, p.names)
			began := time.Now()
			if err := nc.PublishMsg(entry); !m.earlier && (err != nil || !barred(t, nc)) {
				t.Errorf("a prefill engine writes another's entry: %v", err)
			}
			h, well, refused, taken := &honest{}, 0, 0, 0
			for i, n := range fresh {
				if m.earlier && refused == 0 { // until it is read before the engine renews its own
					if ack, err := nc.RequestMsg(entry, bound); err != nil || strings.Contains(string(ack.Data), `"error"`) {
						t.Fatalf("%+v, %v: the attack itself has failed", ack, err)
					}
				}
				for tries := 0; ; tries++ {
					id := fmt.Sprint("fresh", i, "-", tries)
					for _, of := range []*victim{e, p} {
						of.say("offer %s 4 4", id)
					}
					n.say("load %s 20 4 %s", id, p.from())
					l := n.report(id)
					h.load(t, p, d, fmt.Sprint("beside", h.all))
					if taken += n.say("bytes").Bytes[strconv.Itoa(foreign)]; l.Code == "ok" {
						well++
						break
					}
					refused++
					if !m.earlier || !strings.Contains(l.Reason, "is not signed") || time.Since(began) > 2*bound {
						t.Fatalf("%v after the attack newcomer %d gets %+v", time.Since(began), i, l)
					}
					time.Sleep(200 * time.Millisecond) // a poll of another process's state
				}
			}
			if m.earlier && refused == 0 {
				t.Error("nobody has read the attacker's entry: the attack itself has failed")
			}
			h.rest(s, p, d)
			if taken != 0 {
				t.Errorf("%d of %d bytes are the attacker's", taken, newcomers*4*layers*blockBytes)
			}
			got(t, "32,768 of 32,768 bytes in each of 4 loads (at the end of the first half)",
				"%d of %d bytes, %d of %d newcomers load after %d loads that were refused, %s", taken, newcomers*4*layers*blockBytes, well, newcomers, refused, h.comparedWith(t, calm))
		})
	}
}

// rest makes honest loads up to as many as there were before.
func (h *honest) rest(s *scenario, p, d *victim) {
	s.Helper()
	for h.all < loadsBefore {
		h.load(s, p, d, fmt.Sprint("beside", h.all))
	}
}
