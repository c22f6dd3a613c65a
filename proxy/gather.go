// A text that arrives is kept in chunks, so that it takes memory only for what has come.

package proxy

import (
	"errors"
	"io"
	"slices"
)

// A text is kept in chunks. Each chunk at most doubles the text's memory. So a client that announces a long text, or
// sends one without a length, takes only memory for what it has sent.
const (
	firstChunk = 16 << 10
	maxChunk   = 1 << 20
)

// gathered is a text that is arriving. held counts its memory. Of the first chunk only the bytes that have come count,
// since a connection without a body takes as much memory.
type gathered struct {
	held   *heldBody
	full   [][]byte // chunks before the last
	some   [8][]byte
	last   []byte
	bytes  int64 // how many bytes full has
	length int64 // the text's length as the client has announced it; -1 if it has not
}

// gather begins a text. length is how many bytes the client has announced; -1 if it has announced none.
func (h *heldBody) gather(length int64) *gathered {
	size := int64(firstChunk) / 4
	if length >= 0 {
		size = min(length, firstChunk) + 1 // then the end comes without a further chunk
	}
	h.text = gathered{held: h, length: length, last: make([]byte, 0, size)}
	return &h.text
}

// read reads further bytes of the text, and returns those that have come.
func (g *gathered) read(r io.Reader) ([]byte, error) {
	if len(g.last) == cap(g.last) {
		if err := g.grow(); err != nil {
			return nil, err
		}
	}
	at := len(g.last)
	n, err := r.Read(g.last[at:cap(g.last)])
	g.last = g.last[:at+n]
	if err != nil && err != io.EOF && g.held.evicted() {
		err = g.held.take(0) // says so
	}
	return g.last[at:], err
}

// grow begins a further chunk.
func (g *gathered) grow() error {
	if g.full == nil {
		if err := g.held.take(int64(cap(g.last))); err != nil {
			return err
		}
	}
	have := g.bytes + int64(len(g.last))
	size := min(max(have, firstChunk), maxChunk)
	if g.length >= have {
		size = min(size, g.length-have+1)
	}
	if err := g.held.take(size); err != nil {
		return err
	}
	if g.full == nil {
		g.full = g.some[:0]
	}
	g.full, g.bytes, g.last = append(g.full, g.last), have, make([]byte, 0, size)
	return nil
}

// text returns all that has come, as one text, and lets the chunks go.
func (g *gathered) text() ([]byte, error) {
	if g.full == nil {
		size := min(int64(cap(g.last)), firstChunk)
		if err := g.held.take(size); err != nil {
			return nil, err
		}
		text := g.last
		g.last = nil
		return text, g.held.whole(size)
	}
	all, size := append(g.full, g.last), g.bytes+int64(len(g.last))
	g.full, g.last = nil, nil
	defer clear(all)
	if size > mediumBody {
		g.held.of.joining.Lock()
		defer g.held.of.joining.Unlock()
	}
	text := slices.Concat(all...)
	return text, g.held.whole(int64(cap(text)))
}

// stop returns all that has come, if the rest is not to be gathered.
func (g *gathered) stop() ([][]byte, error) {
	held := cap(g.last)
	for _, one := range g.full {
		held += cap(one)
	}
	all := append(g.full, g.last)
	g.full, g.last = nil, nil
	return all, g.held.whole(int64(held))
}

// readAll reads all of a text. Of an answer that breaks off it returns what has come.
func (h *heldBody) readAll(r io.Reader, length int64) ([]byte, error) {
	if err := h.expect(length); err != nil {
		return nil, err
	}
	return h.gather(length).readAll(r)
}

func (g *gathered) readAll(r io.Reader) ([]byte, error) {
	for {
		switch _, err := g.read(r); {
		case err == io.EOF:
			return g.text()
		case err != nil && g.held.answer && !errors.Is(err, errAnswers):
			text, _ := g.text() // its begin may say enough
			return text, err
		case err != nil:
			g.full, g.last = nil, nil
			return nil, err
		}
	}
}
