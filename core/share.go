package core

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/kvconn/kvconn/internal/fault"
)

// Share says which part of a transfer goes between one P agent and one D agent
// of engines with unequal ranks. Each part is a transfer of its own to all that
// is below the engine's call: it has an id of its own (Part), and with it its own
// claim, lease, grant and fence. Machine joins the parts of what the engine
// named by one id: it gets one Report for them.
type Share struct {
	K, Of  int // it is share K, from 0, of as many D agents as load from this P agent
	Source int // number of the P agent among those of its engine, the same at all D agents: its rank
}

// Limits of a Share.
const (
	MaxShares = 64 // of one P agent's half, and P agents that one D loads from
	maxSource = 1 << 16
)

// partMark stands between a transfer's id and its share: no id holds a NUL.
const partMark = "\x00"

// MaxPartID is the longest id that Part gives.
const MaxPartID = MaxTransferID + 16

func (s Share) check() error {
	if s.Of < 1 || s.Of > MaxShares || s.K < 0 || s.K >= s.Of || s.Source < 0 || s.Source >= maxSource {
		return fmt.Errorf("share %d of %d from source %d: want 0 to %d of at most %d from a source below %d", s.K, s.Of, s.Source, s.Of-1, MaxShares, maxSource)
	}
	return nil
}

// Part is the id of a share of a transfer, on the wire and in the transports of
// both sides.
func (s Share) Part(id TransferID) TransferID {
	return TransferID(fmt.Sprintf("%s%s%d/%d@%d", id, partMark, s.K, s.Of, s.Source))
}

// splitPart is the reverse of Part; ok says that it is one, and well formed.
func splitPart(part TransferID) (id TransferID, s Share, ok bool) {
	base, text, found := strings.Cut(string(part), partMark)
	if !found || len(part) > MaxPartID {
		return "", Share{}, false
	}
	k, rest, _ := strings.Cut(text, "/")
	of, source, _ := strings.Cut(rest, "@")
	for _, f := range []struct {
		text string
		to   *int
	}{{k, &s.K}, {of, &s.Of}, {source, &s.Source}} {
		n, err := strconv.ParseUint(f.text, 10, 16)
		if err != nil {
			return "", Share{}, false
		}
		*f.to = int(n)
	}
	id = TransferID(base)
	return id, s, checkID(id) == nil && s.check() == nil && s.Part(id) == part
}

func isPart(id TransferID) bool { return strings.Contains(string(id), partMark) }

// checkWireID is checkID for what a peer names: an id, or a part of one.
func checkWireID(id TransferID) error {
	if _, _, ok := splitPart(id); ok {
		return nil
	}
	return checkID(id)
}

// joined is what the parts of one half have come to so far.
type joined struct {
	left   int // parts that have not ended
	code   Code
	reason string
	state  string // in which the part ended that the code is from
	peer   AgentID
	from   Target
	wait   time.Duration
	stats  TransferStats
}

// add takes a part's report; the first that failed decides.
func (j *joined) add(r *Report) {
	j.left--
	if j.code == OK {
		j.code, j.reason, j.state, j.peer, j.from = r.Code, r.Reason, r.State, r.Peer, r.From
	}
	j.wait = max(j.wait, r.Wait)
	j.stats.Bytes += r.Stats.Bytes
	j.stats.Segments += r.Stats.Segments
	j.stats.Nanos = max(j.stats.Nanos, r.Stats.Nanos)
	j.stats.Via = cmp.Or(j.stats.Via, r.Stats.Via)
}

// --- D's half -------------------------------------------------------------------

// join is a claim or load of several parts.
type join struct {
	joined
	id      TransferID
	token   uint64
	parts   []TransferID
	of      Target      // the engine that the parts were found to be of
	found   []FoundPart // they; nil if the engine has named them itself
	claim   bool
	started time.Time
	blocks  int
	adding  bool    // the parts are being begun
	lost    *Report // of a claim: what it came to
}

func (m *Machine) checkParts(id TransferID, n int, at func(i int) (Target, Share)) ([]TransferID, error) {
	if n > MaxShares {
		return nil, fmt.Errorf("%w: load %q has %d parts, at most %d are supported", ErrInvalid, string(id), n, MaxShares)
	}
	parts := make([]TransferID, n)
	for i := range parts {
		from, share := at(i)
		if err := m.checkLoad(id, from); err != nil {
			return nil, err
		}
		if err := share.check(); err != nil {
			return nil, fmt.Errorf("%w: load %q, part %d: %w", ErrInvalid, string(id), i, err)
		}
		parts[i] = share.Part(id)
		if slices.Contains(parts[:i], parts[i]) {
			return nil, fmt.Errorf("%w: load %q, part %d is share %d of %d from source %d, as another part is", ErrInvalid, string(id), i, share.K, share.Of, share.Source)
		}
	}
	return parts, nil
}

// claimParts is Claim of several parts.
func (m *Machine) claimParts(now time.Time, r ClaimRequest) error {
	parts, err := m.checkParts(r.ID, len(r.Parts), func(i int) (Target, Share) { return r.Parts[i].From, r.Parts[i].Share })
	switch old := m.loads[r.ID]; {
	case err != nil:
		return err
	case old != nil && !old.given || m.joins[r.ID] != nil:
		return nil // claimed or loaded already
	case m.claims >= m.opt.MaxTransfers:
		return m.overload("claims")
	}
	m.count.Claimed++
	m.claimAnew(r.ID)
	m.claims++
	j := &join{id: r.ID, parts: parts, claim: true, joined: joined{left: len(parts)}}
	m.joins[r.ID] = j
	for i, p := range r.Parts {
		m.addClaim(now, &load{id: parts[i], from: p.From, token: r.Token, join: j})
	}
	return nil
}

// loadParts is Load of several parts.
func (m *Machine) loadParts(now time.Time, r LoadRequest) error {
	parts, err := m.checkParts(r.ID, len(r.Parts), func(i int) (Target, Share) { return r.Parts[i].From, r.Parts[i].Share })
	if err == nil {
		err = m.checkPartsBlocks(&r)
	}
	if err != nil {
		return err
	}
	old := m.joins[r.ID]
	if old != nil && !old.claim || m.loads[r.ID] != nil && m.loads[r.ID].owes() {
		return duplicateLoad(r.ID)
	}
	blocks := m.layout.distinct(&r)
	if m.named() >= m.opt.MaxTransfers && blocks > 0 {
		return m.overload("loads")
	}
	m.count.Loaded++
	if m.loadLost(&r, blocks) {
		return nil
	}
	m.beginParts(now, &join{id: r.ID, parts: parts, token: r.Token, blocks: blocks}, r.Parts, &r)
	return nil
}

// beginParts begins the parts of a load, in place of the claim that there may be.
func (m *Machine) beginParts(now time.Time, j *join, from []LoadPart, r *LoadRequest) {
	old := m.joins[j.id]
	j.started, j.adding, j.left = now, true, len(j.parts)
	m.joins[j.id] = j
	if old != nil {
		m.claims--
		for _, id := range old.parts {
			if ld := m.loads[id]; ld != nil && ld.claim && !slices.Contains(j.parts, id) {
				m.endLoad(now, ld, Cancelled, otherEngine, true)
			}
		}
	} else if ld := m.loads[j.id]; ld != nil && ld.claim {
		m.endLoad(now, ld, Cancelled, otherEngine, true)
	}
	if ld := m.loads[j.id]; ld != nil { // cancelled, and void: P hears of the id by this load
		m.reportLoad(now, ld)
	}
	for i, p := range from {
		m.addLoad(now, &load{id: j.parts[i], from: p.From, first: p.First, blocks: p.Blocks, tokens: r.Tokens, regions: p.Regions, prompt: fault.Pick("parts-of-any-prompt", r.Prompt, 0), join: j})
	}
	m.partsBegun(now, j)
}

// partsBegun ends the others if one has failed while they were being begun.
func (m *Machine) partsBegun(now time.Time, j *join) {
	j.adding = false
	switch {
	case j.lost != nil:
		m.tellPartsLost(now, j)
	case j.code != OK:
		m.endParts(now, j, Cancelled, j.reason)
	}
}

const otherEngine = "the decode engine loads it otherwise"

func duplicateLoad(id TransferID) error {
	return fmt.Errorf("%w: transfer %q is being loaded already; give each request a transfer_id of its own", ErrDuplicate, string(id))
}

// checkPartsBlocks: each part's blocks are good, and no two parts write the same
// bytes.
func (m *Machine) checkPartsBlocks(r *LoadRequest) error {
	for i := range r.Parts {
		p := &r.Parts[i]
		err := m.checkBlocks(p.First, p.Blocks, r.Tokens)
		if err == nil {
			err = checkRegions(p.Regions, len(m.layout.Regions))
		}
		for g := range p.Blocks {
			if err == nil && len(p.Blocks[g]) > 0 && !m.layout.has(p.Regions, uint32(g)) {
				err = fmt.Errorf("blocks of group %d, of which it has no region", g)
			}
		}
		for k := 0; err == nil && k < i; k++ {
			err = m.layout.checkApart(p, &r.Parts[k])
		}
		if err != nil {
			return fmt.Errorf("%w: load %q, part %d: %w", ErrInvalid, string(r.ID), i, err)
		}
	}
	return nil
}

// has says whether there are regions of a group in the list.
func (l *Layout) has(regions []uint32, group uint32) bool {
	return regions == nil || slices.ContainsFunc(regions, func(r uint32) bool { return l.Regions[r].Group == group })
}

func (l *Layout) checkApart(a, b *LoadPart) error {
	both := make([][]BlockID, len(l.Groups))
	for i := range l.Regions {
		g := l.Regions[i].Group
		if both[g] != nil || a.Regions != nil && !slices.Contains(a.Regions, uint32(i)) || b.Regions != nil && !slices.Contains(b.Regions, uint32(i)) {
			continue
		}
		if int(g) < len(a.Blocks) && int(g) < len(b.Blocks) {
			both[g] = slices.Concat(a.Blocks[g], b.Blocks[g])
		}
	}
	if err := l.CheckUnique(both); err != nil {
		return fmt.Errorf("another part writes the same bytes: %w", err)
	}
	return nil
}

// distinct counts the engine's blocks of a load whose parts may share some.
func (l *Layout) distinct(r *LoadRequest) int {
	n := 0
	for g := range l.Groups {
		seen := map[BlockID]bool{}
		for i := range r.Parts {
			if g < len(r.Parts[i].Blocks) {
				for _, b := range r.Parts[i].Blocks[g] {
					seen[b] = true
				}
			}
		}
		n += len(seen)
	}
	return n
}

// partFails: the first part that fails ends the others, while it is fenced itself.
func (m *Machine) partFails(now time.Time, ld *load) {
	j := ld.join
	if j == nil || ld.claim || j.code != OK || ld.code == OK {
		return
	}
	j.code, j.reason, j.state, j.peer, j.from = ld.code, ld.reason, ld.ended.String(), ld.peer, ld.from
	if !j.adding && !fault.On("others-go-on") {
		m.endParts(now, j, Cancelled, ld.reason)
	}
}

// partLoaded takes a part's report. The engine's blocks are free when no byte of
// any of them can land.
func (m *Machine) partLoaded(now time.Time, j *join, r *Report) {
	failed := j.code == OK && r.Code != OK
	j.add(r)
	if failed && !j.adding {
		m.endParts(now, j, Cancelled, r.Reason)
	}
	if j.left > fault.Pick("first-source-ends", 0, len(j.parts)-1) || m.joins[j.id] != j {
		return
	}
	delete(m.joins, j.id)
	elapsed := now.Sub(j.started)
	m.act(Report{ID: j.id, Parts: j.parts, Side: SideLoad, Token: j.token, Code: j.code, Reason: j.reason, Blocks: j.blocks,
		Wait: max(elapsed-time.Duration(j.stats.Nanos), 0), Elapsed: elapsed, State: j.state, Peer: j.peer, From: j.from, Stats: j.stats})
}

// endParts ends those that have not ended. The code is what P is told: also one
// that is still being looked up.
func (m *Machine) endParts(now time.Time, j *join, code Code, reason string) {
	for _, id := range j.parts {
		if ld := m.loads[id]; ld != nil && ld.join == j {
			if fault.On("others-not-fenced") {
				ld.code, ld.reason = code, reason
				m.act(Revoke{ID: id})
				m.reportLoad(now, ld)
				continue
			}
			m.endLoad(now, ld, code, reason, true)
		}
	}
}

// claimEnded: a part's claim is no more.
func (m *Machine) claimEnded(j *join) {
	if j.left--; j.left == 0 && m.joins[j.id] == j {
		delete(m.joins, j.id)
		m.claims--
	}
}

// --- P's half -------------------------------------------------------------------

// whole is an offer that several D agents have their shares of, or that one D has
// among other P agents'. Each part is an offer of its own; the engine's blocks
// are free when all have ended.
type whole struct {
	joined
	id      TransferID
	of      int
	source  int
	parts   []TransferID
	offered time.Time // zero: the engine has not
	token   uint64
	blocks  int
}

// wholeOf makes sure that a part named by a peer is one of those that this
// transfer has here: the first to come says how many they are. The error is what
// the peer is told. An id that is no part's needs nothing.
func (m *Machine) wholeOf(now time.Time, part TransferID) (Code, string) {
	id, share, ok := splitPart(part)
	if !ok {
		if w := m.wholes[part]; w != nil {
			return Refused, fmt.Sprintf("transfer %q is being loaded in %d shares already", string(part), w.of)
		}
		return OK, ""
	}
	if w := m.wholes[id]; w != nil {
		if w.of != share.Of || w.source != share.Source {
			return Refused, fmt.Sprintf("transfer %q is being loaded in %d shares from source %d already, not in %d from %d", string(id), w.of, w.source, share.Of, share.Source)
		}
		return OK, ""
	}
	if t, gone := m.ended.byID[id]; gone {
		if t.code == OK || t.code == PeerCancelled {
			return Refused, fmt.Sprintf("transfer %q has ended already (%s); each request needs a transfer_id of its own", string(id), t.code)
		}
		return peerCode(t.code), t.reason
	}
	base := m.offers[id]
	switch {
	case m.closed:
		return Closed, "the prefill agent is closing"
	case base != nil && base.peer != "":
		return Refused, fmt.Sprintf("transfer %q is being loaded by decode agent %s already", string(id), base.peer)
	case base == nil && m.early+share.Of > m.opt.MaxTransfers, base != nil && len(m.offers)-m.early+share.Of-1 > m.opt.MaxTransfers:
		return Refused, fmt.Sprintf("%d shares of transfer %q do not fit beside %d others", share.Of, string(id), len(m.offers))
	}
	m.begin(now)
	w := &whole{id: id, of: share.Of, source: share.Source}
	m.wholes[id] = w
	for k := range share.Of {
		of := &offer{id: Share{k, share.Of, share.Source}.Part(id), whole: w, deadline: now.Add(m.opt.EarlyLoad)}
		w.parts = append(w.parts, of.id)
		w.left++
		if base != nil {
			of.state, of.token, of.first, of.blocks, of.offered, of.deadline = base.state, base.token, slices.Clone(base.first), clone(base.blocks), base.offered, base.deadline
			of.ready, of.prompt = slices.Clone(base.ready), fault.Pick("shares-of-any-prompt", base.prompt, 0)
		} else {
			m.early++
		}
		m.offers[of.id] = of
	}
	if base != nil {
		w.offered, w.token, w.blocks = base.offered, base.token, countBlocks(base.blocks)
		delete(m.offers, id)
	}
	for _, p := range w.parts { // D's word that it needs no more may have come before
		if t, gone := m.ended.byID[p]; gone {
			of := m.offers[p]
			of.code, of.reason = t.code, t.reason
			m.reportOffer(now, of, TransferStats{})
		}
	}
	return OK, ""
}

func (m *Machine) announceParts(now time.Time, w *whole) error {
	early := m.earlyOf(w)
	if len(m.offers)-m.early+len(early) > m.opt.MaxTransfers {
		return m.overload("offers")
	}
	for _, of := range early {
		m.leaveEarly(of)
		if of.state, of.deadline = offerPrefill, (time.Time{}); of.peer != "" {
			of.deadline = now.Add(m.lease(of))
		}
	}
	return nil
}

func (m *Machine) offerParts(now time.Time, w *whole, r OfferRequest) error {
	early := m.earlyOf(w)
	if len(m.offers)-m.early+len(early) > m.opt.MaxTransfers {
		return m.overload("offers")
	}
	for _, of := range early {
		m.leaveEarly(of)
	}
	m.count.Offered++
	w.offered, w.token, w.blocks = now, r.Token, countBlocks(r.Blocks)
	for _, of := range m.live(w) {
		m.ready(now, of, r)
	}
	return nil
}

func (m *Machine) earlyOf(w *whole) []*offer {
	return slices.DeleteFunc(m.live(w), func(of *offer) bool { return of.state != offerEarly })
}

// live lists the parts that have not ended.
func (m *Machine) live(w *whole) (out []*offer) {
	for _, id := range w.parts {
		if of := m.offers[id]; of != nil {
			out = append(out, of)
		}
	}
	return out
}

// partOffered takes a part's end.
func (m *Machine) partOffered(now time.Time, w *whole, r *Report) {
	if w.add(r); w.left > 0 && !(fault.On("first-share-ends") && w.left >= w.of-1) {
		m.wanted(w.id)
		return
	}
	delete(m.wholes, w.id)
	m.reportWant(w.id, w.code, w.reason, 0)
	offered := !w.offered.IsZero()
	m.ended.add(w.id, w.code, w.reason, offered)
	m.ended.moved(w.id, w.stats)
	if offered {
		m.act(Report{ID: w.id, Parts: w.parts, Side: SideOffer, Token: w.token, Code: w.code, Reason: w.reason, Blocks: w.blocks,
			Wait: w.wait, Elapsed: now.Sub(w.offered), State: w.state, Peer: w.peer, Stats: w.stats})
	}
}

// checkJoined checks the parts; only in builds with the tag "invariants".
func (m *Machine) checkJoined(must func(ok bool, format string, args ...any)) {
	for id, j := range m.joins {
		left := 0
		for _, part := range j.parts {
			if ld := m.loads[part]; ld != nil && ld.join == j && (ld.claim || ld.owes()) {
				left++
				must(ld.claim == j.claim, "part %q is claimed %v, its load %v", part, ld.claim, j.claim)
			}
		}
		must(j.id == id && left == j.left && left > 0, "load %q has %d of %d parts, counted %d", id, left, len(j.parts), j.left)
		must(m.loads[id] == nil || m.loads[id].given, "load %q is whole and in parts", id)
	}
	for id, w := range m.wholes {
		live := m.live(w)
		must(w.id == id && len(live) == w.left && len(live) > 0 && len(w.parts) == w.of, "offer %q has %d of %d parts, counted %d", id, len(live), w.of, w.left)
		must(m.offers[id] == nil, "offer %q is whole and in parts", id)
		for _, of := range live {
			must(of.whole == w && of.offered.Equal(w.offered), "part %q of offer %q in state %v", of.id, id, of.state)
		}
	}
	for id, of := range m.offers {
		must(isPart(id) == (of.whole != nil) && (of.whole == nil || m.wholes[of.whole.id] == of.whole), "offer %q is a part of none", id)
	}
	for id, ld := range m.loads {
		must(isPart(id) == (ld.join != nil), "load %q is a part of none", id)
		must(ld.join == nil || ld.given || m.joins[ld.join.id] == ld.join, "load %q is a part of what has ended", id)
	}
}
