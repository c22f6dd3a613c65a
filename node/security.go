// Secrets and lists are read from a configuration's keys and files: who gets in, and whom this agent trusts.

package node

import (
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"time"

	"go.uber.org/zap"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/natsbus"
)

// Bounds of secrets and lists.
const (
	maxSecretFile = 64 << 10
	maxToken      = 1024
	minSecret     = 16
	maxListed     = 4096 // entries of nats_nkeys and of bootstrap_allow
)

// security is read from a Config's keys and files: who gets in, and whom this agent
// trusts and contacts.
type security struct {
	identity    *natsbus.Identity // of this agent
	token, seed string
	join        string      // the secret of the ranks of this prefill engine
	server      *tls.Config // of the bootstrap port; nil for plain HTTP
	client      *tls.Config // nil trusts the system's authorities
	allow       *allowList
}

func checkToken(token string) error {
	if len(token) > maxToken {
		return fmt.Errorf("has %d bytes, at most %d are read", len(token), maxToken)
	}
	for _, r := range token {
		if r <= ' ' || r >= 0x7f {
			return fmt.Errorf("has a space, or a character outside of printable ASCII")
		}
	}
	return nil
}

// checkSecret is checkToken of a secret that agents prove to each other. A proof lets whoever hears it try secrets for as
// long as it likes. 16 characters that nobody has thought up are too many to try.
func checkSecret(secret string) error {
	if err := checkToken(secret); err != nil || secret == "" || len(secret) >= minSecret {
		return err
	}
	return fmt.Errorf("has %d characters, at least %d are wanted: who meets an agent can find a shorter one by trying; make one by \"head -c 32 /dev/urandom | base64\"", len(secret), minSecret)
}

// checkNATSToken lets a cluster have any token: agents prove that one to its servers, which the operator has set up.
func (c *Config) checkNATSToken(token string) error {
	if c.NATSURL != "" {
		return checkToken(token)
	}
	return checkSecret(token)
}

// openSecurity reads the files, and logs settings that are dangerous but allowed.
func openSecurity(c *Config, log *zap.Logger) (*security, error) {
	s := &security{token: c.NATSToken}
	bad := func(key, path string, err error) error {
		return fmt.Errorf("%w: config key %q: %s: %w", core.ErrInvalid, key, path, err)
	}
	var err error
	if c.NATSTokenFile != "" {
		if s.token, err = readSecret("nats_token_file", c.NATSTokenFile, log); err == nil {
			err = c.checkNATSToken(s.token)
		}
		if err != nil {
			return nil, bad("nats_token_file", c.NATSTokenFile, err)
		}
	}
	s.join = c.JoinToken
	if c.JoinTokenFile != "" {
		if s.join, err = readSecret("join_token_file", c.JoinTokenFile, log); err == nil {
			err = checkSecret(s.join)
		}
		if err != nil {
			return nil, bad("join_token_file", c.JoinTokenFile, err)
		}
	}
	if s.join != "" && s.join == s.token {
		return nil, fmt.Errorf("%w: config key \"join_token\": it equals nats_token, which decode engines have too: choose another secret", core.ErrInvalid)
	}
	if c.NATSNKeySeedFile != "" {
		if s.seed, err = readSecret("nats_nkey_seed_file", c.NATSNKeySeedFile, log); err == nil {
			err = natsbus.CheckSeed(s.seed)
		}
		if err != nil {
			return nil, bad("nats_nkey_seed_file", c.NATSNKeySeedFile, err)
		}
	}
	s.identity = natsbus.NewIdentity()
	if s.seed != "" && c.NATSURL != "" {
		if s.identity, err = natsbus.NewKeyedIdentity(s.seed); err != nil {
			return nil, bad("nats_nkey_seed_file", c.NATSNKeySeedFile, err)
		}
	}
	var certs []tls.Certificate
	if c.TLSCertFile != "" {
		warnReadable("tls_key_file", c.TLSKeyFile, log)
		cert, err := tls.LoadX509KeyPair(c.TLSCertFile, c.TLSKeyFile)
		if err != nil {
			return nil, bad("tls_cert_file", c.TLSCertFile+" with tls_key_file "+c.TLSKeyFile, err)
		}
		if leaf := cert.Leaf; leaf != nil && time.Now().After(leaf.NotAfter) {
			log.Warn("the certificate has expired: decode agents will refuse it", zap.String("tls_cert_file", c.TLSCertFile), zap.Time("end", leaf.NotAfter))
		}
		certs = []tls.Certificate{cert}
		// The control plane upgrades HTTP/1.1.
		s.server = &tls.Config{Certificates: certs, MinVersion: tls.VersionTLS12, NextProtos: []string{"http/1.1"}}
	}
	if c.TLSCAFile != "" || certs != nil {
		s.client = &tls.Config{Certificates: certs, MinVersion: tls.VersionTLS12}
	}
	if c.TLSCAFile != "" {
		text, err := readFile(c.TLSCAFile, 1<<20)
		if err != nil {
			return nil, bad("tls_ca_file", c.TLSCAFile, err)
		}
		s.client.RootCAs = x509.NewCertPool()
		if !s.client.RootCAs.AppendCertsFromPEM(text) {
			return nil, bad("tls_ca_file", c.TLSCAFile, fmt.Errorf("no certificate in PEM form"))
		}
	}
	if s.allow, err = parseAllow(c.BootstrapAllow); err != nil {
		return nil, fmt.Errorf("%w: config key \"bootstrap_allow\": %w", core.ErrInvalid, err)
	}
	if c.servesNATS() && s.token == "" && len(c.NATSNKeys) == 0 && !isLoopback(c.BootstrapHost) {
		log.Warn("every client that reaches the bootstrap port can ask for KV caches: set nats_token or nats_nkeys, or bind bootstrap_host to a private address",
			zap.String("bootstrap_host", c.BootstrapHost), zap.Int("bootstrap_port", c.BootstrapPort))
	}
	return s, nil
}

func isLoopback(host string) bool {
	ip := net.ParseIP(host)
	return host == "localhost" || ip != nil && ip.IsLoopback()
}

// readSecret reads a file of one line.
func readSecret(key, path string, log *zap.Logger) (string, error) {
	warnReadable(key, path, log)
	b, err := readFile(path, maxSecretFile)
	if err != nil {
		return "", err
	}
	secret := strings.TrimRight(string(b), "\r\n")
	if secret == "" {
		return "", fmt.Errorf("the file is empty")
	}
	return secret, nil
}

func warnReadable(key, path string, log *zap.Logger) {
	if st, err := os.Stat(path); err == nil && st.Mode().Perm()&0o007 != 0 {
		log.Warn("all users of this host can open a secret: chmod o-rwx", zap.String("key", key), zap.String("file", path),
			zap.Stringer("mode", st.Mode().Perm()))
	}
}

// readFile reads a file of a bounded size.
func readFile(path string, limit int64) ([]byte, error) {
	f, err := os.Open(filepath.Clean(path))
	if err != nil {
		return nil, err
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, limit+1))
	if err != nil {
		return nil, err
	}
	if int64(len(b)) > limit {
		return nil, fmt.Errorf("it is larger than %d bytes", limit)
	}
	return b, nil
}
