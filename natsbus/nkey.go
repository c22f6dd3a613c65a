// An nkey is checked, and signs what a NATS server asks of it, but no text that agents believe.

package natsbus

import (
	"bytes"
	"errors"
	"fmt"
	"unicode/utf8"

	"github.com/nats-io/nkeys"

	"github.com/kvconn/kvconn/internal/fault"
)

// CheckSeed checks the seed of a user nkey. Its error does not contain the seed.
func CheckSeed(seed string) error {
	_, _, err := seedKey(seed)
	return err
}

// CheckNKey checks a public user nkey.
func CheckNKey(public string) error {
	if !nkeys.IsValidPublicUserKey(public) {
		return errors.New("not a public user nkey, which begins with U")
	}
	return nil
}

// signNonce signs the text that a NATS server sends to an agent that enters by its nkey. The key also signs
// texts that agents believe, and a hostile server must not get such a text signed. So signNonce refuses texts
// that are not UTF-8, as signText's, or that begin with "kvconn ", as nkeyText's.
func signNonce(key nkeys.KeyPair, nonce []byte) ([]byte, error) {
	if (!utf8.Valid(nonce) || bytes.HasPrefix(nonce, []byte("kvconn "))) && !fault.On("seal-signs-all") {
		return nil, fmt.Errorf("the NATS server wants %.60q signed, as no NATS server does: it may be hostile, see nats_url", nonce)
	}
	return key.Sign(nonce)
}

func seedKey(seed string) (nkeys.KeyPair, string, error) {
	key, err := nkeys.FromSeed([]byte(seed))
	if err != nil {
		return nil, "", errors.New("not an nkey seed, which begins with SU")
	}
	public, err := key.PublicKey()
	if err != nil || !nkeys.IsValidPublicUserKey(public) {
		return nil, "", errors.New("not the seed of a user nkey, which begins with SU")
	}
	return key, public, nil
}
