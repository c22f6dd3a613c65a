// Whether a pair's bytes are encrypted follows from both configurations. What cannot be encrypted is refused where it
// must be.

package node

import (
	"errors"
	"fmt"
	"net/url"
	"strings"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/tcp"
	"github.com/kvconn/kvconn/wire"
)

// The values of tcp_encrypt.
const (
	encryptAuto   = "auto"
	encryptAlways = "always"
	encryptNever  = "never"
)

// encrypting is a transport whose bytes can be encrypted.
type encrypting interface {
	core.Transport
	// AdmitSealed is Admit for a peer that must encrypt.
	AdmitSealed(peer core.AgentID) (ticket []byte, err error)
}

// secured says whether the configuration restricts who may get in, which means that its author does not trust the network.
func (c *Config) secured() bool {
	return c.NATSToken != "" || c.NATSTokenFile != "" || c.NATSNKeySeedFile != "" || len(c.NATSNKeys) > 0 ||
		c.TLSCertFile != "" || c.TLSCAFile != "" || c.clusterTLS()
}

// clusterTLS says whether the URLs of the cluster all begin with tls://. No URL at all does not count as that.
func (c *Config) clusterTLS() bool {
	for s := range strings.SplitSeq(c.NATSURL, ",") {
		if u, err := url.Parse(strings.TrimSpace(s)); err != nil || u.Scheme != "tls" {
			return false
		}
	}
	return true
}

func (c *Config) mustEncrypt() bool {
	return c.Encryption || c.TCPEncrypt == encryptAlways || c.TCPEncrypt == encryptAuto && c.secured()
}

// encryptWord is what peers are told of tcp.
func (c *Config) encryptWord() string {
	switch {
	case c.mustEncrypt():
		return wire.EncryptMust
	case c.TCPEncrypt == encryptNever:
		return wire.EncryptNever
	}
	return wire.EncryptMay
}

func (c *Config) tcpEncryption() tcp.Encryption {
	switch c.encryptWord() {
	case wire.EncryptMust:
		return tcp.EncryptMust
	case wire.EncryptNever:
		return tcp.EncryptNever
	}
	return tcp.EncryptMay
}

func (c *Config) checkEncryption() error {
	switch {
	case c.TCPEncrypt != encryptAuto && c.TCPEncrypt != encryptAlways && c.TCPEncrypt != encryptNever:
		return fmt.Errorf("%w: config key \"tcp_encrypt\" is %q, want auto, always or never", core.ErrInvalid, c.TCPEncrypt)
	case !c.Encryption:
		return nil
	case c.TCPEncrypt == encryptNever:
		return fmt.Errorf("%w: config key \"require_encryption\" is true, but tcp_encrypt is %q: remove one of the two keys", core.ErrInvalid, c.TCPEncrypt)
	case c.Transport == viaRDMA:
		return fmt.Errorf("%w: config key \"require_encryption\" is true, and transport is %q, which does not encrypt: take tcp or auto", core.ErrInvalid, c.Transport)
	case c.NATSURL != "" && !c.clusterTLS():
		return fmt.Errorf("%w: config key \"require_encryption\" is true, and nats_url has a server without tls://: a host on the way could write its registry, and be asked as a prefill engine", core.ErrInvalid)
	}
	return nil
}

// confidential says why a transport may carry nothing where require_encryption is set. local may: its
// bytes go from one process's memory to another's and are nowhere else, and both processes are of one user,
// which the kernel says of each, and have proved that they have the pair's ticket.
func (c *Config) confidential(transport string) error {
	if c.Encryption && transport == viaRDMA {
		return errors.New("require_encryption is set, and rdma does not encrypt")
	}
	return nil
}

// encrypts says, by what both engines want, whether tcp's streams with a peer are encrypted. If the two
// contradict each other, the error says why they cannot use tcp.
func (c *Config) encrypts(theirs wire.Endpoint, side, engine, otherSide, other string) (bool, error) {
	mine := c.encryptWord()
	says := fmt.Sprintf("says %q", theirs.Encrypt)
	if theirs.Encrypt == "" {
		says = "says nothing, as an older kvconn"
	}
	able := theirs.Encrypt == wire.EncryptMay || theirs.Encrypt == wire.EncryptMust
	if mine == wire.EncryptMust && !able || mine == wire.EncryptNever && theirs.Encrypt == wire.EncryptMust {
		return false, fmt.Errorf("encryption of KV data over tcp: %s engine %q says %q (tcp_encrypt %q, require_encryption %t), %s engine %q %s: if one side must, the other must be able to",
			side, engine, mine, c.TCPEncrypt, c.Encryption, otherSide, other, says)
	}
	return mine == wire.EncryptMust || theirs.Encrypt == wire.EncryptMust, nil
}
