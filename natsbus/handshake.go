package natsbus

import (
	"fmt"
	"io"
	"strings"
	"time"
)

// handshake passes the server's bytes on to a client, and reads from the first lines
// whether the server let the client in.
type handshake struct {
	w    io.Writer
	done func() // called once, when the client was let in

	// Used by the one goroutine that writes, and after its end.
	told    bool // the server's INFO is through
	in      bool
	head    []byte          // begin of a line, as long as it may be a PING
	final   strings.Builder // the server's words instead of letting the client in
	dropped bool            // the server ended the connection, not the client
}

// proofWithin is how long a client may take to prove itself.
const proofWithin = 2 * time.Second

const maxRefusal = 200

// Write implements io.Writer.
func (h *handshake) Write(p []byte) (int, error) {
	if !h.in {
		h.look(p)
	}
	return h.w.Write(p)
}

// look reads lines: INFO first, then PINGs, which come to all connections. Then an
// error comes, or anything else, by which the server lets the client in.
func (h *handshake) look(p []byte) {
	for _, c := range p {
		switch {
		case !h.told:
			h.told = c == '\n'
		case h.final.Len() > 0 || len(h.head) == 0 && c == '-':
			if h.final.Len() < maxRefusal {
				h.final.WriteByte(c)
			}
		default:
			h.head = append(h.head, c)
			switch whole := string(h.head); {
			case whole == pingLine:
				h.head = h.head[:0]
			case !strings.HasPrefix(pingLine, whole):
				h.in = true
				h.done()
				return
			}
		}
	}
}

const pingLine = "PING\r\n"

// refusal is the server's reason for not letting a client in; "" if the client was
// let in, or went away by itself.
func (h *handshake) refusal() string {
	switch {
	case h.in:
		return ""
	case h.final.Len() == 0 && h.dropped: // its last word is lost now and then
		return fmt.Sprintf("it did not prove itself within %v", proofWithin)
	}
	return strings.Trim(strings.TrimPrefix(h.final.String(), "-ERR "), "' \r\n")
}
