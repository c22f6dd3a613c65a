package node

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"go.uber.org/zap"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/devices"
	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/rig/leaktest"
	"github.com/kvconn/kvconn/rig/testdouble/engine"
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

func (r *reached) Expect(core.TransferID, core.AgentID, []kv.Segment) ([]byte, error) {
	r.note("load")
	return []byte("grant"), r.refuses
}
func (r *reached) Write(core.WriteOp)   { r.note("write") }
func (r *reached) Extend(core.WriteOp)  { r.note("more") }
func (r *reached) Stop(core.TransferID) { r.note("stop") }
func (r *reached) Dismiss(core.AgentID) {}
func (r *reached) Close() error         { return nil }

func (r *reached) Revoke(core.TransferID) error { return nil }

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
type anyPlan struct{ kv.Plan }

// checkedTransports are transports over a cache on a device, with one that notes what reaches it.
func checkedTransports(t *testing.T, bases ...uintptr) (*transports, *reached) {
	t.Helper()
	return checkedTransportsFor(t, bound, bases...)
}

// checkedTransportsFor bounds the close of the device.
func checkedTransportsFor(t *testing.T, closes time.Duration, bases ...uintptr) (*transports, *reached) {
	t.Helper()
	var regions []kv.Region
	for i, base := range bases {
		regions = append(regions, kv.Region{Name: fmt.Sprint("layer.", i), Base: uint64(base), Memory: kv.DeviceMemory(0),
			BlockStride: blockBytes, BlockBytes: blockBytes, NumBlocks: numBlocks})
	}
	cfg := testConfig(RoleBoth)
	cfg.CloseTimeout = Seconds(bound)
	o := cfg.deviceOptions()
	o.CloseTimeout = closes
	devs, err := devices.Open(regions, o)
	if err != nil {
		t.Fatal(err)
	}
	r := new(reached)
	all := newTransports("self", &cfg, zap.NewNop(), nil, r, nil)
	t.Cleanup(all.drop)
	all.devices = devs
	all.add(r)
	all.pair(aPeer).connected = map[string]bool{viaTCP: true}
	return all, r
}

const aPeer = core.AgentID("peer")

// writeOf is a write that reads some regions.
func writeOf(id core.TransferID, regions ...uint32) core.WriteOp {
	op := core.WriteOp{ID: id, Peer: aPeer, Grant: addTransportName(viaTCP, []byte("grant")), Bytes: 2 * blockBytes}
	for _, r := range regions {
		op.Pairs = append(op.Pairs, kv.Pair{SrcRegion: r, Length: blockBytes})
	}
	return op
}

// TestMemoryIsChecked: the memory under a region is asked for before a load, a write and more of a write reach the transport. If the
// engine has freed it, or has mapped other memory at its addresses, none of them does: the load fails, the write fails, and the write that
// has begun is stopped and fails with the cause.
func TestMemoryIsChecked(t *testing.T) {
	leaktest.Check(t)
	for _, form := range []string{"pairs", "pairs of many regions", "a plan"} {
		for _, happens := range []string{"it is freed", "it is mapped anew"} {
			t.Run(form+", "+happens, func(t *testing.T) {
				const regions = 6
				memory := engine.New(t, 0).Map(regions * numBlocks * blockBytes)
				var bases []uintptr
				for i := range uintptr(regions) {
					bases = append(bases, memory.At+i*numBlocks*blockBytes)
				}
				all, r := checkedTransports(t, bases...)
				load := func(id core.TransferID) error {
					_, err := all.Expect(id, aPeer, &receivePlan{segments: []kv.Segment{}}, all.newMemoryCheck())
					return err
				}
				write := func(id core.TransferID) core.WriteOp {
					switch form {
					case "pairs":
						return writeOf(id, 0)
					case "pairs of many regions":
						return writeOf(id, 0, 1, 2, 3, 4, 5)
					}
					op := writeOf(id)
					op.Plan = anyPlan{}
					return op
				}

				if err := load("there"); err != nil {
					t.Fatal(err)
				}
				r.took(t, "a load", "load")
				all.Write(write("begun"), all.newMemoryCheck())
				r.took(t, "a write", "write")
				all.Extend(write("begun"), all.newMemoryCheck())
				r.took(t, "more of it", "more")

				memory.Sleep()
				if happens == "it is mapped anew" {
					memory.Wake()
				}
				if err := load("gone"); !isChange(err) {
					t.Errorf("a load ends with %v", err)
				}
				r.took(t, "a load when the memory is gone")
				all.Write(write("gone"), all.newMemoryCheck())
				if !isChange(r.ended) {
					t.Errorf("a write ends with %v", r.ended)
				}
				r.took(t, "a write when the memory is gone")
				all.Extend(write("begun"), all.newMemoryCheck())
				r.took(t, "more of a write when the memory is gone", "stop")
				all.sink(viaTCP).Written("begun", core.TransferStats{}, errors.New("it was stopped"))
				if !isChange(r.ended) {
					t.Errorf("a write that more cannot be given of ends with %v", r.ended)
				}
			})
		}
	}
}

// TestOtherMemoryIsChecked: if a check of all memory has found a change, a write of other regions begins all the same.
func TestOtherMemoryIsChecked(t *testing.T) {
	leaktest.Check(t)
	e := engine.New(t, 0)
	gone := e.Map(numBlocks * blockBytes)
	all, r := checkedTransports(t, gone.At, e.Map(numBlocks*blockBytes).At)
	gone.Sleep()
	l := all.newMemoryCheck()
	if _, err := all.Expect("load", aPeer, &receivePlan{segments: []kv.Segment{}}, l); !isChange(err) {
		t.Errorf("a load ends with %v", err)
	}
	all.Write(writeOf("gone", 0), l)
	if !isChange(r.ended) {
		t.Errorf("a write ends with %v", r.ended)
	}
	r.took(t, "a write of memory that is gone")
	all.Write(writeOf("there", 1), l)
	r.took(t, "a write of memory that is there", "write")
}

// TestEachBatchIsChecked: what begins later does not rely on an earlier check.
func TestEachBatchIsChecked(t *testing.T) {
	leaktest.Check(t)
	memory := engine.New(t, 0).Map(numBlocks * blockBytes)
	all, r := checkedTransports(t, memory.At)
	shapes := []kv.Shape{{Name: "layer.0", BlockStride: blockBytes, BlockBytes: blockBytes, NumBlocks: numBlocks}}
	match, err := kv.NewMatch(shapes, shapes)
	if err != nil {
		t.Fatal(err)
	}
	peers := newPeerTable()
	from := &peer{id: aPeer, in: &matched{match: match}}
	from.place = peers.order.PushBack(from)
	peers.byID[aPeer] = from
	p := &performer{log: zap.NewNop(), peers: peers, transports: all, machine: new(lockedMachine)}
	expect := func(ids ...core.TransferID) {
		var list []core.Action
		for _, id := range ids {
			list = append(list, core.Expect{ID: id, Peer: aPeer, Selection: kv.Selection{Blocks: [][]kv.BlockID{{1}}, First: []uint32{0}}})
		}
		p.performOfMemory(list)
	}
	expect("a", "b")
	r.took(t, "two loads", "load", "load")
	memory.Sleep()
	expect("c")
	r.took(t, "a load after the memory has gone")
}

// cards are a transport that has registered memory with cards.
type cards struct {
	reached
	forgot error
}

func (c *cards) Forget(cause error)   { c.forgot = cause }
func (c *cards) Renew()               {}
func (c *cards) Lacks() (error, bool) { return nil, false }

// TestCheckOfEarlierMemory: if the agent takes the memory of now while a check is made, what the check has found is of the memory of before. Cards
// keep the new memory, and the check is made again.
func TestCheckOfEarlierMemory(t *testing.T) {
	leaktest.Check(t)
	memory := engine.New(t, 0).Map(numBlocks * blockBytes)
	all, _ := checkedTransports(t, memory.At)
	c := new(cards)
	all.add(c)
	memory.Sleep()
	memory.Wake()
	looks := 0
	err := all.checkMemory(func() error {
		looks++
		found := all.devices.Check()
		if now, err := all.devices.Look(); looks == 1 && (err != nil || !now.Take()) {
			t.Fatalf("the memory of now is not taken: %v", err)
		}
		return found
	})
	if err != nil || c.forgot != nil || looks != 2 {
		t.Errorf("after %d checks: %v, and the cards forget the memory of now: %v", looks, err, c.forgot)
	}
	memory.Sleep()
	if err := all.checkMemory(all.devices.Check); !isChange(err) || !isChange(c.forgot) {
		t.Errorf("%v, and the cards forget memory that is gone: %v", err, c.forgot)
	}
}

// TestOwnMemoryPreventsLoad: a load that no transport can begin since it lacks this agent's memory fails as this agent's own fault. If
// something else is in one's way, as the peer, it does not.
func TestOwnMemoryPreventsLoad(t *testing.T) {
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
		_, err := all.Expect("t", peer, &receivePlan{segments: []kv.Segment{}}, all.newMemoryCheck())
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
