package machine_test

import (
	"fmt"
	"strconv"
	"testing"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/core/machine"
	"github.com/kvconn/kvconn/internal/invariants"
	"github.com/kvconn/kvconn/kv"
)

// BenchmarkTransfer takes a transfer through the machines of P and D, from the engine's
// first word to both reports. live is how many others are under way meanwhile.
func BenchmarkTransfer(b *testing.B) {
	for _, live := range []int{0, 1000} {
		b.Run(fmt.Sprintf("live=%d", live), func(b *testing.B) { benchmarkTransfers(b, live) })
	}
}

// transfers makes the machines of P and D, which have live other transfers under way, and returns what takes one through them, with the
// number of its reports.
func transfers(b testing.TB, live int) (transfer func(core.TransferID) (reports int)) {
	b.Helper()
	var regions []kv.Region
	for i := range 64 {
		regions = append(regions, kv.Region{Name: fmt.Sprint(i), Base: uint64(1+i) << 24, BlockStride: 1024, BlockBytes: 1024, NumBlocks: 1000})
	}
	l, err := kv.NewLayout(regions)
	if err != nil {
		b.Fatal(err)
	}
	p, d := machine.New(l, core.Options{}), machine.New(l, core.Options{})
	from := core.Target{Bootstrap: "http://p:8998", DPRank: -1}
	ids := make([]kv.BlockID, 64)
	for i := range ids {
		ids[i] = kv.BlockID(i)
	}
	blocks := kv.Selection{First: []uint32{0}, Blocks: [][]kv.BlockID{ids}}
	now := time.Unix(0, 0)
	var todo []core.Action
	tell := func(m *machine.Machine, e core.Event) {
		answer, rest := core.Split(m.Step(now, e))
		if _, refused := answer.(core.Refuse); refused {
			b.Fatal(answer)
		}
		todo = append(todo, rest...)
	}
	for i := range live {
		id := core.TransferID(fmt.Sprintf("other-%d", i))
		tell(p, core.OfferRequest{ID: id, Selection: blocks})
		tell(d, core.LoadRequest{ID: id, From: from, Selection: blocks})
	}
	todo = nil
	grant := []byte("0123456789abcdef")
	return func(id core.TransferID) (reports int) {
		now = now.Add(time.Microsecond)
		tell(p, core.Announce{ID: id})
		tell(d, core.ClaimRequest{ID: id, From: from})
		tell(d, core.LoadRequest{ID: id, From: from, Selection: blocks})
		tell(p, core.OfferRequest{ID: id, Selection: blocks})
		for i := 0; i < len(todo); i++ {
			switch v := todo[i].(type) {
			case core.Resolve:
				tell(d, core.Resolved{ID: v.ID, Seq: v.Seq, Peer: "p"})
			case core.Expect:
				tell(d, core.Expecting{ID: v.ID, Grant: grant})
			case core.SendLoad:
				tell(p, core.LoadMessage{ID: v.ID, Peer: "d", Grant: v.Grant, Selection: v.Selection, Lease: v.Lease})
				tell(d, core.LoadAnswered{ID: v.ID, Seq: v.Seq, Answer: core.LoadAccepted})
			case core.Write:
				tell(d, core.Received{ID: v.ID})
				tell(p, core.Written{ID: v.ID})
			case core.Report:
				reports++
			}
		}
		todo = todo[:0]
		return reports
	}
}

func benchmarkTransfers(b *testing.B, live int) {
	transfer := transfers(b, live)
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		if transfer(core.TransferID("transfer-"+strconv.Itoa(i))) != 2 { // an id of its own: P remembers the last ones
			b.Fatal("a transfer did not end")
		}
	}
}

// transferAllocates is how many allocations a transfer that is announced and claimed takes in both machines, by how many others are under
// way meanwhile. Alone it has D begin to watch P's agent. A commit that changes a number says why; a release of Go may change it too.
var transferAllocates = map[int]float64{0: 25, 1000: 24}

// TestTransferAllocates: on the way of a load nothing is allocated that was not in the commit before.
func TestTransferAllocates(t *testing.T) {
	if invariants.Enabled || machine.Raced {
		t.Skip("the checks of this build allocate; make attack runs this without them")
	}
	for live, want := range transferAllocates {
		transfer, i := transfers(t, live), 0
		ids := make([]core.TransferID, 2001)
		for i := range ids {
			ids[i] = core.TransferID("transfer-" + strconv.Itoa(i))
		}
		n := testing.AllocsPerRun(len(ids)-1, func() {
			if transfer(ids[i]) != 2 {
				t.Fatal("a transfer did not end")
			}
			i++
		})
		if n != want {
			t.Errorf("beside %d others a transfer takes %v allocations, want %v", live, n, want)
		}
	}
}
