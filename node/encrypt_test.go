package node

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/rig/coretest"
	"github.com/kvconn/kvconn/rig/leaktest"
	"github.com/kvconn/kvconn/wire"
)

// TestEncryptionKeys: what cannot be held is refused when the agent opens.
func TestEncryptionKeys(t *testing.T) {
	for what, c := range map[string]struct {
		set  func(*Config)
		says string
	}{
		"another word":      {func(c *Config) { c.TCPEncrypt = "maybe" }, `"tcp_encrypt" is "maybe"`},
		"required, never":   {func(c *Config) { c.Encryption, c.TCPEncrypt = true, encryptNever }, `tcp_encrypt is "never"`},
		"required by rdma":  {func(c *Config) { c.Encryption, c.Transport = true, viaRDMA }, `transport is "rdma", which does not encrypt`},
		"through a cluster": {func(c *Config) { c.Encryption, c.NATSURL = true, "tls://h:1,nats://i:1" }, "nats_url has a server without tls://"},
	} {
		cfg := testConfig(RoleDecode)
		c.set(&cfg)
		if err := cfg.Check(); !errors.Is(err, core.ErrInvalid) || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: %v, want %q in it", what, err, c.says)
		}
	}
	for what, c := range map[string]struct {
		set  func(*Config)
		word string
	}{
		"as it comes":        {func(*Config) {}, wire.EncryptMay},
		"token":              {func(c *Config) { c.NATSToken = theToken }, wire.EncryptMust},
		"token in a file":    {func(c *Config) { c.NATSTokenFile = "x" }, wire.EncryptMust},
		"nkey":               {func(c *Config) { c.NATSNKeySeedFile = "x" }, wire.EncryptMust},
		"nkeys":              {func(c *Config) { c.NATSNKeys = []string{"x"} }, wire.EncryptMust},
		"certificate":        {func(c *Config) { c.TLSCertFile = "x" }, wire.EncryptMust},
		"authority":          {func(c *Config) { c.TLSCAFile = "x" }, wire.EncryptMust},
		"cluster":            {func(c *Config) { c.NATSURL = "nats://h:1" }, wire.EncryptMay},
		"cluster by tls":     {func(c *Config) { c.NATSURL = "tls://h:1, tls://i:1" }, wire.EncryptMust},
		"token, never":       {func(c *Config) { c.NATSToken, c.TCPEncrypt = theToken, encryptNever }, wire.EncryptNever},
		"always":             {func(c *Config) { c.TCPEncrypt = encryptAlways }, wire.EncryptMust},
		"required":           {func(c *Config) { c.Encryption = true }, wire.EncryptMust},
		"required, by a tls": {func(c *Config) { c.Encryption, c.NATSURL = true, "tls://h:1" }, wire.EncryptMust},
	} {
		cfg := testConfig(RoleDecode)
		c.set(&cfg)
		if err := cfg.checkEncryption(); err != nil || cfg.encryptWord() != c.word {
			t.Errorf("%s: %q, %v, want %q", what, cfg.encryptWord(), err, c.word)
		}
	}
}

// openLogged is open with the agent's log.
func openLogged(t *testing.T, cfg Config) (*side, *observer.ObservedLogs) {
	t.Helper()
	return openOver(t, cfg, make([]byte, layers*numBlocks*blockBytes))
}

// openOver is openLogged with a cache of the test's.
func openOver(t *testing.T, cfg Config, cache []byte) (*side, *observer.ObservedLogs) {
	t.Helper()
	o, logs := observer.New(zap.InfoLevel)
	a, err := Open(cfg, Options{Logger: zap.New(o)})
	if err != nil {
		t.Fatal(err)
	}
	s := &side{Agent: a, t: t, cache: cache, seen: map[core.TransferID]core.Report{}}
	t.Cleanup(func() { _ = a.Close() })
	if err := a.RegisterKVCaches(regions(s.cache)); err != nil {
		t.Fatal(err)
	}
	return s, logs
}

// TestEncryptionOfPairs: if one engine must encrypt, both do. An engine that never does is
// refused then, with what both say.
func TestEncryptionOfPairs(t *testing.T) {
	for _, c := range []struct {
		p, d, token string
		encrypted   bool
		says        []string // of the refusal
	}{
		{p: encryptAuto, d: encryptAuto},
		{p: encryptAuto, d: encryptAuto, token: theToken, encrypted: true},
		{p: encryptAlways, d: encryptAuto, encrypted: true},
		{p: encryptAuto, d: encryptAlways, encrypted: true},
		{p: encryptNever, d: encryptAuto},
		{p: encryptAuto, d: encryptNever},
		{p: encryptNever, d: encryptNever, token: theToken},
		{p: encryptNever, d: encryptAlways, says: []string{`prefill engine "engine-prefill" says "never" (tcp_encrypt "never"`, `decode engine "engine-decode" says "must"`}},
		{p: encryptAlways, d: encryptNever, says: []string{`prefill engine "engine-prefill" says "must" (tcp_encrypt "always"`, `decode engine "engine-decode" says "never"`}},
		{p: encryptNever, d: encryptAuto, token: theToken, says: []string{`says "never" (tcp_encrypt "never"`, `says "must"`}},
	} {
		t.Run(fmt.Sprintf("%s %s %s", c.p, c.d, c.token), func(t *testing.T) {
			leaktest.Check(t)
			pc, dc := forced(RolePrefill, viaTCP), forced(RoleDecode, viaTCP)
			pc.TCPEncrypt, dc.TCPEncrypt, pc.NATSToken, dc.NATSToken = c.p, c.d, c.token, c.token
			p, _ := openLogged(t, pc)
			d, logs := openLogged(t, dc)
			if c.says != nil {
				p.offer("t", 1)
				d.load("t", p.BootstrapAddress(), 1)
				d.want("t", core.Refused, c.says...)
				return
			}
			transfer(t, p, d, "t", p.BootstrapAddress())
			found := logs.FilterMessage("prefill agent found").All()
			if len(found) != 1 || strings.Contains(fmt.Sprint(found[0].ContextMap()["transports"]), "(encrypted)") != c.encrypted {
				t.Errorf("decode said %+v, want encryption %t", found, c.encrypted)
			}
		})
	}
}

// TestEncryptionWithoutAWord: prefill refuses a decode agent that must be encrypted and does
// not know of it, before it gives a ticket.
func TestEncryptionWithoutAWord(t *testing.T) {
	cfg := testConfig(RolePrefill)
	cfg.TCPEncrypt = encryptAlways
	tr := newTransports("p", &cfg, zap.NewNop(), nil, nil, nil)
	if _, err := tr.cfg.encrypts(wire.Endpoint{Transport: viaTCP}, "prefill", "p", "decode", "d"); err == nil || !strings.Contains(err.Error(), "says nothing, as an older kvconn") {
		t.Error(err)
	}
	cfg.TCPEncrypt = encryptAuto
	if seals, err := tr.cfg.encrypts(wire.Endpoint{Transport: viaTCP}, "prefill", "p", "decode", "d"); err != nil || seals {
		t.Error(seals, err)
	}
}

// TestRequiredEncryption: rdma is not used, and is said to be missing for that reason. Where
// it is used beside a token, the log says that it does not encrypt.
func TestRequiredEncryption(t *testing.T) {
	leaktest.Check(t)
	n := coretest.NewNetwork()
	pc, dc := testConfig(RolePrefill), testConfig(RoleDecode)
	dc.Encryption = true
	p, d := openFakeAgent(t, n, pc, nil), openFakeAgent(t, n, dc, nil)
	goesBy(t, p, d, "t", viaTCP)
	if s := d.Stats().Transports[viaRDMA]; s.Available || !strings.Contains(s.Reason, "require_encryption") {
		t.Errorf("decode has %+v", s)
	}
	secured := testConfig(RoleDecode)
	secured.TCPEncrypt = encryptAlways
	if warned := openFakeAgent(t, n, secured, nil); warned.said("KV data that goes over rdma is not encrypted") != 1 {
		t.Errorf("decode said %v", warned.logs.All())
	}
}

// TestEncryptionOnOneHost: local is for agents that must encrypt too, also where tcp would be refused
// between them. Where local is not there, such a pair has no transport.
func TestEncryptionOnOneHost(t *testing.T) {
	for _, c := range []struct {
		p, d string // transports
		by   string
		says []string
	}{
		{p: "auto", d: "auto", by: viaLocal},
		{p: "rdma,tcp", d: "auto", says: []string{`decode engine "engine-decode" says "must"`, `prefill engine "engine-prefill" says "never"`}},
		{p: "auto", d: "tcp", says: []string{`says "never"`, `says "must"`}},
	} {
		t.Run(c.p+" "+c.d, func(t *testing.T) {
			leaktest.Check(t)
			pc, dc := forced(RolePrefill, c.p), forced(RoleDecode, c.d)
			pc.NATSToken, dc.NATSToken = theToken, theToken
			pc.TCPEncrypt, dc.Encryption = encryptNever, true
			p, _ := openLogged(t, pc)
			d, _ := openLogged(t, dc)
			if c.says != nil {
				p.offer("t", 1)
				d.load("t", p.BootstrapAddress(), 1)
				d.want("t", core.Refused, c.says...)
				return
			}
			transfer(t, p, d, "t", p.BootstrapAddress())
			if s := d.Stats(); s.Transports[c.by].Loads != 1 || s.Transports[viaRDMA].Available {
				t.Errorf("decode counts %+v", s)
			}
		})
	}
}
