package node

import (
	"errors"
	"slices"
	"testing"

	"go.uber.org/zap"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/internal/devices"
	"github.com/kvconn/kvconn/rig/leaktest"
	"github.com/kvconn/kvconn/rig/testdouble/engine"
)

// reached notes which calls have reached a transport. Its sink notes how writes have ended.
type reached struct {
	core.Transport
	core.Sink
	calls []string
	ended error
}

func (*reached) Name() string       { return viaTCP }
func (r *reached) note(call string) { r.calls = append(r.calls, call) }

func (r *reached) Expect(core.TransferID, core.AgentID, []core.Segment) ([]byte, error) {
	r.note("load")
	return []byte("grant"), nil
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
				load := func(id core.TransferID) error {
					_, err := all.Expect(id, peer, &landing{segments: []core.Segment{}})
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
				all.Write(write("begun"))
				r.took(t, "a write", "write")
				all.Extend(write("begun"))
				r.took(t, "more of it", "more")

				memory.Sleep()
				if happens == "it is mapped anew" {
					memory.Wake()
				}
				if err := load("gone"); !isChange(err) {
					t.Errorf("a load ends with %v", err)
				}
				r.took(t, "a load when the memory is gone")
				all.Write(write("gone"))
				if !isChange(r.ended) {
					t.Errorf("a write ends with %v", r.ended)
				}
				r.took(t, "a write when the memory is gone")
				all.Extend(write("begun"))
				r.took(t, "more of a write when the memory is gone", "stop")
				all.sink(viaTCP).Written("begun", core.TransferStats{}, errors.New("it was stopped"))
				if !isChange(r.ended) {
					t.Errorf("a write that more cannot be given of ends with %v", r.ended)
				}
			})
		}
	}
}
