// Bodies that arrive, and answers that are held whole, share a bound of memory. A body that is slow or takes too much
// gives way.

package proxy

import (
	"cmp"
	"container/list"
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// A body is small, medium or large by what it holds. Of the memory that requests under way leave to bodies the last part is for
// small and medium ones, the last half of that for small ones: they are served beside large ones that fill the rest.
const (
	smallBody  = 64 << 10
	mediumBody = 1 << 20
)

// If the bodies of one client that are arriving hold so many times as much memory as the client that finds no room, the first client
// takes too much: its bodies give way at once.
const tooMuch = 4

// leastReserve is how much memory there must be beyond that of one body of the largest size.
const leastReserve = 4 << 20

// slowBody is how long a body may take to arrive. After that it gives way if memory is short.
const slowBody = 10 * time.Second

// errBodies refuses a request for which there is no memory.
var errBodies = errors.New("other requests fill the memory for requests")

// errSlowBody and errTooMuch refuse bodies that had to give way.
var (
	errSlowBody = fmt.Errorf("the body came too slowly, and gave way to others: %w", errBodies)
	errTooMuch  = fmt.Errorf("this client's bodies hold the most, and gave way to another client's: %w", errBodies)
)

// errAnswers refuses an answer for which there is no memory.
var errAnswers = errors.New("other answers fill the memory for those that are held whole")

// bodies counts the memory of clients' requests: of their headers, of their bodies, and of what each request that is under way takes
// besides. It counts the memory of answers that are held whole by itself. If there is no memory for a request or an answer, bodies
// refuses it. A body that is whole gives way to none, since an engine may be at work on it.
type bodies struct {
	most      int64
	answers   int64 // the most that answers may take, but for small ones
	longest   int64 // the most bytes of a body
	reserve   int64 // of most, for bodies that are not large
	newcomers int64 // of reserve, for clients that hold no more than that
	now       func() time.Time
	refused   atomic.Int64
	joining   sync.Mutex // held while a large text is joined, which then takes its memory twice: only one at a time

	mu       sync.Mutex
	bytes    int64     // of requests
	admitted int64     // of bytes: those that requests under way take besides their bodies
	answered int64     // of answers
	arriving list.List // of *heldBody: bodies of more than firstChunk, in the order in which they grew to that
	clients  map[string]*share
}

// share is what the requests of a client hold.
type share struct {
	bytes    int64
	arriving int64 // of bytes: those of bodies that are arriving
	requests int   // under way
}

func (b *bodies) init(cfg Config) {
	b.most, b.longest, b.now = cfg.BodyMemory, cfg.MaxBody, time.Now
	b.answers, b.clients = b.most/4, map[string]*share{}
	b.reserve = min(b.most/4, b.most-b.longest)
	b.newcomers = max(b.reserve/16, min(b.reserve/4, 2<<20))
}

// heldBody is one request's body, or what else counts of a request that is under way, or an answer.
type heldBody struct {
	of     *bodies
	answer bool
	client http.ResponseWriter // of a body
	from   string              // the client
	text   gathered            // while it comes
	// mu of bodies is for these.
	bytes int64
	head  int64         // of bytes, those of the request's header
	refs  int           // nothing is counted at 0
	since time.Time     // it arrives since then
	at    *list.Element // among those that arrive
	gone  error         // why it gave way
}

// begin begins a body of a client at an address.
func (b *bodies) begin(client http.ResponseWriter, address string) *heldBody {
	return &heldBody{of: b, client: client, from: clientOf(address), refs: 1}
}

// clientOf is the client that an address counts for: by IPv4 the host, by IPv6 its network, since one host may have all addresses of that.
func clientOf(address string) string {
	at, err := netip.ParseAddrPort(address)
	if err != nil {
		return address
	}
	addr := at.Addr().Unmap().WithZone("")
	bits := addr.BitLen()
	if addr.Is6() {
		bits = 64
	}
	net, err := addr.Prefix(bits)
	if err != nil {
		return address
	}
	return net.String()
}

// beginAnswer begins an answer.
func (b *bodies) beginAnswer() *heldBody { return &heldBody{of: b, answer: true, refs: 1} }

// limit is what all bodies may take when one of a size takes more.
func (b *bodies) limit(size int64) int64 {
	switch {
	case size > mediumBody:
		return b.most - b.reserve
	case size > smallBody:
		return b.most - b.reserve/2
	}
	return b.most
}

// expect refuses a body of a known length before it is read.
func (h *heldBody) expect(length int64) error {
	if h.answer || length <= smallBody {
		return nil
	}
	if longest := h.of.longest; length > longest {
		return &bodyError{&http.MaxBytesError{Limit: longest}}
	}
	h.of.mu.Lock()
	defer h.of.mu.Unlock()
	return h.room(length, length)
}

// take counts further bytes of a body that arrives.
func (h *heldBody) take(n int64) error {
	b := h.of
	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	case h.answer && h.bytes+n > smallBody && b.answered+n > b.answers:
		b.refused.Add(1)
		return fmt.Errorf("%w: they may take a quarter of --body-memory, %d bytes: try again later, or raise it", errAnswers, b.answers)
	case h.answer:
		h.count(n)
		return nil
	case h.gone != nil:
		return b.full(h.gone)
	}
	if err := h.room(n, h.bytes-h.head+n); err != nil {
		return err
	}
	h.count(n)
	if h.bytes > firstChunk && h.at == nil {
		h.since, h.at = b.now(), b.arriving.PushBack(h)
		b.clients[h.from].arriving += h.bytes
	}
	return nil
}

// room has bodies give way that are slow, or of clients that take too much, until n bytes more find room in the limit for a
// size. mu is held.
func (h *heldBody) room(n, size int64) error {
	b, most := h.of, h.of.most
	if b.share(h.from).bytes+n > b.newcomers {
		most -= b.newcomers
	}
	// What requests under way take besides leaves a body's class as it is: many short streams keep no long prompt out.
	most = min(most, b.limit(size)+b.admitted)
	if b.bytes+n <= most {
		return nil
	}
	yielding, yields := b.evictable(h, n)
	if b.bytes-yields+n > most { // nobody would gain
		b.refused.Add(1)
		return b.full(errBodies)
	}
	slices.SortFunc(yielding, func(x, y eviction) int { return cmp.Compare(y.body.bytes, x.body.bytes) })
	for i := 0; b.bytes+n > most; i++ {
		yielding[i].body.evict(yielding[i].why)
	}
	return nil
}

// eviction is a body that may give way.
type eviction struct {
	body *heldBody
	why  error
}

// evictable returns the bodies that may give way to another body that takes n bytes more, and how many bytes they hold; mu is held.
func (b *bodies) evictable(to *heldBody, n int64) (all []eviction, bytes int64) {
	late, own := b.now().Add(-slowBody), b.share(to.from).arriving+n
	if to.at == nil {
		own += to.bytes
	}
	for e := b.arriving.Front(); e != nil; e = e.Next() {
		h := e.Value.(*heldBody)
		switch {
		case h == to:
			continue
		case !h.since.After(late):
			all = append(all, eviction{h, errSlowBody})
		case h.from != to.from && b.share(h.from).arriving/tooMuch > own:
			all = append(all, eviction{h, errTooMuch})
		default:
			continue
		}
		bytes += h.bytes
	}
	return all, bytes
}

// evict ends a body that is arriving; mu is held.
func (h *heldBody) evict(why error) {
	h.of.refused.Add(1)
	h.count(-h.bytes)
	h.arrived()
	h.gone = why
	cutBody(h.client)
}

// cutBody ends the reading of a client's body.
func cutBody(w http.ResponseWriter) { _ = http.NewResponseController(w).SetReadDeadline(time.Now()) }

func (b *bodies) full(err error) error {
	return &bodyError{fmt.Errorf("%w: --body-memory is %d bytes: try again later, or raise it", err, b.most)}
}

// evicted reports whether the body has given way to others.
func (h *heldBody) evicted() bool {
	h.of.mu.Lock()
	defer h.of.mu.Unlock()
	return h.gone != nil
}

// whole notes that the whole body has come, and that it holds so many bytes. From then on it does not give way.
func (h *heldBody) whole(bytes int64) error {
	h.of.mu.Lock()
	defer h.of.mu.Unlock()
	if h.gone != nil {
		return h.of.full(h.gone)
	}
	h.arrived()
	h.count(h.head + bytes - h.bytes)
	return nil
}

// holds notes that an answer now holds so many bytes.
func (h *heldBody) holds(bytes int64) error {
	if more := bytes - h.bytes; more > 0 {
		return h.take(more)
	}
	h.add(bytes - h.bytes)
	return nil
}

// add counts bytes that it is too late to refuse.
func (h *heldBody) add(n int64) {
	h.of.mu.Lock()
	defer h.of.mu.Unlock()
	h.count(n)
}

// keep adds a holder: the body is counted until end was called once more. It also counts own further bytes.
func (h *heldBody) keep(own int64) {
	h.of.mu.Lock()
	defer h.of.mu.Unlock()
	h.refs++
	h.count(own)
}

// end is called when a holder has let go of the body, and of own further bytes.
func (h *heldBody) end(own int64) {
	h.of.mu.Lock()
	defer h.of.mu.Unlock()
	h.count(-own)
	if h.refs == 1 {
		h.arrived()
		h.count(-h.bytes)
	}
	h.refs--
}

// count changes how many bytes the body holds; mu is held.
func (h *heldBody) count(n int64) {
	if h.refs == 0 {
		return
	}
	b := h.of
	h.bytes += n
	if h.answer {
		b.answered += n
		return
	}
	b.bytes += n
	s := b.clients[h.from]
	if s == nil {
		s = &share{}
		b.clients[h.from] = s
	}
	s.bytes += n
	if h.at != nil {
		s.arriving += n
	}
	if *s == (share{}) {
		delete(b.clients, h.from)
	}
}

// arrived takes it out of those that arrive. mu is held.
func (h *heldBody) arrived() {
	if h.at != nil {
		h.of.arriving.Remove(h.at)
		h.at = nil
		if s := h.of.clients[h.from]; s != nil { // whose bytes are counted
			s.arriving -= h.bytes
		}
	}
}

// held is what all hold.
func (b *bodies) held() int64 {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.bytes + b.answered
}
