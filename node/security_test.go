package node

import (
	"crypto/tls"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nkeys"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/rig/leaktest"
	"github.com/kvconn/kvconn/rig/nettest"
)

// theToken is as long as a secret must be.
const theToken = "the-token-0123456789"

func secretFile(t testing.TB, text string, mode os.FileMode) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "secret")
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(path, mode); err != nil {
		t.Fatal(err)
	}
	return path
}

// transfer moves one block from P to D.
func transfer(t testing.TB, p, d *side, id core.TransferID, from string) {
	t.Helper()
	p.fill(byte(len(id)), 3)
	p.offer(id, 3)
	d.load(id, from, 4)
	d.want(id, core.OK)
	p.want(id, core.OK)
	same(t, p, []kv.BlockID{3}, d, []kv.BlockID{4})
}

// Everything at once: TLS on the bootstrap port, a token from a file on one
// side, a key of its own on the other D.
func TestSecuredPair(t *testing.T) {
	leaktest.Check(t)
	ca, unknownPeer := nettest.NewAuthority(t), nettest.NewAuthority(t)
	key, err := nkeys.CreateUser()
	if err != nil {
		t.Fatal(err)
	}
	seed, _ := key.Seed()
	public, _ := key.PublicKey()

	pc := testConfig(RolePrefill)
	pc.NATSTokenFile = secretFile(t, theToken+"\n", 0o600)
	pc.NATSNKeys = []string{public}
	pc.TLSCertFile, pc.TLSKeyFile = ca.Issue(time.Now().Add(time.Hour), "127.0.0.1")
	p := open(t, pc)
	from := p.BootstrapAddress()
	if !strings.HasPrefix(from, "https://127.0.0.1:") {
		t.Fatalf("the bootstrap address is %q", from)
	}
	http := strings.Replace(from, "https://", "http://", 1)

	byToken := testConfig(RoleDecode)
	byToken.NATSToken, byToken.TLSCAFile = theToken, ca.File
	byKey := testConfig(RoleDecode)
	byKey.NATSNKeySeedFile, byKey.TLSCAFile = secretFile(t, string(seed)+"\r\n", 0o600), ca.File
	d, d2 := open(t, byToken), open(t, byKey)
	transfer(t, p, d, "by token", from)
	transfer(t, p, d2, "by key", from)
	transfer(t, p, d, "the router knows http only", http)

	for what, c := range map[string]struct {
		set  func(*Config)
		from string
		says string
	}{
		"wrong token":       {func(c *Config) { c.NATSToken, c.TLSCAFile = "another-of-16-chars", ca.File }, from, "nats_token"},
		"no token":          {func(c *Config) { c.TLSCAFile = ca.File }, from, "nats_token"},
		"unknown authority": {func(c *Config) { c.NATSToken, c.TLSCAFile = theToken, unknownPeer.File }, from, "tls_ca_file"},
		"plain":             {func(c *Config) { c.NATSToken = theToken }, http, "https"},
		"system's roots":    {func(c *Config) { c.NATSToken = theToken }, from, "tls_ca_file"},
	} {
		cfg := testConfig(RoleDecode)
		c.set(&cfg)
		unknownPeer := open(t, cfg)
		id := core.TransferID(what)
		unknownPeer.load(id, c.from, 1)
		r := unknownPeer.want(id, core.Unreachable, c.says, strings.TrimPrefix(from, "https://"))
		if strings.Contains(r.Reason, theToken) || strings.Contains(r.Reason, "another host") {
			t.Errorf("%s: %s", what, r.Reason)
		}
	}
}

// The route that changes something wants the token; those that routers read are
// open.
func TestHTTPRoutesOfASecuredPort(t *testing.T) {
	leaktest.Check(t)
	ca := nettest.NewAuthority(t)
	cfg := testConfig(RolePrefill)
	cfg.NATSToken = theToken
	cfg.TLSCertFile, cfg.TLSKeyFile = ca.Issue(time.Now().Add(time.Hour), "127.0.0.1")
	p := open(t, cfg)
	client := &http.Client{Timeout: bound, Transport: &http.Transport{TLSClientConfig: ca.Client()}}
	defer client.CloseIdleConnections()
	ask := func(method, path, token string) int {
		t.Helper()
		body := strings.NewReader(`{"engine_id":"engine-prefill","dp_rank":0,"tp_rank":1,"pp_rank":0,"addr":"tcp://h:1"}`)
		r, err := http.NewRequest(method, p.BootstrapAddress()+path, body)
		if err != nil {
			t.Fatal(err)
		}
		if token != "" {
			r.Header.Set("Authorization", "Bearer "+token)
		}
		resp, err := client.Do(r)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		return resp.StatusCode
	}
	for _, c := range []struct {
		method, path, token string
		want                int
	}{
		{"GET", "/health", "", 200}, {"GET", "/query", "", 200},
		{"POST", "/register", "", 401}, {"POST", "/register", "wrong", 401}, {"POST", "/register", theToken, 200},
	} {
		if got := ask(c.method, c.path, c.token); got != c.want {
			t.Errorf("%s %s with %q: %d, want %d", c.method, c.path, c.token, got, c.want)
		}
	}
}

func TestSecurityKeys(t *testing.T) {
	leaktest.Check(t)
	ca := nettest.NewAuthority(t)
	cert, key := ca.Issue(time.Now().Add(time.Hour), "h")
	empty, long := secretFile(t, "\n", 0o600), secretFile(t, strings.Repeat("x", maxToken+1), 0o600)
	one, two := secretFile(t, "one\n", 0o600), secretFile(t, "one\ntwo\n", 0o600)
	for what, c := range map[string]struct {
		role string
		set  func(*Config)
		says string
	}{
		"two tokens":        {RoleDecode, func(c *Config) { c.NATSToken, c.NATSTokenFile = "a", "b" }, "nats_token_file"},
		"token and seed":    {RoleDecode, func(c *Config) { c.NATSToken, c.NATSNKeySeedFile = "a", "b" }, "nats_nkey_seed_file"},
		"keys on decode":    {RoleDecode, func(c *Config) { c.NATSNKeys = []string{"U"} }, "nats_nkeys"},
		"no key":            {RolePrefill, func(c *Config) { c.NATSNKeys = []string{"SUA"} }, `nats_nkeys" has "SUA"`},
		"token's blank":     {RolePrefill, func(c *Config) { c.NATSToken = "a b" }, "nats_token"},
		"half a pair":       {RolePrefill, func(c *Config) { c.TLSCertFile = cert }, "tls_key_file"},
		"bad allow":         {RoleDecode, func(c *Config) { c.BootstrapAllow = []string{"h:1"} }, `bootstrap_allow" has "h:1"`},
		"replicas":          {RolePrefill, func(c *Config) { c.NATSReplicas, c.NATSURL = 6, "nats://h:1" }, "nats_replicas"},
		"replicas, no url":  {RolePrefill, func(c *Config) { c.NATSReplicas = 3 }, "nats_url"},
		"missing token":     {RolePrefill, func(c *Config) { c.NATSTokenFile = "/nowhere/token" }, "/nowhere/token"},
		"empty token":       {RolePrefill, func(c *Config) { c.NATSTokenFile = empty }, "the file is empty"},
		"long token":        {RolePrefill, func(c *Config) { c.NATSTokenFile = long }, "1025 bytes"},
		"short token":       {RolePrefill, func(c *Config) { c.NATSToken = "fifteen-letters" }, "15 characters, at least 16"},
		"short in a file":   {RoleDecode, func(c *Config) { c.NATSTokenFile = one }, "3 characters, at least 16"},
		"short join token":  {RolePrefill, func(c *Config) { c.JoinToken = "abc" }, "join_token"},
		"short join file":   {RolePrefill, func(c *Config) { c.JoinTokenFile = one }, "/dev/urandom"},
		"two lines":         {RolePrefill, func(c *Config) { c.NATSTokenFile = two }, "nats_token_file"},
		"token is a folder": {RolePrefill, func(c *Config) { c.NATSTokenFile = t.TempDir() }, "nats_token_file"},
		"seed is no seed":   {RoleDecode, func(c *Config) { c.NATSNKeySeedFile, c.BootstrapAllow = two, []string{"127.0.0.1"} }, "begins with SU"},
		"a seed alone":      {RoleDecode, func(c *Config) { c.NATSNKeySeedFile = one }, "no prefill engine to this agent"},
		"key of another":    {RolePrefill, func(c *Config) { c.TLSCertFile, c.TLSKeyFile = ca.File, key }, "tls_cert_file"},
		"missing cert":      {RolePrefill, func(c *Config) { c.TLSCertFile, c.TLSKeyFile = "/nowhere/c", key }, "/nowhere/c"},
		"missing CA":        {RoleDecode, func(c *Config) { c.TLSCAFile = "/nowhere/ca" }, "/nowhere/ca"},
		"CA is no PEM":      {RoleDecode, func(c *Config) { c.TLSCAFile = two }, "PEM"},
	} {
		cfg := testConfig(c.role)
		c.set(&cfg)
		a, err := Open(cfg, Options{})
		if err == nil {
			_ = a.Close()
		}
		if !errors.Is(err, core.ErrInvalid) || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: %v, want %q in it", what, err, c.says)
		}
	}
}

// TestSecurityWarnings: settings that are allowed but dangerous are told once, at open.
func TestSecurityWarnings(t *testing.T) {
	leaktest.Check(t)
	ca := nettest.NewAuthority(t)
	cert, key := ca.Issue(time.Now().Add(time.Hour), "h")
	oldCert, oldKey := ca.Issue(time.Now().Add(-time.Hour), "h")
	for what, c := range map[string]struct {
		set  func(*Config)
		want string // "" for no warning
	}{
		"loopback":        {func(*Config) {}, ""},
		"open to all":     {func(c *Config) { c.BootstrapHost = "0.0.0.0" }, "every client that reaches the bootstrap port"},
		"with a token":    {func(c *Config) { c.BootstrapHost, c.NATSToken = "0.0.0.0", theToken }, ""},
		"readable token":  {func(c *Config) { c.NATSTokenFile = secretFile(t, theToken, 0o644) }, "all users of this host"},
		"guarded token":   {func(c *Config) { c.NATSTokenFile = secretFile(t, theToken, 0o640) }, ""},
		"guarded TLS key": {func(c *Config) { c.TLSCertFile, c.TLSKeyFile = cert, key }, ""},
		"expired":         {func(c *Config) { c.TLSCertFile, c.TLSKeyFile = oldCert, oldKey }, "has expired"},
		"readable TLS key": {func(c *Config) {
			b, _ := os.ReadFile(key)
			c.TLSCertFile, c.TLSKeyFile = cert, secretFile(t, string(b), 0o604)
		}, "all users of this host"},
	} {
		cfg := testConfig(RolePrefill)
		c.set(&cfg)
		if err := cfg.Check(); err != nil {
			t.Fatal(err)
		}
		o, logs := observer.New(zap.WarnLevel)
		if _, err := openSecurity(&cfg, zap.New(o)); err != nil {
			t.Fatal(err)
		}
		if n := logs.FilterMessageSnippet(c.want).Len(); (c.want == "" && logs.Len() != 0) || (c.want != "" && (n != 1 || logs.Len() != 1)) {
			t.Errorf("%s: %v, want %q", what, logs.All(), c.want)
		}
	}
}

// An old client is turned away by name and not by a hanging connection.
func TestTLSPortRefusesOldTLS(t *testing.T) {
	leaktest.Check(t)
	ca := nettest.NewAuthority(t)
	cfg := testConfig(RolePrefill)
	cfg.TLSCertFile, cfg.TLSKeyFile = ca.Issue(time.Now().Add(time.Hour), "127.0.0.1")
	p := open(t, cfg)
	old := ca.Client()
	old.MinVersion, old.MaxVersion = tls.VersionTLS10, tls.VersionTLS11
	c, err := tls.Dial("tcp", strings.TrimPrefix(p.BootstrapAddress(), "https://"), old)
	if err == nil {
		_ = c.Close()
		t.Fatal(fmt.Sprint("spoke ", tls.VersionName(c.ConnectionState().Version)))
	}
	if !strings.Contains(err.Error(), "protocol version") {
		t.Error(err)
	}
}
