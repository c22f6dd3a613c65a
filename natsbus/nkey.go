package natsbus

import (
	"errors"

	"github.com/nats-io/nkeys"
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
