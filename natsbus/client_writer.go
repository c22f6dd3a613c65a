// What the embedded server sends to a client is kept, within a bound, until the client has read it.

package natsbus

import (
	"bytes"
	"errors"
	"io"
	"net"
	"strconv"
	"sync"
	"time"

	"github.com/kvconn/kvconn/internal/safe"
)

const (
	// maxUnread bounds what is kept for a client that does not read, besides one long
	// message.
	maxUnread = 1 << 20
	// readSize is how much is read from the server at a time, for each client; pieceSize how
	// much is sent.
	readSize, pieceSize = 2 << 10, 32 << 10
	// spareSize is what most answers fit in: a client that reads needs no other memory.
	spareSize = 2 << 10
	// maxList is the longest list of pieces that is used again.
	maxList = 16
)

// clientWriter passes what the server sends on to a client. It reads everything at once, so that
// the server itself keeps nothing for a client, and it bounds what it keeps itself.
type clientWriter struct {
	from   io.Reader
	to     net.Conn
	window *window
	share  *share // of the bytes that are kept

	mu     sync.Mutex
	kept   [][]byte // all are full except the last
	spare  []byte   // a piece of spareSize, while it is neither kept nor being sent
	bytes  int64
	long   int64         // bytes of the longest message since the client had last read everything
	ended  bool          // the server sends nothing more
	wake   chan struct{} // holds a value when there is something to do
	reader lineReader
}

func newClientWriter(from io.Reader, to net.Conn, w *window, s *share) *clientWriter {
	o := &clientWriter{from: from, to: to, window: w, share: s, wake: make(chan struct{}, 1)}
	o.reader.line = o.line
	return o
}

// errUnread ends a client that does not read.
var errUnread = errors.New("the client does not read the answers to its requests")

// run passes bytes on until the server or the client ends. It waits for its own goroutine.
func (o *clientWriter) run() (err error) {
	written := make(chan error, 1)
	safe.Go("natsbus.clientWriter", func() { written <- o.write() })
	piece := make([]byte, readSize) // keep copies what is read
	for err == nil {
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
	o.wakeUp()
	if werr := <-written; errors.Is(err, io.EOF) {
		err = werr
	}
	return err
}

// line learns which requests are answered.
func (o *clientWriter) line(line []byte) {
	verb, rest, _ := bytes.Cut(line, space)
	if announces(verb) {
		subj, _, _ := bytes.Cut(rest, space)
		o.window.answered(subj)
	}
}

func (o *clientWriter) keep(piece []byte) error {
	o.mu.Lock()
	if o.bytes == 0 {
		o.long = 0
	}
	o.long = max(o.long, int64(o.reader.skip))
	full := o.bytes > maxUnread+o.long
	o.store(piece)
	o.bytes += int64(len(piece))
	o.mu.Unlock()
	o.share.add(int64(len(piece)))
	o.wakeUp()
	if full {
		return errUnread
	}
	return nil
}

// store copies what is kept; mu is held.
func (o *clientWriter) store(piece []byte) {
	for len(piece) > 0 {
		last := len(o.kept) - 1
		if last < 0 || len(o.kept[last]) == cap(o.kept[last]) {
			next := o.spare[:0]
			o.spare = nil
			if cap(next) == 0 {
				size := pieceSize
				if last < 0 { // a client that reads never has more
					size = max(len(piece), spareSize)
				}
				next = make([]byte, 0, size)
			}
			o.kept = append(o.kept, next)
			last++
		}
		to := o.kept[last]
		n := min(len(piece), cap(to)-len(to))
		o.kept[last] = append(to, piece[:n]...)
		piece = piece[n:]
	}
}

func (o *clientWriter) wakeUp() {
	select {
	case o.wake <- struct{}{}:
	default:
	}
}

// write sends what is kept. A client has writeWait to take each piece.
func (o *clientWriter) write() error {
	var list [][]byte // the next pieces' list: one is filled while the other is sent
	for {
		o.mu.Lock()
		pieces, ended := o.kept, o.ended
		o.kept = list
		o.mu.Unlock()
		for _, p := range pieces {
			_ = o.to.SetWriteDeadline(time.Now().Add(writeWait))
			_, err := o.to.Write(p)
			o.mu.Lock()
			o.bytes -= int64(len(p))
			if cap(p) == spareSize {
				o.spare = p[:0]
			}
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
		clear(pieces)
		if list = pieces[:0]; cap(list) > maxList {
			list = nil
		}
	}
}

// lineReader finds the lines in what the server sends, between the payloads.
type lineReader struct {
	line func([]byte) // is called with each line, and keeps nothing of it
	head []byte       // the beginning of a line whose end has not come yet
	skip int          // how many bytes of a payload and its end have not come yet
}

func (r *lineReader) take(p []byte) {
	for len(p) > 0 {
		if r.skip > 0 {
			n := min(r.skip, len(p))
			r.skip, p = r.skip-n, p[n:]
			continue
		}
		end := bytes.IndexByte(p, '\n')
		if end < 0 {
			r.head = append(r.head, p...)
			return
		}
		line := p[:end]
		if len(r.head) > 0 {
			r.head = append(r.head, line...)
			line, r.head = r.head, r.head[:0]
		}
		p = p[end+1:]
		line = bytes.TrimSuffix(line, []byte("\r"))
		if n, ok := payload(line); ok {
			r.skip = n + 2
		}
		r.line(line)
	}
}

var space = []byte(" ")

// announces says whether a verb of the server's announces a payload.
func announces(verb []byte) bool { return string(verb) == "MSG" || string(verb) == "HMSG" }

// payload is the length of what follows a line of the server's.
func payload(line []byte) (n int, ok bool) {
	if verb, _, _ := bytes.Cut(line, space); !announces(verb) {
		return 0, false
	}
	n, err := strconv.Atoi(string(line[bytes.LastIndexByte(line, ' ')+1:]))
	return n, err == nil && n >= 0
}
