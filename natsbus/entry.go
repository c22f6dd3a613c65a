// Who may write an entry of a cluster's registry, and which entries a reader believes.

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

// Whoever may write a cluster's registry can write under any key. So if an engine id begins with an nkey, it belongs to that nkey:
// the nkey signs the entries of the engine's ranks, and readers believe no other entries. A signature covers the entry's key (engine
// id, tp and pp rank), its time, its end and its whole value, which has the agent and its addresses. An entry ends. So if somebody
// writes an old entry again, it hides the engine's absence for a short time only. Nobody signs that an engine has no entry: whoever
// may write under the key can remove the entry.
const (
	// sinceHeader orders the agents that register one rank: the newest wins,
	// also when the bucket was lost and all of them come back at once.
	sinceHeader     = "Kvconn-Since"
	endsHeader      = "Kvconn-Ends" // in ns since 1970
	signatureHeader = "Kvconn-Signature"

	// The NATS server adds these headers to a message that comes from another stream, or from a schedule.
	sourceHeader   = "Nats-Stream-Source"
	scheduleHeader = "Nats-Schedule"

	// clocksApart is more than any two clocks of one deployment's hosts differ.
	clocksApart = time.Minute
)

// mayName says why an agent cannot have an entry under a key, which it could not sign; nil: it can.
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

// entryText is the text that is signed for an entry. No other text that an agent signs begins in the same way, and so none that it
// lets a server choose (signNonce).
func entryText(key string, header nats.Header, data []byte) []byte {
	text := append([]byte{0xff}, "kvconn entry 1\x00"+key+"\x00"+header.Get(sinceHeader)+"\x00"+header.Get(endsHeader)+"\x00"...)
	return append(text, data...)
}

// attest says whether an entry is its engine's own, as far as that can be known. If it is and has ended, ended says when.
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

// failed is called with an error of the link. If the server has denied this write, it ends the write; the link's mu is held.
func (w *writing) failed(err error) {
	if w != nil && errors.Is(err, nats.ErrPermissionViolation) && strings.Contains(err.Error(), strconv.Quote(w.key)) {
		w.deny(&deniedError{err})
	}
}

// deniedError says that the server does not let this agent publish at a key.
type deniedError struct{ error }

func (e *deniedError) Unwrap() error { return e.error }
