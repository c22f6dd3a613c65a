package machine_test

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/core/machine"
	"github.com/kvconn/kvconn/kv"
)

// FuzzMachine is one machine's user. It reads its input as events: requests of the engine, messages
// of peers and outcomes of a transport. The input chooses ids, blocks, codes, statuses and
// the order. The duties of the package comment are kept, and the transport keeps to its
// contract.
//
// It checks the ledger's promises (each accepted half is reported once, a load after its
// fence); that no offer is reported while its blocks are read; that a Write plans, and
// reads offered blocks only; that codes and statuses which leave the machine are known;
// and that a closed machine is empty.
func FuzzMachine(f *testing.F) {
	// Operations with their operands, as next and what it calls read them.
	offer := func(id byte) []byte { return []byte{1, id, 2, 3, 1, 2, 3, 1, 5} }
	message := func(id, first byte) []byte { return []byte{5, id, 0, 0, 2, first, 0, 2, 2, 7, 8, 1, 4, 30} }
	load := func(id byte) []byte { return []byte{3, id, 0, 0, 2, 2, 4, 5, 1, 6} }
	claim := func(id byte) []byte { return []byte{2, id, 0} }
	perform, expect, resolved, replied := []byte{11, 0}, []byte{11, 0, 0}, []byte{12, 0, 0, 0}, []byte{12, 0, 0, 0}
	written, received, tick, second := []byte{12, 0, 0}, []byte{13, 0, 0, 9, 9}, []byte{10}, []byte{9, 4, 10}
	found := []byte{12, 0, 0, 0, 0, 2, 1, 0, 0, 0, 1, 1, 0, 1, 1} // two ranks
	renewed := func(status byte) []byte { return []byte{12, 0, 1, status, 0, 0, 0} }
	started := slices.Concat(load(1), perform, resolved, expect, perform, replied)
	for _, seed := range [][]byte{
		slices.Concat(offer(0), message(0, 0), perform, written),
		slices.Concat(message(0, 2), offer(0), perform, []byte{7, 0, 0, 0}, written, offer(0)),
		slices.Concat([]byte{0, 0}, message(0, 0), []byte{6, 1, 0, 1, 0, 0}, []byte{9, 200}, tick, offer(0), []byte{4, 0}, perform, perform, written),
		slices.Concat(offer(0), message(0, 0), perform, []byte{8, 0}, perform, []byte{9, 40}, tick, []byte{14, 0, 0, 0}, perform, perform, written),
		slices.Concat(started, received), slices.Concat(started, []byte{13, 0, 1, 9, 9}, perform, perform),
		slices.Concat(started, second, perform, renewed(3), second, perform, renewed(5), second, perform, renewed(6), perform),
		slices.Concat(started, second, perform, []byte{12, 0, 0, 3, 0, 0, 0}, []byte{9, 40}, tick, perform, perform),
		slices.Concat(load(1), perform, resolved, []byte{11, 0, 1}, perform, perform, perform, []byte{12, 0, 2}),
		slices.Concat(load(1), perform, resolved, expect, perform, []byte{12, 0, 3, 2}, perform, perform, perform, resolved, expect, perform, replied, received),
		slices.Concat(claim(1), perform, resolved, perform, renewed(1), load(1), expect, perform, replied, received),
		slices.Concat(claim(1), claim(2), perform, resolved, perform, renewed(6), load(1), []byte{4, 2}, []byte{9, 250, 10}),
		slices.Concat(load(0), load(1), load(2), load(3), load(4), offer(0), offer(1), offer(2), offer(3), offer(4), message(5, 0), message(6, 0), []byte{4, 0}),
		slices.Concat(load(1), perform, found, expect, perform, replied, received), slices.Concat(claim(1), perform, found, load(1), expect, expect, []byte{4, 1}, perform, perform),
		slices.Concat(load(1), perform, []byte{4, 1}, found, perform, perform), slices.Concat(claim(1), perform, found, []byte{9, 250, 10}, perform),
		slices.Concat([]byte{7, 0, 0, 5}, offer(0)), slices.Concat(started, []byte{15, 0, 1, 1, 0, 0, 0}),
	} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, in []byte) {
		if len(in) > 4096 {
			return
		}
		u := newUser(t, in)
		for len(u.in) > 0 {
			u.next()
		}
		u.end()
	})
}

const fuzzTransfers = 4 // MaxTransfers: every limit is near

// user is a machine's user whose choices are bytes.
type user struct {
	t      *testing.T
	in     []byte
	m      *machine.Told
	layout *kv.Layout
	match  *kv.Match // with itself
	now    time.Time
	ledger *ledger
	token  uint64

	memory  []core.Action // of core.OfMemory, to be performed, in order
	control []core.Action // the others, likewise
	asked   []core.Action // performed, the answer is awaited
	armed   []core.TransferID
	writing map[core.TransferID]bool // the transport reads the blocks, or will
	offered map[core.TransferID][][]kv.BlockID
	prompts map[core.TransferID]uint64      // of them
	passed  map[core.Moment]bool            // moments
	holding map[core.TransferID]core.Moment // from which on offers' blocks hold them
	free    map[core.TransferID]core.Moment // from which on loads' blocks may be written
}

func newUser(t *testing.T, in []byte) *user {
	l, err := kv.NewLayout([]kv.Region{
		{Name: "k", Base: 1 << 20, BlockStride: 64, BlockBytes: 64, NumBlocks: 16},
		{Name: "v", Base: 2 << 20, BlockStride: 64, BlockBytes: 32, NumBlocks: 12},
		{Name: "s", Base: 3 << 20, BlockStride: 8, BlockBytes: 8, NumBlocks: 16, Group: 1},
	})
	if err != nil {
		t.Fatal(err)
	}
	match, err := kv.NewMatch(l.Shapes(), l.Shapes())
	if err != nil {
		t.Fatal(err)
	}
	return &user{t: t, in: in, layout: l, match: match, now: time.Unix(0, 0), ledger: newLedger(), writing: map[core.TransferID]bool{}, offered: map[core.TransferID][][]kv.BlockID{}, prompts: map[core.TransferID]uint64{},
		passed: map[core.Moment]bool{0: true}, holding: map[core.TransferID]core.Moment{}, free: map[core.TransferID]core.Moment{},
		m: &machine.Told{Machine: machine.New(l, core.Options{MaxTransfers: fuzzTransfers, Ends: 1 + len(in)%3, Claim: time.Minute, ReportClaims: len(in)%2 == 1})}}
}

// byte is the input's next choice; 0 when there is none.
func (u *user) byte() byte {
	if len(u.in) == 0 {
		return 0
	}
	b := u.in[0]
	u.in = u.in[1:]
	return b
}

func pick[T any](u *user, from []T) T { return from[int(u.byte())%len(from)] }

var longID = core.TransferID(strings.Repeat("x", core.MaxTransferID))

func (u *user) id() core.TransferID {
	return pick(u, []core.TransferID{"a", "b", "c", "d", "e", "f", "", "a\x00", longID, longID + "x"})
}

// peer is never "", which means nobody to the machine: node lets no such one in.
func (u *user) peer() core.AgentID { return pick(u, []core.AgentID{"p", "q", "r", "\xff"}) }

// accountOf: two of the agents have one account.
func accountOf(peer core.AgentID) core.Account {
	if peer == "q" {
		return "p"
	}
	return core.Account(peer)
}

func (u *user) code() core.Code {
	return pick(u, []core.Code{core.OK, core.Cancelled, core.PeerLost, core.Closed, core.Refused, 99, -1, 1 << 40})
}

// blocks has up to 4 groups of up to 17 ids: more than there are.
func (u *user) blocks() [][]kv.BlockID {
	out := make([][]kv.BlockID, u.byte()%5)
	for g := range out {
		out[g] = make([]kv.BlockID, u.byte()%18)
		for i := range out[g] {
			out[g][i] = kv.BlockID(u.byte())
			if out[g][i] == 0xff {
				out[g][i] = ^kv.BlockID(0)
			}
		}
	}
	return out
}

func (u *user) first() []uint32 {
	out := make([]uint32, u.byte()%5)
	for i := range out {
		out[i] = pick(u, []uint32{0, 0, 1, 2, ^uint32(0)})
	}
	return out
}

func (u *user) ids() []core.TransferID {
	out := make([]core.TransferID, u.byte()%5)
	for i := range out {
		out[i] = u.named()
	}
	return out
}

func (u *user) failure() error {
	return pick(u, []error{nil, errors.New("broken"), core.ErrConnectionLost, core.ErrNotExpected})
}

// grantDigest names the grant that every Expect of the fuzz test has.
const grantDigest = "3492ad65d05a973f"

func (u *user) tell(e core.Event) (answer core.Action) { return u.ledger.tell(u.m, u.now, e) }

// next tells one event.
func (u *user) next() {
	switch u.byte() % 17 {
	case 0:
		u.tell(core.Announce{ID: u.id()})
	case 1:
		u.token++
		r := core.OfferRequest{ID: u.id(), Selection: kv.Selection{Blocks: u.blocks()}, Token: u.token, Prompt: u.token % 3, After: u.moment()}
		if u.tell(r) == nil {
			u.holding[r.ID] = r.After
			u.offered[r.ID], u.prompts[r.ID] = r.Blocks, r.Prompt
		}
	case 2:
		u.token++
		u.tell(core.ClaimRequest{ID: u.id(), From: u.target(), Token: u.token})
	case 3:
		u.token++
		r := core.LoadRequest{ID: u.id(), From: u.target(), Selection: kv.Selection{First: u.first(), Blocks: u.blocks()}, Token: u.token, After: u.moment()}
		if len(r.First) == 0 {
			r.First = nil
		}
		if u.tell(r) == nil {
			u.free[r.ID] = r.After
		}
	case 4:
		u.tell(core.Cancel{ID: u.id()})
	case 5:
		id, peer, grant := u.named(), u.peer(), u.byte()%3
		answer := u.tell(core.LoadMessage{ID: id, Peer: peer, Account: accountOf(peer), Grant: []byte{grant}, Prompt: uint64(grant), Selection: kv.Selection{First: u.first(), Blocks: u.blocks(), Regions: pick(u, [][]uint32{nil, nil, nil, {0}, {1, 2}, {5}, {}})}, Lease: time.Duration(int8(u.byte())) * time.Second})
		u.known(answer.(core.AnswerLoad).Code)
	case 6:
		loads, claims := u.ids(), u.ids()
		peer := u.peer()
		answers := u.tell(core.RenewMessage{From: peer, Account: accountOf(peer), Loads: loads, Claims: claims}).(core.AnswerRenew).Answers
		if len(answers) != len(loads)+len(claims) {
			u.t.Errorf("%d answers to a renewal of %q and %q", len(answers), loads, claims)
		}
		for _, a := range answers {
			u.known(a.Code)
			if a.Status > core.StatusRestart {
				u.t.Errorf("status %d", a.Status)
			}
		}
	case 7:
		peer := u.peer()
		u.tell(core.FinishMessage{From: peer, Account: accountOf(peer), ID: u.named(), Code: u.code(), Reason: "said so"})
	case 8:
		u.tell(core.PeerDown{Peer: u.peer()})
	case 9: // up to a minute, also without a tick
		u.now = u.now.Add(time.Duration(u.byte()) * time.Second / 4)
	case 10:
		u.now = u.now.Add(core.TickInterval)
		u.tell(core.Tick{})
	case 11:
		for range 1 + u.byte()%8 {
			u.perform()
		}
	case 12:
		u.answer()
	case 13:
		if len(u.armed) > 0 {
			i := int(u.byte()) % len(u.armed)
			id := u.armed[i]
			u.armed = slices.Delete(u.armed, i, i+1)
			err := u.failure()
			u.tell(core.Received{ID: id, Stats: core.TransferStats{Bytes: uint64(u.byte()), Nanos: int64(u.byte())}, Err: err})
		}
	case 14:
		b := u.byte()
		u.tell(core.ProbeReplied{Peer: u.peer(), Absent: b%2 == 0, Away: b%4 == 0, Err: u.failure()})
	case 15: // a renewal's answer that nobody asked for, or another one than was asked
		r := core.SendRenew{Peer: u.peer(), Loads: u.ids(), Claims: u.ids()}
		u.tell(core.RenewReplied{Renewal: r, Answers: u.answers(len(r.Loads) + len(r.Claims))})
	case 16:
		u.tell(core.RestartMessage{From: u.peer(), ID: u.named(), Digest: pick(u, []string{"", "grant", grantDigest})})
	}
	u.collect()
}

// moment is one of a call, after which others may come that wait for it too.
func (u *user) moment() core.Moment { return core.Moment(u.token / 3 % 4) }

// maxFound is how many parts an engine of the fuzz test falls into.
const maxFound = 3

// found are an engine's ranks. Each gives all of the regions, some of them or none.
func (u *user) found(opened time.Time) (list []core.FoundPart) {
	n, of := 1+int(u.byte())%maxFound, 1+int(u.byte())%3
	for i := range n {
		list = append(list, core.FoundPart{From: u.target(), Share: kv.Share{K: of - 1, Of: of, Source: i}, Peer: pick(u, []core.AgentID{"p", "q", "r"}), Opened: opened})
	}
	for r := range uint32(3) {
		f := &list[int(u.byte())%n]
		f.Regions = append(f.Regions, r)
	}
	return list
}

func (u *user) share() kv.Share {
	b := u.byte()
	return kv.Share{K: int(b % 3), Of: 1 + int(b/3%3), Source: int(b/9) % 3}
}

// named is an id as a peer names it: the transfer's or a part's, well formed or not.
func (u *user) named() core.TransferID {
	id := u.id()
	switch b := u.byte(); {
	case b < 128:
		return id
	case b < 250:
		return machine.PartID(id, u.share())
	}
	return id + pick(u, []core.TransferID{"\x00", "\x000/2", "\x003/2@0", "\x00-1/2@0", "\x000/65@0", "\x0000/2@0", "\x000/1@99999"})
}

func whole(id core.TransferID) core.TransferID {
	s, _, _ := strings.Cut(string(id), "\x00")
	return core.TransferID(s)
}

func (u *user) target() core.Target {
	return pick(u, []core.Target{{Bootstrap: "http://p:1"}, {Bootstrap: "http://q:1"}, {EngineID: "e", DPRank: -1}, {}})
}

// answers are for n transfers, or for another number.
func (u *user) answers(n int) []core.Answer {
	if u.byte()%8 == 0 {
		n = int(u.byte() % 8)
	}
	out := make([]core.Answer, n)
	for i := range out {
		out[i] = core.Answer{Status: core.Status(u.byte() % 10), Code: u.code(), Reason: "as it says"}
	}
	return out
}
