package natsbus

import (
	"crypto/tls"
	"strings"
	"testing"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/rig/leaktest"
	"github.com/kvconn/kvconn/rig/nettest"
)

func TestTLSBootstrap(t *testing.T) {
	leaktest.Check(t)
	ours, theirs := nettest.NewAuthority(t), nettest.NewAuthority(t)
	later, before := time.Now().Add(time.Hour), time.Now().Add(-time.Minute)
	open := func(secure *tls.Config) *port {
		p := newSecurePort(t, "127.0.0.1:0", ServerOptions{Token: "right"}, secure)
		prefill := newBus(t, Options{Identity: named("P"), Server: p.Server, Token: "right"})
		serve(prefill)
		register(t, prefill, "e")
		return p
	}
	good, plain := open(ours.Server(later, "127.0.0.1")), open(nil)
	expired, other := open(ours.Server(before, "127.0.0.1")), open(ours.Server(later, "elsewhere"))
	for what, c := range map[string]struct {
		at   string
		opt  Options
		want string // "" for success
	}{
		"trusted":                {good.url(), Options{TLS: ours.Client()}, ""},
		"http that means https":  {"http://" + good.addr, Options{TLS: ours.Client(), OnlyTLS: true}, ""},
		"unknown authority":      {good.url(), Options{TLS: theirs.Client()}, "tls_ca_file"},
		"system's authorities":   {good.url(), Options{}, "tls_ca_file"},
		"expired":                {expired.url(), Options{TLS: ours.Client()}, "tls_cert_file"},
		"another host's":         {other.url(), Options{TLS: ours.Client()}, "another host"},
		"http to a TLS port":     {"http://" + good.addr, Options{}, "speaks https"},
		"https to a plain port":  {"https://" + plain.addr, Options{TLS: ours.Client()}, "speaks no TLS"},
		"plain where TLS is due": {plain.url(), Options{TLS: ours.Client(), OnlyTLS: true}, "speaks no TLS"},
	} {
		c.opt.Identity, c.opt.Token, c.opt.ConnectTimeout = named("D"), "right", within
		d := newBus(t, c.opt)
		serve(d)
		_, via, err := d.Lookup(ctxOf(t, within), core.Target{Bootstrap: c.at})
		if c.want == "" {
			if err != nil {
				t.Errorf("%s: %v", what, err)
				continue
			}
			if want := core.Via("https://" + good.addr); via != want {
				t.Errorf("%s: via %q, want %q", what, via, want)
			}
			ask(t, d, via, "P", "P via : hello D")
			continue
		}
		mustBe(t, err, core.ErrUnreachable)
		if !strings.Contains(err.Error(), c.want) || !strings.Contains(err.Error(), strings.TrimPrefix(strings.TrimPrefix(c.at, "http://"), "https://")) {
			t.Errorf("%s: error %q, want %q and the address in it", what, err, c.want)
		}
	}
}

// The connection comes back over TLS after a break, and Close does not wait for
// a peer that does not read.
func TestTLSLinkComesBack(t *testing.T) {
	leaktest.Check(t)
	ca := nettest.NewAuthority(t)
	p := newSecurePort(t, "127.0.0.1:0", ServerOptions{}, ca.Server(time.Now().Add(time.Hour), "127.0.0.1"))
	prefill := newBus(t, Options{Identity: named("P"), Server: p.Server})
	serve(prefill)
	register(t, prefill, "e")
	px := newProxy(t, p.addr)
	d := newBus(t, Options{Identity: named("D"), TLS: ca.Client()})
	_, via, err := d.Lookup(ctxOf(t, within), core.Target{Bootstrap: "https://" + px.Addr().String()})
	if err != nil {
		t.Fatal(err)
	}
	px.cut()
	eventually(t, "the way back", func() error {
		_, err := d.Request(ctxOf(t, time.Second), via, reach(d, "P"), hello("D"))
		return err
	})
	px.frozen.Store(true)
}
