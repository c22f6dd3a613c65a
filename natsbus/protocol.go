package natsbus

import (
	"crypto/tls"
	"net"
	"strings"
	"time"
)

// Path is the route of the bootstrap port that [Server.Handler] belongs at.
const Path = "/nats"

const protocol = "nats"

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

// hangUp closes a connection without TLS's farewell, which would wait for a
// peer that does not read. NATS's messages tell where they end.
func hangUp(c net.Conn) error {
	if t, ok := c.(*tls.Conn); ok {
		c = t.NetConn()
	}
	return c.Close()
}
