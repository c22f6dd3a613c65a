// Which servers the router has and within which bounds it works: the defaults, and what is refused.

package proxy

import (
	"cmp"
	"fmt"
	"net"
	"net/url"
	"strconv"
	"strings"
	"time"

	"go.uber.org/zap"

	"github.com/kvconn/kvconn/bootstrap"
)

// DefaultConfig is a Config with everything that has a default.
func DefaultConfig() Config {
	return Config{
		Host: "127.0.0.1", Port: 8000,
		Contract: Mooncake, Balance: LeastLoaded, Retries: 2, AccessLog: true,
		MaxBody: 32 << 20, BodyMemory: 128 << 20, BodyTimeout: time.Minute, MaxRequests: 1024,
		RetryInterval: 500 * time.Millisecond, RefreshInterval: time.Second, ShutdownTimeout: 30 * time.Second,
	}
}

// maxRetries bounds Config.Retries: a request that kills its engines must not reach every
// engine.
const maxRetries = 9

// Config says which servers to route to. Empty strings, zero durations and zero sizes
// stand for what DefaultConfig has.
type Config struct {
	// Host and Port are where Run listens; port 0 takes a free one.
	Host string
	Port int
	// Prefill and Decode are the servers, at least one of each.
	Prefill []Prefill
	Decode  []string
	// BootstrapCA, when not empty, says that the bootstrap ports speak https, and
	// names the file of the authority to trust in PEM form, or "system".
	BootstrapCA string

	// Contract is how P and D are told of each other.
	Contract Contract
	// Balance is how a request's servers are chosen.
	Balance Balance
	// Retries is how many further attempts with other engines the router makes for a request;
	// 0 is none. Once the client has seen a byte of an answer, the router makes none.
	Retries int
	// FallbackDecode lets a decode server compute a prompt itself if no prefill server is
	// up, or if the retries are spent. By the SGLang contract it is refused: decode servers
	// cannot compute prompts.
	FallbackDecode bool
	// DecodeBelow is a size in bytes. If a request's body is smaller, only a decode server gets the request, and computes the prompt
	// itself. 0: no request is that small. With the SGLang contract another value than 0 is refused.
	DecodeBelow int64
	// AccessLog logs a line for each completion request.
	AccessLog bool

	// MaxBody bounds a request's body.
	MaxBody int64
	// BodyMemory bounds the memory of all requests: what each request under way takes, its header, and its body until decode begins to
	// answer. Beside this, answers that are held whole may take a quarter as much.
	BodyMemory int64
	// BodyTimeout is how long a client may take for its body.
	BodyTimeout time.Duration
	// MaxRequests bounds the requests in flight, further ones get a 503. The last of them are for clients that have few.
	MaxRequests int
	// RetryInterval is the time until a server that is not up is asked again.
	RetryInterval time.Duration
	// RefreshInterval is how often the router asks a server that is up whether it is still up,
	// and for its engine ids.
	RefreshInterval time.Duration
	// ShutdownTimeout is how long running requests may go on after the end of
	// Run's context.
	ShutdownTimeout time.Duration

	// Listening, if set, is called by Run with the address it listens on.
	Listening func(net.Addr)
	// Logger may be nil.
	Logger *zap.Logger
}

// Prefill is one prefill server.
type Prefill struct {
	// URL is the server's base URL, as http://host:8010.
	URL string
	// BootstrapPort is its bootstrap port on the same host. 0 stands for bootstrap.DefaultPort. By the NIXL
	// contract 0 stands for none, so that its data parallel ranks are not known. By the
	// SGLang contract 0 stands for the port that the server names itself.
	BootstrapPort int
}

// withDefaults fills in zero values.
func (c Config) withDefaults() Config {
	d := DefaultConfig()
	c.Host = cmp.Or(c.Host, d.Host)
	c.Contract = cmp.Or(c.Contract, d.Contract)
	c.Balance = cmp.Or(c.Balance, d.Balance)
	c.MaxBody = cmp.Or(c.MaxBody, d.MaxBody)
	c.BodyMemory = cmp.Or(c.BodyMemory, d.BodyMemory)
	c.BodyTimeout = cmp.Or(c.BodyTimeout, d.BodyTimeout)
	c.MaxRequests = cmp.Or(c.MaxRequests, d.MaxRequests)
	c.RetryInterval = cmp.Or(c.RetryInterval, d.RetryInterval)
	c.RefreshInterval = cmp.Or(c.RefreshInterval, d.RefreshInterval)
	c.ShutdownTimeout = cmp.Or(c.ShutdownTimeout, d.ShutdownTimeout)
	if c.Logger == nil {
		c.Logger = zap.NewNop()
	}
	return c
}

// validate names the first value that cannot work, and a value that would.
func (c Config) validate() error {
	if len(c.Prefill) == 0 {
		return fmt.Errorf("proxy: no prefill server: give at least one, as --prefill http://host:8010 8998")
	}
	if len(c.Decode) == 0 {
		return fmt.Errorf("proxy: no decode server: give at least one, as --decode http://host:8020")
	}
	if c.Port < 0 || c.Port > 65535 {
		return fmt.Errorf("proxy: port %d: give one from 1 to 65535, or 0 for any free one", c.Port)
	}
	if c.Contract != "" {
		if _, err := parseContract(string(c.Contract)); err != nil {
			return err
		}
	}
	if c.Balance != "" {
		if _, err := parseBalance(string(c.Balance)); err != nil {
			return err
		}
	}
	if c.Retries < 0 || c.Retries > maxRetries {
		return fmt.Errorf("proxy: %d retries: give 0 to %d", c.Retries, maxRetries)
	}
	if c.FallbackDecode && c.Contract == SGLang {
		return fmt.Errorf("proxy: --fallback-decode is set, but the contract is sglang, whose decode servers compute no prompts: leave --fallback-decode out")
	}
	if c.DecodeBelow != 0 && c.Contract == SGLang {
		return fmt.Errorf("proxy: --decode-below is set, but the contract is sglang, whose decode servers compute no prompts: leave --decode-below out")
	}
	if err := c.CheckLimits(); err != nil {
		return err
	}
	if c.DecodeBelow < 0 || c.BodyTimeout < 0 || c.RetryInterval < 0 || c.RefreshInterval < 0 || c.ShutdownTimeout < 0 {
		return fmt.Errorf("proxy: negative limit among DecodeBelow %d, BodyTimeout %v, RetryInterval %v, RefreshInterval %v, ShutdownTimeout %v: 0 gives the default",
			c.DecodeBelow, c.BodyTimeout, c.RetryInterval, c.RefreshInterval, c.ShutdownTimeout)
	}
	given := map[string]bool{}
	for _, p := range c.Prefill {
		base, err := baseURL(p.URL)
		if err != nil {
			return fmt.Errorf("proxy: prefill server: %w", err)
		}
		if err := onlyOnce(given, prefillRole, base); err != nil {
			return err
		}
		if p.BootstrapPort < 0 || p.BootstrapPort > 65535 {
			return fmt.Errorf("proxy: prefill server %s: bootstrap port %d: give one from 1 to 65535, or leave it out for %d",
				p.URL, p.BootstrapPort, bootstrap.DefaultPort)
		}
	}
	for _, d := range c.Decode {
		base, err := baseURL(d)
		if err != nil {
			return fmt.Errorf("proxy: decode server: %w", err)
		}
		if err := onlyOnce(given, decodeRole, base); err != nil {
			return err
		}
	}
	return nil
}

// CheckLimits names the first of MaxRequests, MaxBody and BodyMemory that cannot work, and a value that would.
func (c Config) CheckLimits() error {
	switch d := c.withDefaults(); {
	case c.MaxRequests < 0:
		return fmt.Errorf("proxy: --max-requests %d: give at least 1", c.MaxRequests)
	case c.MaxBody < 0:
		return fmt.Errorf("proxy: --max-body %d: give at least 1", c.MaxBody)
	case c.BodyMemory < 0:
		return fmt.Errorf("proxy: --body-memory %d: give at least %d", c.BodyMemory, d.MaxBody+leastReserve)
	case d.BodyMemory < d.MaxBody+leastReserve:
		return fmt.Errorf("proxy: --body-memory %d has no room for a body of --max-body %d and %d beside it: raise --body-memory to %d, or lower --max-body",
			d.BodyMemory, d.MaxBody, leastReserve, d.MaxBody+leastReserve)
	}
	return nil
}

// onlyOnce refuses a server that is named twice: a server is counted and measured as one.
func onlyOnce(given map[string]bool, role string, base *url.URL) error {
	key := role + " server " + base.String()
	if given[key] {
		return fmt.Errorf("proxy: %s is given twice: give it once; its data parallel ranks are found", key)
	}
	given[key] = true
	return nil
}

// baseURL parses a server's URL. The result has no slash at its end, so that
// paths can be appended, and one spelling of its host, so that two of them can be compared.
func baseURL(s string) (*url.URL, error) {
	const remedy = "write it as http://host:port"
	u, err := url.Parse(s)
	if err != nil {
		return nil, fmt.Errorf("bad URL %q (%v): %s", s, err, remedy)
	}
	if u.Scheme != "http" && u.Scheme != "https" || u.Hostname() == "" {
		return nil, fmt.Errorf("bad URL %q: %s", s, remedy)
	}
	if port := u.Port(); port != "" || strings.HasSuffix(u.Host, ":") {
		if n, err := strconv.Atoi(port); err != nil || n < 1 || n > 65535 {
			return nil, fmt.Errorf("bad URL %q: port %q is not from 1 to 65535: %s", s, port, remedy)
		}
	}
	if u.User != nil || u.RawQuery != "" || u.Fragment != "" {
		return nil, fmt.Errorf("bad URL %q: it must not have a user, query or fragment: %s", s, remedy)
	}
	name, zone := u.Host, ""
	if i := strings.IndexByte(name, '%'); i >= 0 { // an interface, whose name has a case
		name, zone = name[:i], name[i:]
	}
	u.Host = strings.ToLower(name) + zone
	u.Path = strings.TrimRight(u.Path, "/")
	u.RawPath = ""
	return u, nil
}

// bootstrapURL is where D finds P's control plane, on the host of P's URL.
func bootstrapURL(base *url.URL, port int, secure bool) string {
	if port == 0 {
		port = bootstrap.DefaultPort
	}
	scheme := "http://"
	if secure {
		scheme = "https://"
	}
	host := strings.ReplaceAll(base.Hostname(), "%", "%25") // of an address with a zone
	return scheme + net.JoinHostPort(host, strconv.Itoa(port))
}
