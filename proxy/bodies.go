package proxy

import (
	"errors"
	"fmt"
	"io"
	"sync/atomic"
)

// maxBodies bounds the bytes of all bodies that are held at a time. When the bodies exceed
// it, a request whose own body exceeds modestBody is refused, so that large bodies do not
// take the room of others.
const (
	maxBodies  = 1 << 30
	modestBody = 1 << 20
)

var errBodies = errors.New("the bodies of other requests take all room")

// bodies counts the bytes of bodies that are held.
type bodies struct{ bytes atomic.Int64 }

// heldBody is one request's body.
type heldBody struct {
	of    *bodies
	bytes int64
}

func (b *bodies) begin() *heldBody { return &heldBody{of: b} }

func (h *heldBody) end() { h.of.bytes.Add(-h.bytes) }

// count makes a reader whose bytes are counted.
func (h *heldBody) count(r io.Reader) io.Reader { return countedBody{r, h} }

type countedBody struct {
	io.Reader
	held *heldBody
}

func (c countedBody) Read(p []byte) (int, error) {
	n, err := c.Reader.Read(p)
	c.held.bytes += int64(n)
	all := c.held.of.bytes.Add(int64(n))
	if err == nil && (all > maxBodies && c.held.bytes > modestBody || all > 2*maxBodies) {
		err = &bodyError{fmt.Errorf("%w: %d MiB", errBodies, all>>20)}
	}
	return n, err
}
