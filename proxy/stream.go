package proxy

import (
	"io"
	"net/http"
	"time"
)

// writeStall is how long a client may take no byte before it counts as gone.
const writeStall = time.Minute

// boundWrite gives the next write its time. A ResponseWriter without deadlines
// is not a connection, so that there is nothing to bound.
func boundWrite(w http.ResponseWriter) {
	_ = http.NewResponseController(w).SetWriteDeadline(time.Now().Add(writeStall))
}

// answer is an upstream's response whose first bytes have been read.
type answer struct {
	resp  *http.Response
	first []byte
	err   error // io.EOF when first is all there is
}

// readFirst waits for the first bytes of the body. Headers alone do not say
// that a server has begun: engines send those of a stream before they have
// anything to stream.
func readFirst(resp *http.Response) answer {
	buf := make([]byte, 32<<10)
	for {
		n, err := resp.Body.Read(buf)
		if n > 0 || err != nil {
			return answer{resp, buf[:n], err}
		}
	}
}

// hopByHop headers concern one connection, not the message.
var hopByHop = []string{
	"Connection", "Keep-Alive", "Proxy-Authenticate", "Proxy-Authorization", "Proxy-Connection",
	"Te", "Trailer", "Transfer-Encoding", "Upgrade",
}

// relay writes an answer to the client as it arrives. It returns nil when the
// client has all of it; after an error it must not take what it has for
// the whole.
func (a answer) relay(w http.ResponseWriter) error {
	for name, values := range a.resp.Header {
		w.Header()[name] = values
	}
	for _, name := range hopByHop {
		w.Header().Del(name)
	}
	c := http.NewResponseController(w)
	boundWrite(w)
	w.WriteHeader(a.resp.StatusCode)

	chunk, err := a.first, a.err
	buf := a.first[:cap(a.first)]
	for {
		if len(chunk) > 0 {
			boundWrite(w)
			if _, werr := w.Write(chunk); werr != nil {
				return werr
			}
			if werr := c.Flush(); werr != nil {
				return werr
			}
		}
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
		var n int
		n, err = a.resp.Body.Read(buf)
		chunk = buf[:n]
	}
}
