package core_test

import (
	"fmt"
	"strconv"
	"testing"
	"time"

	"github.com/kvconn/kvconn/core"
)

// BenchmarkTransfer takes a transfer through the machines of P and D, from the engine's
// first word to both reports. live is how many others are under way meanwhile.
func BenchmarkTransfer(b *testing.B) {
	for _, live := range []int{0, 1000} {
		b.Run(fmt.Sprintf("live=%d", live), func(b *testing.B) { benchmarkTransfers(b, live) })
	}
}

func benchmarkTransfers(b *testing.B, live int) {
	var regions []core.Region
	for i := range 64 {
		regions = append(regions, core.Region{Name: fmt.Sprint(i), Base: uint64(1+i) << 24, BlockStride: 1024, BlockBytes: 1024, NumBlocks: 1000})
	}
	l, err := core.NewLayout(regions)
	if err != nil {
		b.Fatal(err)
	}
	p, d := core.New(l, core.Options{}), core.New(l, core.Options{})
	from := core.Target{Bootstrap: "http://p:8998", DPRank: -1}
	ids := make([]core.BlockID, 64)
	for i := range ids {
		ids[i] = core.BlockID(i)
	}
	blocks := core.Selection{First: []uint32{0}, Blocks: [][]core.BlockID{ids}}
	now := time.Unix(0, 0)
	must := func(err error) {
		if err != nil {
			b.Fatal(err)
		}
	}
	for i := range live {
		id := core.TransferID(fmt.Sprintf("other-%d", i))
		must(p.Offer(now, core.OfferRequest{ID: id, Selection: blocks}))
		must(d.Load(now, core.LoadRequest{ID: id, From: from, Selection: blocks}))
	}
	p.Actions()
	d.Actions()
	grant := []byte("0123456789abcdef")
	transfer := func(id core.TransferID) (reports int) {
		must(p.Announce(now, id))
		must(d.Claim(now, core.ClaimRequest{ID: id, From: from}))
		must(d.Load(now, core.LoadRequest{ID: id, From: from, Selection: blocks}))
		must(p.Offer(now, core.OfferRequest{ID: id, Selection: blocks}))
		for {
			todo := append(d.Actions(), p.Actions()...)
			if len(todo) == 0 {
				return reports
			}
			for _, act := range todo {
				switch v := act.(type) {
				case core.Resolve:
					d.Resolved(now, v.ID, v.Seq, "p", time.Time{}, core.OK, "")
				case core.Expect:
					d.Expecting(now, v.ID, grant, nil)
				case core.SendLoad:
					p.LoadArrived(now, core.LoadMessage{ID: v.ID, Peer: "d", Grant: v.Grant, Selection: v.Selection, Lease: v.Lease})
					d.LoadAnswered(now, v.ID, v.Seq, core.LoadAccepted, core.OK, "")
				case core.Write:
					d.Received(now, v.ID, core.TransferStats{}, nil)
					p.Written(now, v.ID, core.TransferStats{}, nil)
				case core.Report:
					reports++
				}
			}
		}
	}
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		if transfer(core.TransferID("transfer-"+strconv.Itoa(i))) != 2 { // an id of its own: P remembers the last ones
			b.Fatal("a transfer did not end")
		}
		now = now.Add(time.Microsecond)
	}
}
