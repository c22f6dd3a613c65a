// A client's request may have named the server of a link, so what that server sends is checked before nats.go sees it.

package natsbus

import (
	"bytes"
	"fmt"
	"strconv"

	"github.com/kvconn/kvconn/wire"
)

// Bounds of a server's messages behind a bootstrap port.
const (
	maxLine    = 64 << 10                     // of the protocol: an INFO is the longest
	maxPayload = wire.MaxMessage + (64 << 10) // with its headers
)

// guard follows a server's side of the NATS protocol, since a client's request may
// have named the server. nats.go believes the size that a message claims. It allocates
// so much at once, in a goroutine whose panic ends the host. It also keeps a line until
// the line ends.
type guard struct {
	line []byte // the protocol's line, as far as it came
	skip int    // bytes that are still to come of a payload and the byte behind it
	tail bool   // the rest of the payload's line is to come, which nats.go reads too
}

// check takes the next bytes. On an error nats.go must not see them.
func (g *guard) check(p []byte) error {
	for len(p) > 0 {
		if g.skip > 0 {
			n := min(g.skip, len(p))
			g.skip -= n
			p = p[n:]
			continue
		}
		end := bytes.IndexByte(p, '\n')
		part := p
		if end >= 0 {
			part = p[:end]
		}
		p = p[min(len(part)+1, len(p)):]
		if g.tail {
			g.tail = end < 0
			continue
		}
		if len(g.line)+len(part) > maxLine {
			return fmt.Errorf("the server sends a line of more than %d bytes", maxLine)
		}
		g.line = append(g.line, part...)
		if end < 0 {
			return nil
		}
		if err := g.message(g.line); err != nil {
			return err
		}
		g.line = g.line[:0]
	}
	return nil
}

// message looks whether a line announces a payload.
func (g *guard) message(line []byte) error {
	verb := line[:min(len(line), 4)]
	switch {
	case bytes.EqualFold(verb[:min(len(verb), 3)], []byte("MSG")), bytes.EqualFold(verb, []byte("HMSG")):
	case (bytes.EqualFold(verb, []byte("INFO")) || bytes.EqualFold(verb, []byte("-ERR"))) && len(bytes.TrimSpace(line[4:])) == 0:
		return fmt.Errorf("the server sends an empty %s", verb) // nats.go would take the next line for its text
	default:
		return nil
	}
	// nats.go takes other line ends too, and then reads another number than this.
	args, ended := bytes.CutSuffix(line, []byte("\r"))
	words := bytes.TrimRight(args, " \t")
	last := words[bytes.LastIndexAny(words, " \t")+1:]
	size, err := strconv.ParseUint(string(last), 10, 31)
	if err != nil || !ended || bytes.IndexByte(args, '\r') >= 0 || size > maxPayload {
		return fmt.Errorf("the server announces a message as %.60q: want a size of at most %d bytes", line, maxPayload)
	}
	g.skip, g.tail = int(size)+1, true
	return nil
}
