package proxy

import (
	"bytes"
	"errors"
	"io"
	"net/http"
	"slices"
	"sync"
)

// pieces is a text in pieces, so that a long body is not copied for each engine.
type pieces struct {
	before [][]byte // last
	last   []byte
	own    int64 // bytes that are no client's
}

const (
	// ownPiece is how long a client's member is that is not copied.
	ownPiece = 1 << 10
	// shortText is what is copied whole, and not counted: net/http sends so much together with the header, and keeps it.
	shortText = 4 << 10
)

func (p pieces) size() int64 {
	n := len(p.last)
	for _, one := range p.before {
		n += len(one)
	}
	return int64(n)
}

// whole is the text as one.
func (p pieces) whole() []byte {
	if len(p.before) == 0 {
		return p.last
	}
	return append(slices.Concat(p.before...), p.last...)
}

// sent is a text on its way to an engine, which may want it twice. What net/http keeps of a request lives as long as the
// answer to it: so the text is let go here when nobody is to send it again, and its readers when it is sent.
type sent struct {
	mu      sync.Mutex
	text    pieces
	readers int       // that have the text
	opened  bool      // by a first reader
	once    bool      // the text is not sent again
	ended   bool      // it is sent no further
	held    *heldBody // counts the text; nil when it is let go, and of a short one
}

// send sets the text to send. The text lies in the memory of a body, which stays counted for as long as the text lives.
func (s *sent) send(text pieces, body *heldBody) {
	s.text = text
	if text.size() > shortText {
		s.held = body
		body.keep(text.own)
	}
}

// sendIn makes the text a request's body.
func (s *sent) sendIn(req *http.Request) {
	s.mu.Lock()
	size, short := s.text.size(), s.held == nil
	s.mu.Unlock()
	req.ContentLength = size
	switch {
	case size == 0:
		req.Body = http.NoBody
	case short:
		req.GetBody = s.openShort
		req.Body, _ = s.openShort()
	default:
		req.GetBody = s.open
		req.Body, _ = s.open() // it is the first
	}
}

// openShort makes a reader that net/http knows: it sends the header with it.
func (s *sent) openShort() (io.ReadCloser, error) {
	return io.NopCloser(bytes.NewReader(s.text.whole())), nil
}

// errSent is why a request is not sent again.
var errSent = errors.New("the request is not sent again: it was answered, or has ended")

func (s *sent) open() (io.ReadCloser, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ended || s.once && s.opened {
		return nil, errSent
	}
	s.opened = true
	s.readers++
	return &sentReader{of: s, open: true}, nil
}

// letGo has it sent by nobody anew from now on. What is under way goes on, and what is to begin.
func (s *sent) letGo() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.once = true
	s.settle()
}

// end ends what is under way too.
func (s *sent) end() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ended = true
	s.settle()
}

// settle forgets a counted text that nobody reads any more. mu is held.
func (s *sent) settle() {
	if s.held != nil && (s.ended || s.once && s.opened && s.readers == 0) {
		s.held.end(s.text.own)
		s.held, s.text = nil, pieces{}
	}
}

// sentReader reads it once. net/http may close a reader that is read.
type sentReader struct {
	of *sent
	// of.mu is for these.
	open  bool
	whole bool // all was read
	piece int  // the next byte to read
	at    int
}

// Read reads on. A text that was let go before all was read must not look whole.
func (r *sentReader) Read(p []byte) (n int, err error) {
	s := r.of
	s.mu.Lock()
	defer s.mu.Unlock()
	for r.open && s.held != nil && r.piece <= len(s.text.before) && n < len(p) {
		from := s.text.last
		if r.piece < len(s.text.before) {
			from = s.text.before[r.piece]
		}
		k := copy(p[n:], from[r.at:])
		n += k
		if r.at += k; r.at == len(from) {
			r.piece, r.at = r.piece+1, 0
		}
	}
	if n > 0 || len(p) == 0 {
		return n, nil
	}
	r.whole = r.whole || r.open && s.held != nil
	r.close()
	if !r.whole {
		return 0, errSent
	}
	return 0, io.EOF
}

// Close lets go of the text.
func (r *sentReader) Close() error {
	r.of.mu.Lock()
	defer r.of.mu.Unlock()
	r.close()
	return nil
}

// close is Close; of.mu is held.
func (r *sentReader) close() {
	if r.open {
		r.open = false
		r.of.readers--
		r.of.settle()
	}
}
