package local

import (
	"fmt"
	"maps"
	"net"
	"slices"
	"sync"
	"syscall"
	"time"

	"go.uber.org/zap"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/hostmem"
	"github.com/kvconn/kvconn/internal/fault"
	"github.com/kvconn/kvconn/internal/ratelog"
	"github.com/kvconn/kvconn/internal/sleep"
	"github.com/kvconn/kvconn/kv"
)

// sender is P's half: the admitted D agents, and the transfers that they copy. Its lock is taken
// within no other but a link's.
type sender struct {
	t       *Transport
	mu      sync.Mutex
	peers   map[core.AgentID]*taker
	byName  map[random]*taker // the same, by the names of their tickets
	byID    map[core.TransferID]*outbound
	links   int
	pairs   []kv.Pair // room for those of plans
	pending pendingConns
	lines   ratelog.Limit
	closed  bool
}

// taker is an admitted D agent.
type taker struct {
	id      core.AgentID
	ticket  random
	link    *outLink      // nil: it is not connected
	lost    int           // validity pages that are lost because of it
	meeting *net.UnixConn // on which it opens memories, after it has proved itself
	refused string        // why its last meeting failed: it tries again, and is not worth a warning each time
	methods methodSet     // see How
	byGrant map[random]*outbound
}

// outLink is a socket that a taker has opened.
type outLink struct {
	*link
	taker  *taker
	spaces spaces   // the memory that D has opened
	shared *handout // the device memory that P has told D; nil: none
	old    bool     // other memory is there now than shared says, so nothing begins on this link; guarded by sender.mu
	unread func()   // takes back the leave of D's process to read this one; nil: it needs no leave

	// Guarded by sender.mu.
	credit int                      // how many more runs P may say
	queue  []*outbound              // writes that have runs to say; served in turn
	late   map[random]*validityPage // the validity pages of stopped writes whose stop D has not answered in time, by the writes' grants
}

func (s *sender) init(t *Transport) {
	s.t = t
	s.peers, s.byName, s.byID = map[core.AgentID]*taker{}, map[random]*taker{}, map[core.TransferID]*outbound{}
}

func (t *Transport) pause(d time.Duration) bool { return sleep.For(t.ctx, d) == nil }

// Admit implements core.Transport.
func (t *Transport) Admit(peer core.AgentID) ([]byte, error) {
	s := &t.sender
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil, errClosed
	}
	tk := s.peers[peer]
	if tk == nil {
		tk = &taker{id: peer, ticket: newRandom(), byGrant: map[random]*outbound{}}
		s.peers[peer], s.byName[tk.ticket.name()] = tk, tk
	}
	return slices.Clone(tk.ticket[:]), nil
}

// dismiss forgets a D agent. Its writes end when D copies no more.
func (s *sender) dismiss(peer core.AgentID) {
	s.mu.Lock()
	tk := s.peers[peer]
	if tk == nil || s.closed {
		s.mu.Unlock()
		return
	}
	s.t.wg.Add(1) // Close waits for the outcomes that are told below
	defer s.t.wg.Done()
	delete(s.peers, peer)
	delete(s.byName, tk.ticket.name())
	if tk.meeting != nil {
		_ = tk.meeting.Close()
	}
	s.mu.Unlock()
	s.leave(tk, fmt.Errorf("local: decode agent %s was dismissed: %w", peer, core.ErrConnectionLost))
}

// leave ends all that goes to a D agent.
func (s *sender) leave(tk *taker, err error) {
	s.mu.Lock()
	var alone []*outbound
	for _, out := range tk.byGrant {
		if out.link == nil {
			alone = append(alone, out)
			s.forget(out, err)
		}
	}
	link := tk.link
	s.mu.Unlock()
	for _, out := range alone {
		s.tell(out)
	}
	if link != nil {
		s.part(link, err)
	}
}

// part ends a link from this side. D hears it by the socket, and closes its own end when it
// copies no more.
func (s *sender) part(ol *outLink, err error) {
	if !ol.fail(err) {
		return
	}
	var unheard []*outbound
	s.mu.Lock()
	if !s.closed { // else who has called is waited for
		s.t.wg.Add(1)
		defer s.t.wg.Done()
	}
	for _, out := range ol.taker.byGrant {
		if out.link == ol && s.halt(out, err) {
			unheard = append(unheard, out)
		}
	}
	s.mu.Unlock()
	for _, out := range unheard {
		s.tell(out)
	}
	_ = ol.conn.SetReadDeadline(time.Now().Add(s.t.cfg.StopGrace))
	_ = ol.conn.CloseWrite()
}

func (s *sender) close() {
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return
	}
	s.closed = true
	s.t.wg.Add(1)
	defer s.t.wg.Done()
	for c := range s.pending.All() {
		_ = c.Close()
	}
	var all []*taker
	for _, tk := range s.peers {
		all = append(all, tk)
		if tk.meeting != nil {
			_ = tk.meeting.Close()
		}
	}
	s.mu.Unlock()
	for _, tk := range all {
		s.leave(tk, errClosed)
	}
}

// serve reads D's frames until the link ends, and tells what that ends.
func (s *sender) serve(ol *outLink) {
	ol.flush()
	err := ol.serve(func(h header, body []byte) error { return s.hear(ol, h, body) })
	if ended := closed(err); !ended {
		s.part(ol, ol.lost(err))
		err = drain(ol)
	}
	s.linkEnded(ol, ol.lost(err), closed(err))
}

// lost adds to an error which link it is of.
func (ol *outLink) lost(err error) error {
	return fmt.Errorf("local: the link to process %d of decode agent %s: %w: %w", ol.pid, ol.taker.id, core.ErrConnectionLost, clearer(err))
}

// died ends a link, or its meeting, when D's process has ended.
func (s *sender) died(ol *outLink, err error) {
	ol.fail(ol.lost(err))
	_ = ol.conn.CloseRead() // what D has said before is still read
	_ = ol.conn.CloseWrite()
}

// drain reads what D still says until D closes its end.
func drain(ol *outLink) error {
	scratch := make([]byte, readBuffer)
	for {
		if _, err := ol.in.Read(scratch); err != nil {
			return err
		}
	}
}

// linkEnded ends the transfers of a link. quiet: D has closed its end, so it copies no more.
func (s *sender) linkEnded(ol *outLink, err error, quiet bool) {
	cause := ol.ends(err)
	s.mu.Lock()
	tk := ol.taker
	var lost []*outbound
	free, closed := []*validityPage(nil), slices.Collect(maps.Values(ol.late))
	for _, out := range tk.byGrant {
		if out.link == ol {
			if out.validity != nil {
				closed = append(closed, out.validity)
				out.validity = nil
			}
			lost = append(lost, out)
			s.forget(out, cause)
		}
	}
	if quiet {
		free, closed = closed, nil
	} else if room := mostLate - tk.lost; len(closed) > room {
		free, closed = closed[room:], closed[:room]
	}
	tk.lost += len(closed)
	ol.late, ol.queue = nil, nil
	current := tk.link == ol
	if current {
		tk.link = nil
	}
	s.links--
	down := current && !s.closed && s.peers[tk.id] == tk
	s.mu.Unlock()
	for _, one := range free {
		s.t.validity.give(one)
	}
	for _, one := range closed {
		s.t.validity.lose(one)
	}
	ol.end()
	s.t.cfg.Logger.Debug("link ended", zap.String("peer", string(tk.id)), zap.Int("pid", ol.pid), zap.Error(cause))
	for _, out := range lost {
		s.tell(out)
	}
	if down {
		s.t.sink.PeerDown(tk.id, cause)
	}
}

// end gives back what a link has.
func (ol *outLink) end() {
	ol.close()
	if ol.unread != nil {
		ol.unread()
	}
}

// hear takes a frame of D's.
func (s *sender) hear(ol *outLink, h header, body []byte) error {
	switch h.kind {
	case frameCredit:
		n, err := parseCredit(body)
		if err != nil {
			return err
		}
		s.mu.Lock()
		ol.credit += int(n)
		over := ol.credit - window
		s.mu.Unlock()
		if over > 0 {
			return fmt.Errorf("credit for %d runs more than were said", over)
		}
	case frameDone:
		return s.heardDone(ol, h.grant)
	case frameTaken:
		s.mu.Lock()
		out := ol.taker.byGrant[h.grant]
		ok := out != nil && out.link == ol && (out.kept || out.proved && out.whole() || fault.On("local-any-taken"))
		if ok {
			out.err = nil
			s.forget(out, nil)
		}
		s.mu.Unlock()
		if ok {
			s.tell(out)
		}
	case frameOver:
		e, err := parseEnding(body)
		if err != nil {
			return err
		}
		s.heardOver(ol, h.grant, &e)
	default:
		return fmt.Errorf("a frame of kind %d, which only prefill agents say", h.kind)
	}
	ol.flush()
	return nil
}

// heardDone answers D that has copied all: the blocks were kept, unless the write is being
// stopped or has ended. Then nothing is said, since a stop was.
func (s *sender) heardDone(ol *outLink, grant random) error {
	if err := ol.shared.check(); err != nil && !fault.On("local-shared-before") {
		s.partAnew(ol, err)
		return nil
	}
	s.mu.Lock()
	out := ol.taker.byGrant[grant]
	if out == nil || out.link != ol || out.halted && !fault.On("local-always-kept") {
		s.mu.Unlock()
		return nil
	}
	if !out.whole() || out.kept {
		s.mu.Unlock()
		return fmt.Errorf("transfer %q of %d bytes is called done when %d were said", out.id.Name(), out.total, out.said)
	}
	out.kept = true
	ol.say(word(frameKept, grant))
	s.mu.Unlock()
	ol.flush()
	return nil
}

// whole says whether D was told where all of a transfer's bytes are.
func (out *outbound) whole() bool { return out.said == out.total && out.bytes == out.total }

// heardOver handles D's message that it copies nothing of a transfer any more.
func (s *sender) heardOver(ol *outLink, grant random, e *ending) {
	var unread error
	s.mu.Lock()
	out := ol.taker.byGrant[grant]
	s.mu.Unlock()
	if out != nil { // else D costs nothing by saying it
		unread = s.explain(ol, e)
	}
	s.mu.Lock()
	out = ol.taker.byGrant[grant]
	if out == nil || out.link != ol {
		late := ol.late[grant]
		delete(ol.late, grant)
		s.mu.Unlock()
		s.t.validity.give(late)
		return
	}
	var err error
	switch e.cause {
	case overUnexpected:
		err = core.ErrNotExpected
	case overUnreadable:
		err = unread
	case overStopped:
		err = errStopped
	default:
		err = fmt.Errorf("local: decode agent %s: %s", ol.taker.id, e.text)
	}
	s.forget(out, err)
	s.mu.Unlock()
	s.tell(out)
}

// explain says what is wrong with memory of this process that D could not read. The address is D's
// word, so only those in a region are looked at.
func (s *sender) explain(ol *outLink, e *ending) error {
	switch {
	case e.cause != overUnreadable:
		return nil
	case regionAt(s.t.layout, e.address) == "":
		return fmt.Errorf("local: decode agent %s could not read this process's memory at %#x, which is of no region", ol.taker.id, e.address)
	}
	span := hostmem.Span{Base: e.address, Length: 1}
	return fmt.Errorf("local: decode agent %s: %w", ol.taker.id, hostmem.Fault(s.t.layout.Regions, []hostmem.Span{span}, false, syscall.EFAULT))
}
