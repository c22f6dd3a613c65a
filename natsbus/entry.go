package natsbus

import (
	"context"
	"crypto/ed25519"
	"encoding/base64"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/kvconn/kvconn/internal/fault"
)

// Whoever may write a cluster's registry can write under any key. So an engine id that begins with an nkey is of that key: the
// entries of its ranks are signed by it, and whoever reads them believes no others. A signature is of the entry's key (engine
// id, tp and pp rank), its time, its end and its whole value, in which are the agent and its addresses. An entry ends, so that
// an old one that somebody writes again hides its engine's absence for a short time only. That an engine has no entry is not
// signed: who may write under the key can say so.
const (
	// sinceHeader orders the agents that register one rank: the newest wins,
	// also when the bucket was lost and all of them come back at once.
	sinceHeader     = "Kvconn-Since"
	endsHeader      = "Kvconn-Ends" // in ns since 1970
	signatureHeader = "Kvconn-Signature"

	// What the NATS server adds to a message that it has from another stream, or from a schedule.
	sourceHeader   = "Nats-Stream-Source"
	scheduleHeader = "Nats-Schedule"

	// clocksApart is more than the clock of one host of a deployment is behind another's.
	clocksApart = time.Minute
)

// mayName says why an agent cannot have an entry under a key: it could not sign it.
func (i *Identity) mayName(key, engine string) error {
	switch owner, own := keyOwner(key), i.nkey(); {
	case owner == "" || owner == own:
		return nil
	case own == "":
		return fmt.Errorf("its engine_id begins with the nkey %s, and this agent has none: set nats_nkey_seed_file, or give it another engine_id", owner)
	default:
		return fmt.Errorf("its engine_id begins with the nkey %s, and this agent's key is %s: begin it with that, as in %q", owner, own, own+strings.TrimPrefix(engine, owner))
	}
}

// mayNotWrite says what to change where the cluster's permissions keep an agent from writing its entry.
func (i *Identity) mayNotWrite(cluster, key, engine string, denied error) error {
	remedy := "let its user publish at " + key
	if own := i.nkey(); own != "" && keyOwner(key) == "" {
		remedy = fmt.Sprintf("begin its engine_id with its nkey, as in %q, as examples/nats/kvconn.conf wants it, or %s", own+"-"+engine, remedy)
	}
	return fmt.Errorf("%s does not let this agent write its entry: %s: %w", cluster, remedy, denied)
}

// signEntry signs an entry of an nkey's engine. The others have no signature.
func (i *Identity) signEntry(m *nats.Msg, ends time.Time) {
	if keyOwner(m.Subject) == "" {
		return
	}
	m.Header.Set(endsHeader, strconv.FormatInt(ends.UnixNano(), 10))
	m.Header.Set(signatureHeader, base64.RawURLEncoding.EncodeToString(ed25519.Sign(i.signer, entryText(m.Subject, m.Header, m.Data))))
}

// entryText is what a signature is of. It begins like no text that an agent signs elsewhere, and like none that it lets a
// server choose (signNonce).
func entryText(key string, header nats.Header, data []byte) []byte {
	text := append([]byte{0xff}, "kvconn entry 1\x00"+key+"\x00"+header.Get(sinceHeader)+"\x00"+header.Get(endsHeader)+"\x00"...)
	return append(text, data...)
}

// attest says whether an entry is its engine's own, as far as that can be known, and when it ended, if it was and has.
func attest(header nats.Header, data []byte, key string) (ended time.Time, err error) {
	invalid := func(format string, args ...any) (time.Time, error) {
		return time.Time{}, fmt.Errorf("the entry of %s "+format, append([]any{keyName(key)}, args...)...)
	}
	for name := range header {
		if strings.HasPrefix(name, scheduleHeader) || name == sourceHeader {
			return invalid("is the NATS server's work, not an engine's: it has the header %s; make stream %s anew, without schedules and sources", name, stream)
		}
	}
	owner := keyOwner(key)
	if owner == "" {
		return time.Time{}, nil
	}
	public := publicOf(owner)
	if len(public) != ed25519.PublicKeySize {
		return invalid("is of no key")
	}
	signature, err := base64.RawURLEncoding.DecodeString(header.Get(signatureHeader))
	if !fault.On("bus-entry-unsigned") && (err != nil || !ed25519.Verify(public, entryText(key, header, data), signature)) {
		return invalid("is not signed by the nkey with which its engine_id begins: another has written it, and its engine writes over it")
	}
	ends, err := strconv.ParseInt(header.Get(endsHeader), 10, 64)
	if end := time.Unix(0, ends); err != nil || time.Now().After(end) && !fault.On("bus-entry-endless") {
		return end, nil
	}
	return time.Time{}, nil
}

// writing is an entry that this agent writes at this moment.
type writing struct {
	key  string
	deny context.CancelCauseFunc
}

// failed hears an error of the link; the link's mu is held.
func (w *writing) failed(err error) {
	if w != nil && errors.Is(err, nats.ErrPermissionViolation) && strings.Contains(err.Error(), strconv.Quote(w.key)) {
		w.deny(&deniedError{err})
	}
}

// deniedError says that the server does not let this agent publish at a key.
type deniedError struct{ error }

func (e *deniedError) Unwrap() error { return e.error }
