package proxy

import (
	"io"
	"log"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/kvconn/kvconn/rig/leaktest"
	"github.com/kvconn/kvconn/rig/nettest"
)

// Bootstrap ports that speak https are asked by an authority of their own, and D is told
// https. The engines' own ports stay as they are.
func TestBootstrapOverTLS(t *testing.T) {
	leaktest.Check(t)
	ca, stranger := nettest.NewAuthority(t), nettest.NewAuthority(t)
	p, d := newPrefill(t, ok, "engine-0"), newEngine(t, ok)
	plain := p.boot
	p.boot = httptest.NewUnstartedServer(plain.Config.Handler)
	p.boot.TLS = ca.Server(time.Now().Add(time.Hour), "127.0.0.1")
	p.boot.Config.ErrorLog = log.New(io.Discard, "", 0) // of the handshakes that are to fail
	p.boot.StartTLS()
	t.Cleanup(p.boot.Close)

	r := newRouter(t, Config{Prefill: []Prefill{p.prefill(t)}, Decode: []string{d.URL}, BootstrapCA: ca.File})
	r.waitReady(t)
	if resp, text := r.post(t, `{"prompt":"x"}`); resp.StatusCode != 200 {
		t.Fatalf("%d %s", resp.StatusCode, text)
	}
	if got := d.next(t).params(t)["remote_bootstrap_addr"]; got != p.boot.URL || !strings.HasPrefix(p.boot.URL, "https://") {
		t.Errorf("D is told %v, want %s", got, p.boot.URL)
	}
	for _, ca := range []string{stranger.File, SystemCA, ""} { // "" speaks http
		r := newRouter(t, Config{Prefill: []Prefill{p.prefill(t)}, Decode: []string{d.URL}, BootstrapCA: ca})
		eventually(t, "the prefill server was asked", func() bool {
			_, _, reason, _ := r.balancer.prefill.servers[0].state()
			return reason != "not asked yet"
		})
		if resp, text := r.post(t, `{"prompt":"x"}`); resp.StatusCode != 503 {
			t.Errorf("with %q: %d %s", ca, resp.StatusCode, text)
		}
	}
	_, noCert := ca.Issue(time.Now().Add(time.Hour), "h")
	for _, bad := range []string{"/nowhere/ca", noCert} {
		if _, err := New(Config{Prefill: []Prefill{p.prefill(t)}, Decode: []string{d.URL}, BootstrapCA: bad}); err == nil || !strings.Contains(err.Error(), "--bootstrap-ca") {
			t.Errorf("%s: %v", bad, err)
		}
	}
}
