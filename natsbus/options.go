// How a bus is set up, and which values are refused.

package natsbus

import (
	"cmp"
	"crypto/tls"
	"errors"
	"fmt"
	"net/url"
	"regexp"
	"strings"
	"time"

	"github.com/nats-io/nats.go/jetstream"
	"go.uber.org/zap"

	"github.com/kvconn/kvconn/core"
)

const (
	defaultIdle = 30 * time.Second // how long a broken link is kept without use
	defaultPing = time.Second      // two unanswered pings end a connection
)

// Options sets up a Bus.
type Options struct {
	// Identity is this agent's.
	Identity *Identity
	// Server is this agent's own. It is nil for an agent that is never looked up, and
	// with a ClusterURL.
	Server *Server
	// ClusterURL is a NATS cluster to use in place of all agents' own servers:
	// nats://host:port, or tls://; several are separated by commas.
	ClusterURL string
	// Join is the bootstrap address, http://host:port, of the server that an agent
	// without a server or cluster uses. The server's agent registers this one. Open
	// waits for the server for JoinTimeout.
	Join        string
	JoinTimeout time.Duration
	// Token is the secret that the servers' clients prove to know; "" for none. It is
	// sent to a cluster only.
	Token string
	// JoinToken is the secret of the ranks of one prefill engine; "" for none.
	JoinToken string
	// Seed is the seed of this agent's own user nkey, in the token's place.
	Seed string
	// TLS is for https:// bootstrap addresses and for the cluster; nil means that
	// the system's authorities are trusted.
	TLS *tls.Config
	// OnlyTLS makes http:// in a bootstrap address mean https://.
	OnlyTLS bool
	// Allow, if set, is called before anything is sent to the host of a bootstrap
	// address. It may return a Control, which is called with every IP address before
	// that is dialled. An error ends the Lookup.
	Allow func(host string) (Control, error)
	// TTL is how long a registration outlives its last renewal, in whole
	// seconds; 0 means 6 s, with a cluster 30 s: an entry must outlive the
	// election of a leader. 1 s is the least.
	TTL time.Duration
	// JSPrefix begins the subjects of JetStream's API where the account of this agent's user
	// imports the registry from another; "" is JetStream's own.
	JSPrefix string
	// Replicas is how many servers of the cluster hold the registry; 0 means 3, or 1
	// in a smaller cluster. A registry that exists is used as it is.
	Replicas int
	// ConnectTimeout bounds the making of a connection; 0 means 3 s.
	ConnectTimeout time.Duration
	Logger         *zap.Logger
	// PingInterval is the time between two pings of a connection; two that are not answered end it. 0 means 1 s.
	PingInterval time.Duration

	linkIdle, sweep, sweepMost time.Duration // tests only
}

// CheckCluster checks the URLs of a cluster, separated by commas, and returns a
// name for it without users and passwords.
func CheckCluster(urls string) (name string, err error) {
	var names []string
	for s := range strings.SplitSeq(urls, ",") {
		u, err := url.Parse(strings.TrimSpace(s))
		if err != nil || u.Host == "" || (u.Scheme != "nats" && u.Scheme != "tls") {
			s = "(it cannot be read)"
			if err == nil {
				u.User = nil // a user may be a token
				s = u.String()
			}
			return "", fmt.Errorf("cluster URL %s must be like nats://host:port", s)
		}
		u.User = nil
		names = append(names, u.String())
	}
	return "NATS cluster " + strings.Join(names, ","), nil
}

var legalPrefix = regexp.MustCompile(`^[$A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*$`)

// CheckJSPrefix checks the first tokens of subjects.
func CheckJSPrefix(prefix string) error {
	if len(prefix) > 128 || !legalPrefix.MatchString(prefix) {
		return fmt.Errorf("%.130q is not like kvconn.v1.registry: at most 128 letters, digits, - and _, with dots between", prefix)
	}
	return nil
}

// defaultSweep is from the first look for folders of killed agents to the second. The distance grows, up to sweepAtMost.
const (
	defaultSweep = time.Minute
	sweepAtMost  = time.Hour // much less than silentFor
)

// complete checks the options and sets the defaults.
func (o *Options) complete() error {
	if o.Identity == nil {
		return errors.New("the agent has no identity")
	}
	if o.TTL == 0 {
		o.TTL = 6 * time.Second
		if o.ClusterURL != "" {
			o.TTL = 30 * time.Second
		}
	}
	if o.TTL < time.Second {
		return fmt.Errorf("a registration's TTL of %v is under the least of 1s", o.TTL)
	}
	// The server counts whole seconds and cuts off the rest.
	o.TTL = (o.TTL + time.Second - 1).Truncate(time.Second)
	if o.ConnectTimeout == 0 {
		o.ConnectTimeout = core.DefaultConnectTimeout
	}
	if o.ConnectTimeout < 0 {
		return fmt.Errorf("a connect time-out of %v: want 0 or more", o.ConnectTimeout)
	}
	if o.JSPrefix == "" {
		o.JSPrefix = jetstream.DefaultAPIPrefix[:len(jetstream.DefaultAPIPrefix)-1]
	}
	if o.Logger == nil {
		o.Logger = zap.NewNop()
	}
	if o.linkIdle == 0 {
		o.linkIdle = defaultIdle
	}
	o.PingInterval, o.sweep, o.sweepMost = cmp.Or(o.PingInterval, defaultPing), cmp.Or(o.sweep, defaultSweep), cmp.Or(o.sweepMost, sweepAtMost)
	return nil
}
