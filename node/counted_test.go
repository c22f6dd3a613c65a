package node

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"go.uber.org/zap"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/core/machine"
	"github.com/kvconn/kvconn/kv"
)

// stepping is a machine as the sink of transports. It takes each report to them, as an agent does.
type stepping struct {
	core.Sink
	t *testing.T
	*machine.Machine
	all     *transports
	reports []core.Report
}

func (s *stepping) tell(e core.Event) {
	s.t.Helper()
	for _, a := range s.Step(time.Unix(0, 0), e) {
		switch v := a.(type) {
		case core.Refuse:
			s.t.Fatal(v.Err)
		case core.Write:
			s.all.Write(core.WriteOp{ID: v.ID, Peer: v.Peer, Grant: v.Grant}, s.all.newMemoryCheck())
		case core.Report:
			v.Transport = s.all.ended(v)
			s.reports = append(s.reports, v)
		}
	}
}

func (s *stepping) Written(id core.TransferID, st core.TransferStats, err error) {
	s.tell(core.Written{ID: id, Stats: st, Err: err})
}

// TestPairCountsWhatDecodeHas: prefill counts a transfer of a pair once if decode's word is that it has all, also when decode's process
// ends so soon that the write ends with an error. It counts no transfer that failed.
func TestPairCountsWhatDecodeHas(t *testing.T) {
	broken := errors.New("connection reset by peer")
	for name, c := range map[string]struct {
		says  bool // decode says that it has all, before the write ends
		after bool // it says so then
		write error
		code  core.Code
		count uint64
	}{
		"the write ends well":                            {false, false, nil, core.OK, 1},
		"decode has all, and the write ends well":        {true, false, nil, core.OK, 1},
		"decode has all, and the write fails":            {true, false, broken, core.OK, 1},
		"the write is not expected, and decode has all":  {false, true, core.ErrNotExpected, core.OK, 1},
		"the write fails":                                {false, false, broken, core.Failed, 0},
		"the write fails, and decode has all after that": {false, true, broken, core.Failed, 0},
	} {
		t.Run(name, func(t *testing.T) {
			layout, err := kv.NewLayout([]kv.Region{{Name: "layer.0", Base: 1 << 12, BlockStride: blockBytes, BlockBytes: blockBytes, NumBlocks: numBlocks}})
			if err != nil {
				t.Fatal(err)
			}
			cfg := testConfig(RolePrefill)
			s := &stepping{t: t, Machine: machine.New(layout, core.Options{})}
			s.all = newTransports("self", &cfg, zap.NewNop(), nil, s, nil)
			s.all.add(new(reached))
			s.all.pair(aPeer)
			blocks := kv.Selection{First: []uint32{0}, Blocks: [][]kv.BlockID{{1}}}
			s.tell(core.OfferRequest{ID: "x", Selection: blocks})
			s.tell(core.LoadMessage{ID: "x", Peer: aPeer, Grant: addTransportName(viaTCP, []byte("grant")), Selection: blocks})
			if c.says {
				s.tell(core.FinishMessage{From: aPeer, ID: "x"})
			}
			s.all.sink(viaTCP).Written("x", core.TransferStats{}, c.write)
			if c.after {
				s.tell(core.FinishMessage{From: aPeer, ID: "x"})
			}
			if len(s.reports) != 1 || s.reports[0].Code != c.code || s.reports[0].Transport != viaTCP {
				t.Errorf("reports %+v", s.reports)
			}
			if n := s.all.pairs[aPeer].transfers[viaTCP]; n != c.count {
				t.Errorf("the pair has %d transfers, want %d", n, c.count)
			}
			if len(s.all.active) != 0 || len(s.all.failedWrites) != 0 {
				t.Errorf("%v go on, %v are torn", s.all.active, s.all.failedWrites)
			}
		})
	}
}

// TestTornWritesAreBounded: a write that failed before the engine offered its transfer may have no report.
func TestTornWritesAreBounded(t *testing.T) {
	cfg, r := testConfig(RolePrefill), new(reached)
	all := newTransports("self", &cfg, zap.NewNop(), nil, r, nil)
	all.add(r)
	for i := range maxFailedWrites + 2 {
		id := core.TransferID(fmt.Sprint(i))
		all.Write(writeOf(id), all.newMemoryCheck())
		all.sink(viaTCP).Written(id, core.TransferStats{}, errors.New("broken"))
	}
	if len(all.active) != 0 || len(all.failedWrites) != maxFailedWrites {
		t.Errorf("%d go on, %d are torn", len(all.active), len(all.failedWrites))
	}
}
