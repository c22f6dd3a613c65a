// One peer is read no faster than a pace, so that the processors are left to others.

package natsbus

import (
	"net"
	"time"
)

// Bounds of what is read of one peer. An agent that works as hard as it can sends a tenth of
// it; who sends more waits, and leaves the processors to others.
const (
	paceBytes = 16 << 20 // a second
	paceBurst = 8 << 20  // at once, after a rest
	pacePiece = 32 << 10 // in one read
)

// pacedConn is a connection that is read no faster than that.
type pacedConn struct {
	net.Conn
	rest int64 // bytes that may be read without a wait
	at   time.Time
}

func newPaced(conn net.Conn) *pacedConn {
	return &pacedConn{Conn: conn, rest: paceBurst, at: time.Now()}
}

// Read waits, before it returns bytes, for as long as they take at the pace: at most some
// milliseconds, since callers read pieces.
func (c *pacedConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b[:min(len(b), pacePiece)])
	time.Sleep(c.debt(n, time.Now()))
	return n, err
}

// debt counts bytes, and says how long the pace takes for those that it does not allow yet.
func (c *pacedConn) debt(n int, now time.Time) time.Duration {
	c.rest = min(c.rest+int64(now.Sub(c.at).Seconds()*paceBytes), paceBurst) - int64(n)
	c.at = now
	if c.rest >= 0 {
		return 0
	}
	return time.Duration(-c.rest) * time.Second / paceBytes
}
