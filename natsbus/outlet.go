package natsbus

import (
	"errors"
	"io"
	"net"
	"strings"
	"sync"
	"time"

	"github.com/kvconn/kvconn/internal/safe"
)

const (
	// maxUnread bounds what is kept for a client that does not read, besides one long
	// message.
	maxUnread = 1 << 20
	// pieceSize is how much is read from the server at a time.
	pieceSize = 32 << 10
)

// outlet passes the server's side of the protocol on to a client. It reads all at once, so
// that the server itself keeps nothing for a client, and bounds what it keeps.
type outlet struct {
	from   io.Reader
	to     net.Conn
	window *window
	share  *share // of the bytes that are kept

	mu     sync.Mutex
	kept   [][]byte
	bytes  int64
	long   int64         // of the longest message since the client had last read all
	ended  bool          // nothing follows
	wake   chan struct{} // holds a value when there is something to do
	reader lineReader
}

func newOutlet(from io.Reader, to net.Conn, w *window, s *share) *outlet {
	o := &outlet{from: from, to: to, window: w, share: s, wake: make(chan struct{}, 1)}
	o.reader.line = o.line
	return o
}

// errUnread ends a client that does not read.
var errUnread = errors.New("it does not read what it asked for")

// run passes bytes on until the server or the client ends. It waits for its own goroutine.
func (o *outlet) run() (err error) {
	written := make(chan error, 1)
	safe.Go("natsbus.outlet", func() { written <- o.write() })
	for err == nil {
		piece := make([]byte, pieceSize)
		var n int
		if n, err = o.from.Read(piece); n > 0 {
			o.reader.take(piece[:n])
			if full := o.keep(piece[:n]); full != nil {
				err = full
				_ = hangUp(o.to)
			}
		}
	}
	o.mu.Lock()
	o.ended = true
	o.mu.Unlock()
	o.stir()
	if werr := <-written; errors.Is(err, io.EOF) {
		err = werr
	}
	return err
}

// line learns which requests are answered.
func (o *outlet) line(line string) {
	verb, rest, _ := strings.Cut(line, " ")
	if verb == "MSG" || verb == "HMSG" {
		subj, _, _ := strings.Cut(rest, " ")
		o.window.answered(subj)
	}
}

func (o *outlet) keep(piece []byte) error {
	o.mu.Lock()
	if o.bytes == 0 {
		o.long = 0
	}
	o.long = max(o.long, int64(o.reader.skip))
	full := o.bytes > maxUnread+o.long
	if last := len(o.kept) - 1; last >= 0 && len(o.kept[last])+len(piece) <= pieceSize && cap(o.kept[last]) >= len(o.kept[last])+len(piece) {
		o.kept[last] = append(o.kept[last], piece...)
	} else {
		o.kept = append(o.kept, append(make([]byte, 0, max(len(piece), 512)), piece...))
	}
	o.bytes += int64(len(piece))
	o.mu.Unlock()
	o.share.add(int64(len(piece)))
	o.stir()
	if full {
		return errUnread
	}
	return nil
}

func (o *outlet) stir() {
	select {
	case o.wake <- struct{}{}:
	default:
	}
}

// write sends what is kept. A client has writeWait to take each piece.
func (o *outlet) write() error {
	for {
		o.mu.Lock()
		pieces, ended := o.kept, o.ended
		o.kept = nil
		o.mu.Unlock()
		for _, p := range pieces {
			_ = o.to.SetWriteDeadline(time.Now().Add(writeWait))
			_, err := o.to.Write(p)
			o.mu.Lock()
			o.bytes -= int64(len(p))
			o.mu.Unlock()
			o.share.add(-int64(len(p)))
			if err != nil {
				_ = hangUp(o.to) // the server's side is read on until the connection is over
				return err
			}
		}
		if ended && len(pieces) == 0 {
			return nil
		}
		if len(pieces) == 0 {
			<-o.wake
		}
	}
}

// lineReader finds the lines of the server's side of the protocol between the payloads.
type lineReader struct {
	line func(string)
	head []byte
	skip int // bytes of a payload and its end that are still to come
}

func (r *lineReader) take(p []byte) {
	for len(p) > 0 {
		if r.skip > 0 {
			n := min(r.skip, len(p))
			r.skip, p = r.skip-n, p[n:]
			continue
		}
		c := p[0]
		p = p[1:]
		if c != '\n' {
			r.head = append(r.head, c)
			continue
		}
		line := strings.TrimSuffix(string(r.head), "\r")
		r.head = r.head[:0]
		if n, ok := payload(line); ok {
			r.skip = n + 2
		}
		r.line(line)
	}
}
