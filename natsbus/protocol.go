// What both ends of an upgraded connection have in common: the route, the bounds, how the connection is closed.

package natsbus

import (
	"bufio"
	"crypto/tls"
	"errors"
	"net"
	"strings"
	"time"
)

// Path is the route of the bootstrap port that [Server.Handler] belongs at.
const Path = "/nats"

const protocol = "nats"

// errProtocol ends a client that sends what no agent sends.
var errProtocol = errors.New("the client sends a command that no kvconn agent sends")

// writeWait bounds one write to a connection whose peer does not read.
const writeWait = 5 * time.Second

func hasToken(values []string, want string) bool {
	for _, v := range values {
		for tok := range strings.SplitSeq(v, ",") {
			if strings.EqualFold(strings.TrimSpace(tok), want) {
				return true
			}
		}
	}
	return false
}

// defaultProof is how long a client may take to prove itself. A machine that is busy may hold an honest one up for seconds. Who
// holds a place for as long without need gives it up to the next that comes, see maxHandshakes.
const defaultProof = 10 * time.Second

// headConn first reads the bytes that came in one packet with an HTTP head.
type headConn struct {
	net.Conn
	r *bufio.Reader // nil when it is empty
}

func (c *headConn) Read(b []byte) (int, error) {
	if c.r != nil {
		if n := c.r.Buffered(); n > 0 {
			return c.r.Read(b[:min(n, len(b))])
		}
		c.r = nil
	}
	return c.Conn.Read(b)
}

// hangUp closes a connection without TLS's close_notify, which would wait for a
// peer that does not read. NATS's messages tell where they end.
func hangUp(c net.Conn) error {
	for {
		switch inner := c.(type) {
		case *tls.Conn:
			c = inner.NetConn()
		case *headConn:
			c = inner.Conn
		case *pacedConn:
			c = inner.Conn
		default:
			return c.Close()
		}
	}
}
