package natsbus

import (
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/rig/leaktest"
)

func TestOneLinkForAll(t *testing.T) {
	leaktest.Check(t)
	p := newPort(t, "127.0.0.1:0", ServerOptions{})
	prefill := newBus(t, Options{Identity: named("P"), Server: p.Server})
	register(t, prefill, "e")
	d := newBus(t, Options{Identity: named("D")})
	var wg sync.WaitGroup
	for range 50 {
		wg.Go(func() {
			if _, _, err := d.Lookup(ctxOf(t, within), core.Target{Bootstrap: p.url()}); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	p.clients.mu.Lock()
	defer p.clients.mu.Unlock()
	if len(p.clients.conns) != 1 {
		t.Errorf("%d connections to one address", len(p.clients.conns))
	}
}

func TestUnusedLinkIsDropped(t *testing.T) {
	leaktest.Check(t)
	p := newPort(t, "127.0.0.1:0", ServerOptions{})
	prefill := newBus(t, Options{Identity: named("P"), Server: p.Server})
	register(t, prefill, "e")
	decode := newBus(t, Options{Identity: named("D"), linkIdle: 300 * time.Millisecond})
	_, via, err := decode.Lookup(ctxOf(t, within), core.Target{Bootstrap: p.url()})
	if err != nil {
		t.Fatal(err)
	}
	p.stop()
	eventually(t, "drop", func() error {
		if decode.hasLink(via) {
			return errors.New("the link is still there")
		}
		return nil
	})
	_, err = decode.Request(ctxOf(t, within), via, reach(decode, "P"), hello("D"))
	mustBe(t, err, core.ErrUnreachable)
}

func (b *Bus) hasLink(via core.Via) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.links[via] != nil
}

// nats.go gives a connection up for ever on some errors of a server.
func TestHomeIsOpenedAgain(t *testing.T) {
	leaktest.Check(t)
	_, prefill, decode, via := pair(t)
	prefill.homeLink().nc.Close()
	eventually(t, "the way back", func() error {
		_, err := decode.Request(ctxOf(t, 200*time.Millisecond), via, reach(decode, "P"), hello("D")) // one may be lost on its way
		return err
	})
	decode.linkOf(via).nc.Close()
	if _, err := decode.Request(ctxOf(t, within), via, reach(decode, "P"), hello("D")); err == nil {
		t.Fatal("a closed connection carries requests")
	}
	eventually(t, "a new link", func() error {
		_, _, err := decode.Lookup(ctxOf(t, within), core.Target{Bootstrap: string(via)})
		return err
	})
	ask(t, decode, via, "P", "P via : hello D")
}

func (b *Bus) linkOf(via core.Via) *link {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.links[via].link
}
