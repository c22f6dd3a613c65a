// D's answer on its way to the client. Its first bytes are read before the client gets any.

package proxy

import (
	"bytes"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"time"
)

// writeStall is how long a client may take no byte before it counts as gone.
const writeStall = time.Minute

// boundWrite gives the next write its time. If the ResponseWriter has no deadlines, it is
// no connection and there is nothing to bound.
func boundWrite(w http.ResponseWriter) {
	_ = http.NewResponseController(w).SetWriteDeadline(time.Now().Add(writeStall))
}

// buffers are for reading answers.
var buffers = sync.Pool{New: func() any { return new([32 << 10]byte) }}

// answer is an upstream's response whose first bytes have been read. The zero
// value is none.
type answer struct {
	resp  *http.Response
	buf   *[32 << 10]byte
	first []byte
	err   error  // the error behind first: io.EOF when first is the whole answer
	end   func() // may be nil
	sent  *sent  // what is answered; may be nil
	usage *usage // sees all that is passed on; may be nil
}

// readFirst waits for the first bytes of the body.
func readFirst(resp *http.Response) answer {
	a := answer{resp: resp, buf: buffers.Get().(*[32 << 10]byte)}
	for len(a.first) == 0 && a.err == nil {
		a.more()
	}
	return a
}

// streams reports whether the answer is a stream of events.
func (a *answer) streams() bool {
	return strings.HasPrefix(a.resp.Header.Get("Content-Type"), "text/event-stream")
}

// brokeOff is the error of an answer that broke off before the router has passed on any of it.
func (a *answer) brokeOff() error {
	if len(a.first) == 0 {
		return fmt.Errorf("no answer after the headers: %w", a.err)
	}
	return fmt.Errorf("its answer broke off after %d bytes: %w", len(a.first), a.err)
}

// more reads on into first.
func (a *answer) more() {
	var n int
	have := len(a.first)
	n, a.err = a.resp.Body.Read(a.buf[have:])
	a.first = a.buf[:have+n]
}

// close ends the answer and gives its buffer back.
func (a *answer) close() {
	if a.resp == nil {
		return
	}
	_ = a.resp.Body.Close()
	if a.sent != nil {
		a.sent.end()
	}
	if a.end != nil {
		a.end()
	}
	buffers.Put(a.buf)
	*a = answer{}
}

// errorEvent is the data of a stream's first event, if that is an error.
func (a *answer) errorEvent() ([]byte, bool) {
	mark, end := []byte(`data: {"error"`), []byte("\n\n")
	for {
		n := min(len(mark), len(a.first))
		if !bytes.Equal(a.first[:n], mark[:n]) {
			return nil, false
		}
		if at := bytes.Index(a.first, end); n == len(mark) && (at >= 0 || a.err != nil) {
			if at < 0 {
				at = len(a.first)
			}
			return a.first[len("data: "):at], true
		}
		if a.err != nil || len(a.first) == len(a.buf) {
			return nil, false
		}
		a.more()
	}
}

// hopByHop headers concern one connection, not the message.
var hopByHop = []string{
	"Connection", "Keep-Alive", "Proxy-Authenticate", "Proxy-Authorization", "Proxy-Connection",
	"Te", "Trailer", "Transfer-Encoding", "Upgrade",
}

// passHeader copies one side's headers for the other.
func passHeader(to, from http.Header) {
	for name, values := range from {
		to[name] = values
	}
	for _, list := range from["Connection"] {
		for name := range strings.SplitSeq(list, ",") {
			if name = http.CanonicalHeaderKey(strings.TrimSpace(name)); !strings.HasPrefix(name, "Content-") { // these headers say how the body is read, on either side
				delete(to, name)
			}
		}
	}
	for _, name := range hopByHop {
		delete(to, name)
	}
}

// relay writes an answer to the client as it arrives. It returns nil if the client has the whole
// answer. If it returns an error, the client has only a part, and the caller must not let the client
// take this part for the whole answer.
func (a *answer) relay(w http.ResponseWriter) error {
	passHeader(w.Header(), a.resp.Header)
	c := http.NewResponseController(w)
	boundWrite(w)
	w.WriteHeader(a.resp.StatusCode)

	chunk, err := a.first, a.err
	for {
		if len(chunk) > 0 {
			if a.usage != nil {
				a.usage.read(chunk)
			}
			if _, werr := w.Write(chunk); werr != nil {
				return werr
			}
		}
		if err == io.EOF {
			return nil // the handler's end flushes
		}
		if len(chunk) > 0 {
			if werr := c.Flush(); werr != nil {
				return werr
			}
		}
		if err != nil {
			return err
		}
		var n int
		n, err = a.resp.Body.Read(a.buf[:])
		chunk = a.buf[:n]
		boundWrite(w)
	}
}
