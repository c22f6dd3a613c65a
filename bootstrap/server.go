// The bootstrap port's HTTP server, with its bounds.

package bootstrap

import (
	"crypto/tls"
	"net/http"
	"time"

	"go.uber.org/zap"

	"github.com/kvconn/kvconn/internal/httpserve"
)

// DefaultPort is the bootstrap port of a prefill engine whose configuration names none.
const DefaultPort = 8998

// maxConns bounds the connections that speak HTTP. Connections that were upgraded to
// the control plane do not count.
const maxConns = 1024

// NewServer returns a server for h, usually NewHandler's. It speaks https if a
// configuration for that is given. The logger may be nil.
func NewServer(h http.Handler, secure *tls.Config, logger *zap.Logger) *httpserve.Server {
	return httpserve.New(h, httpserve.Options{
		Name:              "bootstrap",
		PortSetting:       "the config key bootstrap_port",
		ReadHeaderTimeout: 5 * time.Second,
		IdleTimeout:       time.Minute,
		MaxHeaderBytes:    16 << 10,
		MaxConns:          maxConns,
		Brief:             true,
		TLS:               secure,
		Logger:            logger,
	})
}
