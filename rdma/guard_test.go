package rdma

import (
	"context"
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/kvconn/kvconn/rdma/internal/verbs"
)

// onlyIn is a Guard that lets one range pass.
func onlyIn(allowed string) func(netip.Addr) error {
	p := netip.MustParsePrefix(allowed)
	return func(a netip.Addr) error {
		if p.Contains(a) {
			return nil
		}
		return fmt.Errorf("%s is refused by the test", a)
	}
}

func rawGID(addr string) [16]byte { return netip.MustParseAddr(addr).As16() }

// TestGuardAtP: P sends to no address of D's RoCE ports that its guard refuses, and says which.
// An InfiniBand port's GIDs are no addresses of IP.
func TestGuardAtP(t *testing.T) {
	gids := func(addrs ...string) (out []gidInfo) {
		for i, a := range addrs {
			out = append(out, gidInfo{i, rawGID(a), uint8(verbs.GIDRoCEv2)})
		}
		return out
	}
	for _, c := range []struct {
		name   string
		link   verbs.LinkLayer
		forced int
		gids   []gidInfo
		guard  string
		way    string // of the path, or a part of the error
	}{
		{"no guard", verbs.LinkEthernet, -1, gids("10.9.0.2"), "", "to 0: 10.9.0.2"},
		{"allowed", verbs.LinkEthernet, -1, gids("10.9.0.2"), "10.9.0.0/16", "to 0: 10.9.0.2"},
		{"refused", verbs.LinkEthernet, -1, gids("10.9.0.2"), "10.8.0.0/16", "prefill agent p may not send to port d:1 of the peer: 10.9.0.2 is refused by the test; else "},
		{"the first of two is refused", verbs.LinkEthernet, -1, gids("9.9.0.2", "10.9.0.2"), "10.9.0.0/16", "to 1: 10.9.0.2"},
		{"the one that D wants is refused", verbs.LinkEthernet, 0, gids("9.9.0.2", "10.9.0.2"), "10.9.0.0/16", "port d:1 of the peer: 9.9.0.2 is refused by the test; else "},
		{"IPv6", verbs.LinkEthernet, -1, gids("2001:db8::2"), "10.9.0.0/16", "2001:db8::2 is refused by the test"},
		{"said to be InfiniBand", verbs.LinkInfiniBand, -1, gids("9.9.0.2"), "10.9.0.0/16", "different link layers cannot reach each other"},
	} {
		t.Run(c.name, func(t *testing.T) {
			cn := newTestConn(t, 1)
			cn.reconnecting = true
			cn.t.id = "p"
			p := cn.lanes[0].port
			p.dev.memory.Store(&memory{})
			p.state.Store(&portState{up: true, mtu: 4096, speed: 1e9, address: *roce("p:1",
				gidOf(1, verbs.GIDRoCEv2, "10.9.0.1"), gidOf(2, verbs.GIDRoCEv2, "2001:db8::1"))})
			cn.t.ports, cn.lanes = []*localPort{p}, nil
			if c.guard != "" {
				cn.t.cfg.Guard = onlyIn(c.guard)
			}
			remote, err := cn.t.cfg.newRemoteInfo(&reply{Secret: make([]byte, secretSize), Devices: []deviceKeys{{Scratch: keyInfo{Length: scratchBytes}}},
				Ports: []portInfo{{Name: "d:1", Link: uint8(c.link), LID: 7, Forced: c.forced, GIDs: c.gids}}})
			if err != nil {
				t.Fatal(err)
			}
			plan, causes := cn.plan(remote, map[pathKey]bool{}, map[pathKey]bool{})
			got := fmt.Sprint(causes)
			if len(plan) > 0 {
				got = plan[0].route.String()
			}
			if !strings.Contains(got, c.way) || len(plan) > 0 != strings.HasPrefix(c.way, "to ") {
				t.Errorf("%d paths: %s, want %q", len(plan), got, c.way)
			}
		})
	}
}

// TestGuardAtD: D makes no end of a lane to an address that its guard refuses, nor one to a RoCE
// port of which P names none.
func TestGuardAtD(t *testing.T) {
	port := func(name string, link verbs.LinkLayer) *localPort {
		p := &localPort{dev: &device{name: name}, name: name} // it is down: nothing is made
		p.state.Store(&portState{address: portAddress{Name: name, Link: link, Index: -1}})
		return p
	}
	tr := newTestConn(t, 0).t
	tr.id, tr.ports = "d", []*localPort{port("roce:1", verbs.LinkEthernet), port("ib:1", verbs.LinkInfiniBand)}
	tr.cfg.Guard = onlyIn("10.9.0.0/16")
	const lies = "port roce:1 is a RoCE port, and the peer names no GID"
	for _, c := range []struct {
		name  string
		offer laneOffer
		want  string
	}{
		{"allowed", laneOffer{GRH: true, GID: rawGID("10.9.0.1")}, ""},
		{"IPv4-mapped", laneOffer{GRH: true, GID: rawGID("::ffff:10.9.0.1")}, ""},
		{"another IPv4 address", laneOffer{GRH: true, GID: rawGID("10.8.0.1")}, "decode agent d may not send to the peer's port: 10.8.0.1 is refused by the test"},
		{"IPv6", laneOffer{GRH: true, GID: rawGID("2001:db8::1")}, "decode agent d may not send to the peer's port: 2001:db8::1 is refused by the test"},
		{"no GID", laneOffer{LID: 7, GID: rawGID("10.9.0.1")}, lies},
		{"InfiniBand", laneOffer{Port: 1, LID: 7}, ""},
		{"InfiniBand with a GID", laneOffer{Port: 1, LID: 7, GRH: true, GID: rawGID("fe80::1")}, ""},
	} {
		got := ""
		if err := tr.admits(tr.ports[c.offer.Port], &c.offer); err != nil {
			got = err.Error()
		}
		if got != c.want {
			t.Errorf("%s: %q, want %q", c.name, got, c.want)
		}
	}
	if t.Failed() {
		return // what follows would make lanes
	}
	offers := []laneOffer{{GRH: true, GID: rawGID("10.8.0.1")}, {Port: 2}}
	out := tr.accept(nil, offers, make([]bool, 2)) // without a source: nothing is made
	for i, want := range []string{"10.8.0.1 is refused by the test", "asks for port 2"} {
		if out[i].lane != nil || out[i].err == nil || !strings.Contains(out[i].err.Error(), want) {
			t.Errorf("offer %d: %v, want %q", i, out[i].err, want)
		}
	}
}

// TestGuard: where either side's guard refuses the other's addresses, no bytes go this way, and
// both hear why.
func TestGuard(t *testing.T) {
	needsRDMA(t)
	for _, c := range []struct{ name, p, d, says string }{
		{"at P", "192.0.2.0/24", "", "prefill agent p may not send to port "},
		{"at D", "", "192.0.2.0/24", "decode agent d may not send to the peer's port: "},
		{"both allow", "0.0.0.0/0", "0.0.0.0/0", ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			ctl := newControl()
			open := func(guard string) func(cfg *Config) {
				return func(cfg *Config) {
					if guard != "" {
						cfg.Guard = onlyIn(guard)
					}
				}
			}
			ctl.config = open(c.p)
			p := start(t, ctl, "p", 1, nil)
			ctl.config = open(c.d)
			d := start(t, ctl, "d", 1, nil)
			connect(t, d, p)
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			err := d.tr.Usable(ctx, p.id)
			if c.says == "" {
				if err != nil {
					t.Fatal(err)
				}
				p.paint(1, 0, 1)
				p.write("t", d, d.expect("t", p, 0, 1), 0, 0, 1)
				if o := d.rec.Wait("received", "t", 1); o.Err != nil {
					t.Error(o.Err)
				}
				d.has(1, 0, 1)
				return
			}
			if err == nil || !strings.Contains(err.Error(), c.says) || !strings.Contains(err.Error(), "is refused by the test") {
				t.Errorf("%v, want %q", err, c.says)
			}
			if left := p.tr.sender.lanes() + d.tr.receiver.lanes(); left > 0 {
				t.Errorf("%d lanes are open", left)
			}
		})
	}
}
