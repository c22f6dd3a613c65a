package natsbus

import (
	"crypto/sha256"
	"errors"
	"fmt"

	"github.com/nats-io/nkeys"
)

// tokenKey derives a signing key from a token. By it a client proves that it knows
// the token, and the server behind a bootstrap port never sees it.
func tokenKey(token string) (nkeys.KeyPair, string, error) {
	seed := sha256.Sum256([]byte("kvconn token " + token))
	key, err := nkeys.FromRawSeed(nkeys.PrefixByteUser, seed[:])
	if err != nil {
		return nil, "", fmt.Errorf("the token's key: %w", err)
	}
	public, err := key.PublicKey()
	if err != nil {
		return nil, "", fmt.Errorf("the token's key: %w", err)
	}
	return key, public, nil
}

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
