package node

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"go.uber.org/zap"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/internal/devices"
	"github.com/kvconn/kvconn/rig/leaktest"
	"github.com/kvconn/kvconn/rig/testdouble/engine"
	"github.com/kvconn/kvconn/wire"
)

// reached notes which calls have reached a transport. Its sink notes how writes have ended.
type reached struct {
	core.Transport
	core.Sink
	calls   []string
	ended   error
	refuses error // a load
}

func (*reached) Name() string       { return viaTCP }
func (r *reached) note(call string) { r.calls = append(r.calls, call) }

func (r *reached) Expect(core.TransferID, core.AgentID, []core.Segment) ([]byte, error) {
	r.note("load")
	return []byte("grant"), r.refuses
}
func (r *reached) Write(core.WriteOp)     { r.note("write") }
func (r *reached) Extend(core.WriteOp)    { r.note("more") }
func (r *reached) Stop(core.TransferID)   { r.note("stop") }
func (r *reached) Dismiss(core.AgentID)   {}
func (r *reached) Revoke(core.TransferID) {}
func (r *reached) Close() error           { return nil }

func (r *reached) Written(_ core.TransferID, _ core.TransferStats, err error) { r.ended = err }

// took is what the calls since the last one were.
func (r *reached) took(t *testing.T, what string, want ...string) {
	t.Helper()
	if !slices.Equal(r.calls, want) {
		t.Errorf("%s: the transport got %q, want %q", what, r.calls, want)
	}
	r.calls = nil
}

// anyPlan is a plan of which nothing but its presence counts.
type anyPlan struct{ core.Plan }

// TestMemoryIsLookedAt: the memory under a region is asked for before a load, a write and more of a write reach the transport. If the engine has freed it, or
// has mapped other memory at its addresses, none of them does: the load fails, the write fails, and the write that has begun is stopped and fails with the cause.
func TestMemoryIsLookedAt(t *testing.T) {
	leaktest.Check(t)
	const peer = core.AgentID("peer")
	for _, form := range []string{"pairs", "a plan"} {
		for _, happens := range []string{"it is freed", "it is mapped anew"} {
			t.Run(form+", "+happens, func(t *testing.T) {
				memory := engine.New(t, 0).Map(numBlocks * blockBytes)
				regions := []core.Region{{Name: "layer.0", Base: uint64(memory.At), Memory: core.DeviceMemory(0), BlockStride: blockBytes, BlockBytes: blockBytes, NumBlocks: numBlocks}}
				cfg := testConfig(RoleBoth)
				devs, err := devices.Open(regions, cfg.deviceOptions())
				if err != nil {
					t.Fatal(err)
				}
				r := new(reached)
				all := newTransports("self", &cfg, zap.NewNop(), nil, r, nil)
				t.Cleanup(func() { _ = all.Close() })
				all.devices = devs
				all.add(r)
				all.pair(peer).connected = map[string]bool{viaTCP: true}
				look := func() *look { return &look{t: all} }
				load := func(id core.TransferID) error {
					_, err := all.Expect(id, peer, &landing{segments: []core.Segment{}}, look())
					return err
				}
				write := func(id core.TransferID) core.WriteOp {
					op := core.WriteOp{ID: id, Peer: peer, Grant: mark(viaTCP, []byte("grant")), Bytes: 2 * blockBytes}
					if form == "pairs" {
						op.Pairs = []core.Pair{{Length: blockBytes}}
					} else {
						op.Plan = anyPlan{}
					}
					return op
				}

				if err := load("there"); err != nil {
					t.Fatal(err)
				}
				r.took(t, "a load", "load")
				all.Write(write("begun"), look())
				r.took(t, "a write", "write")
				all.Extend(write("begun"), look())
				r.took(t, "more of it", "more")

				memory.Sleep()
				if happens == "it is mapped anew" {
					memory.Wake()
				}
				if err := load("gone"); !isChange(err) {
					t.Errorf("a load ends with %v", err)
				}
				r.took(t, "a load when the memory is gone")
				all.Write(write("gone"), look())
				if !isChange(r.ended) {
					t.Errorf("a write ends with %v", r.ended)
				}
				r.took(t, "a write when the memory is gone")
				all.Extend(write("begun"), look())
				r.took(t, "more of a write when the memory is gone", "stop")
				all.sink(viaTCP).Written("begun", core.TransferStats{}, errors.New("it was stopped"))
				if !isChange(r.ended) {
					t.Errorf("a write that more cannot be given of ends with %v", r.ended)
				}
			})
		}
	}
}

// TestOwnMemoryInTheWay: a load that no transport can begin since it lacks this agent's memory fails as this agent's own fault. If
// something else is in one's way, as the peer, it does not.
func TestOwnMemoryInTheWay(t *testing.T) {
	const peer = core.AgentID("peer")
	cfg := testConfig(RoleDecode)
	lacks, away := fmt.Errorf("region layer.0: %w", core.ErrMemory), errors.New("the peer is not connected")
	for _, c := range []struct {
		refuse []error
		ours   bool
	}{{[]error{lacks}, true}, {[]error{lacks, lacks}, true}, {[]error{lacks, away}, false}, {[]error{away}, false}, {nil, false}} {
		all := newTransports("self", &cfg, zap.NewNop(), nil, new(reached), nil)
		all.pair(peer).connected = map[string]bool{viaTCP: true}
		for _, why := range c.refuse {
			all.add(&reached{refuses: why})
		}
		_, err := all.Expect("t", peer, &landing{segments: []core.Segment{}}, &look{t: all})
		if err == nil || errors.Is(err, core.ErrMemory) != c.ours {
			t.Errorf("%v: the load fails with %v", c.refuse, err)
		}
		for _, why := range c.refuse {
			if !strings.Contains(err.Error(), why.Error()) {
				t.Errorf("%v does not say %v", err, why)
			}
		}
	}
}

// heard is a bus that tells of messages of one kind that were answered.
type heard struct {
	core.Bus
	kind     wire.Kind
	answered chan struct{} // has room for one
}

// hears has one of an agent's messages of a kind.
func hears(a *Agent, kind wire.Kind) *heard {
	b := &heard{a.bus, kind, make(chan struct{}, 1)}
	setBus(a, b)
	return b
}

func (b *heard) Request(ctx context.Context, via core.Via, to core.AgentID, req *wire.Request) (*wire.Reply, error) {
	rep, err := b.Bus.Request(ctx, via, to, req)
	if req.Kind == b.kind && err == nil && rep.Code == 0 {
		select {
		case b.answered <- struct{}{}:
		default:
		}
	}
	return rep, err
}

// wait waits for so many answers.
func (b *heard) wait(t *testing.T, n int) {
	t.Helper()
	late := time.NewTimer(bound)
	defer late.Stop()
	for range n {
		select {
		case <-b.answered:
		case <-late.C:
			t.Fatalf("no message of kind %v was answered within %v", b.kind, bound)
		}
	}
}

// onDevice opens an agent whose cache lies on a device of the driver double.
func onDevice(t *testing.T, role string, device int) (*side, *engine.Engine) {
	t.Helper()
	e := engine.New(t, device)
	cfg := testConfig(role)
	cfg.Transport = viaTCP
	a, err := Open(cfg, Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = a.Close() })
	if err := a.RegisterKVCaches([]core.Region{{Name: "layer.0", Base: uint64(e.Alloc(numBlocks * blockBytes)), Memory: core.DeviceMemory(0),
		BlockStride: blockBytes, BlockBytes: blockBytes, NumBlocks: numBlocks}}); err != nil {
		t.Fatal(err)
	}
	return &side{Agent: a, t: t, seen: map[core.TransferID]core.Report{}}, e
}

// TestLookTakesLong: the driver does not answer what lies under the region of a transfer that is to begin. Meanwhile decode's renewals
// are asked for and answered, and the agent tells its peer of an end by a message. When the driver has answered, the transfer goes well.
func TestLookTakesLong(t *testing.T) {
	for _, ours := range []string{RolePrefill, RoleDecode} {
		t.Run(ours, func(t *testing.T) {
			leaktest.Check(t)
			p, pe := onDevice(t, RolePrefill, 0)
			d, de := onDevice(t, RoleDecode, 1)
			looks, e := p, pe
			if ours == RoleDecode {
				looks, e = d, de
			}
			ends, renewals := hears(looks.Agent, wire.KindFinish), hears(d.Agent, wire.KindRenew)
			announce(t, p, "waits", "cancelled")
			d.load("waits", p.BootstrapAddress(), 1)
			d.load("cancelled", p.BootstrapAddress(), 2)
			until(t, "two loads wait at prefill", func() bool { return d.Stats().LoadsWaiting == 2 })

			stream := e.Stream()
			e.Hold(stream)
			after, err := looks.Moment(0, stream)
			if err != nil {
				t.Fatal(err)
			}
			selection := core.Selection{Blocks: [][]core.BlockID{{3}}}
			if ours == RolePrefill {
				d.load("slow", p.BootstrapAddress(), 3)
				_, err = p.Offer([]core.OfferRequest{{ID: "slow", Selection: selection, After: after}})
			} else {
				p.offer("slow", 3)
				from := core.Target{Bootstrap: p.BootstrapAddress()}
				_, err = d.StartLoad([]core.LoadRequest{{ID: "slow", From: from, Selection: selection, After: after}})
			}
			if err != nil {
				t.Fatal(err)
			}
			until(t, "the other side has begun", func() bool {
				return p.Stats().OffersUnderWay == 3 && (ours == RoleDecode || d.Stats().LoadsWaiting == 3)
			})
			e.Block("cuPointerGetAttribute")
			t.Cleanup(e.Unblock)
			e.Release(stream)
			until(t, "the look waits for the driver", func() bool { return e.Count("blocked") > 0 })

			renewals.wait(t, 3) // one was answered before, perhaps, and one asked for before: there is one at a time
			if _, err := looks.Cancel([]core.TransferID{"cancelled"}, "of a test"); err != nil {
				t.Fatal(err)
			}
			ends.wait(t, 1)
			if n := e.Count("blocked"); n == 0 {
				t.Error("the look has ended")
			}
			e.Unblock()
			d.want("slow", core.OK)
			p.want("slow", core.OK)
		})
	}
}
