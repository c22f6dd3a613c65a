// The scheduler above an agent: it takes blocks for halves, checks what they hold, and uses them again at once.

package sim

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/kv"
)

func compare(a, b core.TransferID) int { return strings.Compare(string(a), string(b)) }

// engine is the scheduler above an agent: it gives transfers blocks of a small
// pool and uses them again as soon as they are reported.
type engine struct {
	loads     map[uint64]*half
	offers    map[uint64]*half
	loading   map[core.TransferID]uint64       // token of the newest load
	offering  map[core.TransferID]uint64       // token of the newest offer
	towards   map[partOf]core.AgentID          // the P agent that this is to be asked of
	elsewhere map[partOf]int                   // how often the way of a write was not there
	askedAt   map[partOf]time.Duration         // when it last began to be asked
	promises  map[partOf]core.AgentID          // P has said that it has this
	complete  map[uint64]int                   // of how many parts the transport has said that all bytes are there
	released  map[core.TransferID]bool         // P has said that it has given this claim up
	claims    map[core.TransferID]core.AgentID // P has answered this claim
	aborted   map[core.TransferID]bool
	dropped   map[core.TransferID]uint64      // cancelled, and neither claimed nor loaded since: the look-up that was under way
	lost      map[core.TransferID]core.Report // of claims, and nothing was claimed since
	reported  int                             // halves
	waiting   []*want                         // for blocks, in order
	computing map[core.TransferID]*computation
	readers   []reader
	asleep    bool                     // what was begun before has not ended: no block is given
	cancelled map[core.TransferID]bool // by this side, ever
	remapped  map[uint64]bool          // by token: it was told that the memory is another
	owners    []uint64                 // tokens of the offers that the Writes in the node's queue are of
}

// partOf is a load, or a part of it.
type partOf struct {
	token uint64
	id    core.TransferID
}

type half struct {
	id       core.TransferID
	blocks   []kv.BlockID
	source   func(layer int, head uint64) int // the number of the prefill rank that a block's item is from
	upTo     int                              // of the prompt's positions; blocks beyond are not loaded; 0: all of the blocks
	parts    int                              // that have blocks
	needsAll bool                             // there are no others: each prefill rank is needed
	first    int
	began    time.Duration
	dropped  bool        // this side has cancelled it
	lost     core.Report // of the claim before, which the load must come to as well
}

// want is a request that waits for blocks.
type want struct {
	id    core.TransferID
	first int // position in the prompt of the first
	n     int
	until time.Duration // then it is given up
	got   func(blocks []kv.BlockID) error
	none  func()
}

func (e *engine) init() {
	e.loads, e.offers = map[uint64]*half{}, map[uint64]*half{}
	e.loading, e.offering = map[core.TransferID]uint64{}, map[core.TransferID]uint64{}
	e.elsewhere = map[partOf]int{}
	e.towards, e.askedAt = map[partOf]core.AgentID{}, map[partOf]time.Duration{}
	e.promises, e.aborted = map[partOf]core.AgentID{}, map[core.TransferID]bool{}
	e.computing = map[core.TransferID]*computation{}
	e.complete, e.released = map[uint64]int{}, map[core.TransferID]bool{}
	e.claims, e.dropped = map[core.TransferID]core.AgentID{}, map[core.TransferID]uint64{}
	e.lost = map[core.TransferID]core.Report{}
	e.cancelled, e.remapped = map[core.TransferID]bool{}, map[uint64]bool{}
}

// take finds free blocks for the engine, or nil if there are not enough. They are for the
// prompt's blocks from first on.
func (h *host) take(first, n int) []kv.BlockID {
	if h.agent.asleep {
		return nil
	}
	if ring := ringOf(h.index); ring > 0 {
		return h.takeRing(ring, first, n)
	}
	var out []kv.BlockID
	for _, i := range h.w.rnd.Perm(len(h.mem)) {
		if h.mem[i].owner == 0 && len(out) < n {
			out = append(out, kv.BlockID(i))
		}
	}
	if len(out) < n {
		return nil
	}
	return out
}

// own gives blocks to a half. Nothing is in them.
func (h *host) own(blocks []kv.BlockID, token uint64) {
	for _, b := range blocks {
		h.mem[b] = block{owner: token}
		h.each(b, func(_, _ int, _ uint64, c *content) { *c = content{} })
	}
}

// wait queues for blocks.
func (a *agent) wait(x *want) {
	a.waiting = append(a.waiting, x)
	a.after(x.until-a.w.now, func() {
		if i := slices.Index(a.waiting, x); i >= 0 {
			a.waiting = slices.Delete(a.waiting, i, i+1)
			a.w.acted(a.w.now)
			x.none()
		}
	})
	a.serveWaiting()
}

// serveWaiting gives free blocks to the request that waits longest.
func (a *agent) serveWaiting() {
	for len(a.waiting) > 0 && !a.closing {
		x := a.waiting[0]
		blocks := a.host.take(x.first, x.n)
		if blocks == nil {
			return
		}
		a.waiting = a.waiting[1:]
		a.w.acted(a.w.now)
		if err := x.got(blocks); errors.Is(err, core.ErrOverload) {
			a.waiting = slices.Insert(a.waiting, 0, x) // tried again with the next report, or given up
			return
		}
	}
}

// dropWaiting removes a request that was aborted.
func (a *agent) dropWaiting(id core.TransferID) bool {
	n := len(a.waiting)
	a.waiting = slices.DeleteFunc(a.waiting, func(x *want) bool { return x.id == id })
	return len(a.waiting) < n
}

// load asks for a transfer from block first on; nil blocks let go of it.
func (a *agent) load(dl *deal, k, first int, blocks []kv.BlockID) error {
	w, id := a.w, dl.id
	w.token++
	token := w.token
	r := core.LoadRequest{ID: id, From: w.engine(dl), Token: token, Prompt: w.prompts[id].d}
	h := &half{id: id, blocks: blocks, first: first, began: w.now, lost: a.lost[id]}
	if blocks != nil {
		r.Blocks, r.First = [][]kv.BlockID{blocks}, []uint32{uint32(w.plan.begin + first)}
	}
	of := w.regionsOf(dl, k)
	for i := range of {
		if len(of[i]) > 0 {
			h.parts++
		}
	}
	h.source = func(layer int, head uint64) int {
		region := slices.Index(a.host.layers, layer)
		i := slices.IndexFunc(dl.ps, func(p *host) bool { return p.has(head) && slices.Contains(of[slices.Index(dl.ps, p)], uint32(region)) })
		return dl.ps[i].number
	}
	h.needsAll = h.parts == len(dl.ps)
	if blocks == nil {
		w.faults["empty"]++
		h.needsAll = false
	} else {
		w.countCuts(dl, a.host)
		// Without the prompt's length P must have all that the blocks have room for.
		if n := a.host.size(); w.plan.cut && first*n < w.plan.tokens && ((first+len(blocks))*n > w.offered() || w.chance(0.7)) {
			r.Tokens, h.upTo = []uint32{uint32(w.plan.tokens)}, w.reaches(a.host)
		}
	}
	var after *moment
	if blocks != nil {
		after = a.momentOf(func() {})
		r.After = after.number()
	}
	text := fmt.Sprintf(" at=%s from=%s%s%s%s%s%s", r.From.Bootstrap, r.From.EngineID, optional("first", list(r.First)), groups(r.Blocks), optional("tokens", list(r.Tokens)), prompt(r.Prompt), after.said())
	w.acted(w.now)
	defer func() {
		if h := a.loads[token]; h != nil {
			a.checkLoaded(h, token)
		}
	}()
	return a.try(r, func() {
		delete(a.dropped, id)
		delete(a.ledger.claims, id)
		a.loads[token] = h
		a.loading[id] = token
		a.host.own(blocks, token)
		for _, b := range blocks {
			a.host.mem[b].reads = after
		}
		a.ledger.accepted(id, token)
	}, "load %s token=%d%s", id, token, text)
}

func (a *agent) claim(dl *deal) {
	a.w.acted(a.w.now)
	a.w.faults["claim"]++
	from := a.w.engine(dl)
	r := core.ClaimRequest{ID: dl.id, From: from}
	delete(a.dropped, dl.id)
	a.w.token++
	r.Token = a.w.token
	before := a.m.Untold()
	_ = a.try(r, func() {
		if a.m.Untold() > before { // it is no other's word
			a.ledger.claims[r.ID] = r.Token
			delete(a.lost, r.ID)
		}
	}, "claim %s token=%d at=%s from=%s", dl.id, r.Token, from.Bootstrap, from.EngineID)
}

func (a *agent) offer(id core.TransferID, blocks []kv.BlockID) error {
	a.w.token++
	token := a.w.token
	a.host.own(blocks, token)
	p := &computation{id: id, token: token, blocks: blocks}
	err := a.offerOf(id, blocks, a.w.prompts[id].p, token, a.fill(p, a.host.allRegions(), len(blocks)))
	if err != nil {
		a.host.own(blocks, 0)
	}
	return err
}

// offerOf offers blocks that hold a transfer after a moment.
func (a *agent) offerOf(id core.TransferID, blocks []kv.BlockID, of, token uint64, after *moment) error {
	w := a.w
	r := core.OfferRequest{ID: id, Selection: kv.Selection{First: w.begin(), Blocks: [][]kv.BlockID{blocks}}, Token: token, Prompt: of, After: after.number()}
	a.misplaced(id, blocks)
	w.acted(w.now)
	defer func() { a.checkOffered(id, token) }()
	return a.try(r, func() {
		a.offering[id] = token
		a.offers[token] = &half{id: id, blocks: blocks, began: w.now}
		a.ledger.accepted(id, token)
	}, "offer %s token=%d%s%s%s%s", id, token, optional("first", list(r.First)), groups(r.Blocks), prompt(of), after.said())
}

func (a *agent) announce(id core.TransferID) error {
	a.w.acted(a.w.now)
	return a.try(core.Announce{ID: id}, func() {}, "announce %s", id)
}

func (a *agent) cancel(id core.TransferID) {
	a.w.acted(a.w.now)
	a.expectAbort(id)
	a.cancelled[id] = true
	if state := a.m.StateOf(core.SideLoad, id); state == "resolving" || state == "relocating" {
		a.dropped[id] = a.asked[id]
	}
	delete(a.ledger.claims, id)
	_ = a.try(core.Cancel{ID: id}, func() {}, "cancel %s", id)
}

// report gives the blocks back to the engine.
func (a *agent) report(r core.Report) {
	w := a.w
	a.reported++
	how := r.Side.String() + " " + r.Code.String()
	w.codes[how]++
	w.states[how+" "+r.State]++
	a.checkReason(r)
	a.checkRemapped(r)
	if r.Side == core.SideClaim {
		a.hearLost(r)
		return
	}
	var kept []kv.BlockID
	if h := a.loads[r.Token]; h != nil {
		delete(a.loads, r.Token)
		a.checkLost(h, r)
		maps.DeleteFunc(a.promises, func(k partOf, _ core.AgentID) bool { return k.token == r.Token })
		maps.DeleteFunc(a.towards, func(k partOf, _ core.AgentID) bool { return k.token == r.Token })
		maps.DeleteFunc(a.askedAt, func(k partOf, _ time.Duration) bool { return k.token == r.Token })
		for _, e := range a.armed {
			if e.token == r.Token {
				w.fault(r.ID, "%s: the load of %q is reported while the transport is armed", a.id, r.ID)
			}
		}
		if r.Code == core.OK && len(h.blocks) > 0 && a.complete[r.Token] < h.parts {
			w.fault(r.ID, "%s: the load of %q ended well before the transport had said so", a.id, r.ID)
		}
		if r.Code == core.OK {
			a.check(h, "ended well")
			if w.chance(0.5) {
				kept = h.blocks
				w.token++
				token := w.token
				a.decode(h, token)
				a.after(w.upTo(500*time.Millisecond), func() {
					a.check(h, "is decoded")
					a.free(token)
				})
			}
		}
	}
	if a.offers[r.Token] != nil {
		delete(a.offers, r.Token)
		maps.DeleteFunc(a.elsewhere, func(k partOf, _ int) bool { return k.token == r.Token })
		for _, wr := range a.writes {
			if wr.token == r.Token {
				w.fault(r.ID, "%s: the offer of %q is reported while the transport reads its blocks", a.id, r.ID)
			}
		}
	}
	if kept == nil {
		a.free(r.Token)
	}
}

// decode keeps blocks that were loaded for the engine's own use.
func (a *agent) decode(h *half, token uint64) {
	for _, b := range h.blocks {
		a.host.mem[b].owner = token
	}
}

// check says whether blocks hold what the request needs.
func (a *agent) check(h *half, what string) {
	for i, b := range h.blocks {
		a.host.each(b, func(r, t int, head uint64, holds *content) {
			want := content{}
			if pos := (h.first+i)*a.host.size() + t; h.upTo == 0 || pos < h.upTo {
				want = content{h.id, r, pos, head, h.source(r, head)}
			}
			if *holds != want {
				a.w.fault(h.id, "%s: %q %s, but layer %d of block %d holds %v at token %d, want %v", a.id, h.id, what, r, b, *holds, t, want)
			}
		})
	}
}

// free makes a token's blocks the next request's.
func (a *agent) free(token uint64) {
	for i := range a.host.mem {
		if a.host.mem[i].owner == token {
			a.host.own([]kv.BlockID{kv.BlockID(i)}, 0)
		}
	}
	if len(a.waiting) > 0 {
		a.after(0, a.serveWaiting)
	}
}
