package node

import (
	"os"
	"strings"
	"testing"

	"go.uber.org/zap"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/core/coretest"
	"github.com/kvconn/kvconn/cuda"
	"github.com/kvconn/kvconn/cuda/testdouble/engine"
	"github.com/kvconn/kvconn/internal/devices"
)

// reached is a transport that counts what it is given.
type reached struct {
	fakeTransport
	given []string
}

func (r *reached) Expect(core.TransferID, core.AgentID, []core.Segment) ([]byte, error) {
	r.given = append(r.given, "a load")
	return []byte("grant"), nil
}
func (r *reached) Write(core.WriteOp)   { r.given = append(r.given, "a write") }
func (r *reached) Extend(core.WriteOp)  { r.given = append(r.given, "more of a write") }
func (r *reached) Stop(core.TransferID) { r.given = append(r.given, "a stop") }

// TestMemoryIsLookedAt: a load, a write and more of a write whose memory is not what was registered any more reach no transport.
func TestMemoryIsLookedAt(t *testing.T) {
	t.Setenv("KVCONN_LIBCUDA", os.Getenv("KVCONN_LIBCUDA")) // as it was, for the tests that follow
	const blocks, bytes = 4, 64 << 10
	memory := engine.New(t, 0).Map(blocks * bytes)
	layout, err := core.NewLayout([]core.Region{{Name: "layer.0", Base: uint64(memory.At), Memory: core.DeviceMemory(0), BlockStride: bytes, BlockBytes: bytes, NumBlocks: blocks}})
	if err != nil {
		t.Fatal(err)
	}
	devs, err := devices.Open(layout.Regions, cuda.Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := devs.Close(); err != nil {
			t.Error(err)
		}
	})
	cfg, w, outcomes := testConfig(RoleBoth), &reached{}, coretest.NewRecorder(t, "agent")
	tr := newTransports("a", &cfg, zap.NewNop(), nil, outcomes, nil)
	tr.add(w)
	tr.devices = devs
	tr.pair("peer").connected = map[string]bool{viaTCP: true}
	ids := [][]core.BlockID{{1, 2}}
	pairs, err := layout.Plan(ids, layout.Shapes(), ids)
	if err != nil {
		t.Fatal(err)
	}
	write := core.WriteOp{ID: "offered", Peer: "peer", Grant: mark(viaTCP, []byte("grant")), Pairs: pairs}
	to := func() *landing { return &landing{segments: layout.Segments(ids)} }

	if _, err := tr.Expect("loaded", "peer", to()); err != nil {
		t.Fatal(err)
	}
	tr.Write(write)
	tr.Extend(write)
	if got := strings.Join(w.given, ", "); got != "a load, a write, more of a write" {
		t.Fatalf("the transport was given %s", got)
	}

	w.given = nil
	memory.Sleep()
	memory.Wake()
	if _, err := tr.Expect("loaded again", "peer", to()); err == nil || !isChange(err) {
		t.Errorf("a load into other memory: %v", err)
	}
	again := write
	again.ID = "offered again"
	tr.Write(again)
	tr.Extend(write)
	if got := strings.Join(w.given, ", "); got != "a stop" {
		t.Errorf("with other memory than was registered the transport was given %s, want a stop of the write under way alone", got)
	}
	if o := outcomes.Wait("written", "offered again", 1); o.Err == nil || !isChange(o.Err) {
		t.Errorf("the write of other memory ended with %v", o.Err)
	}
}
