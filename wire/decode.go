// A message is read whole and within its limits, or it is refused: this file checks what the generated code cannot.

package wire

import (
	"fmt"

	"github.com/tinylib/msgp/msgp"
)

// message is a message that this package decodes.
type message interface {
	msgp.Unmarshaler
	check() error
}

// Decode reads one whole message from b. It refuses a message that is over a limit,
// cut off, or followed by more.
func Decode(b []byte, m message) error {
	if len(b) > MaxMessage {
		return fmt.Errorf("message of %d bytes, at most %d are read", len(b), MaxMessage)
	}
	rest, err := m.UnmarshalMsg(b)
	if err != nil {
		return fmt.Errorf("malformed %T of %d bytes: %w", m, len(b), err)
	}
	if len(rest) != 0 {
		return fmt.Errorf("malformed %T: %d bytes after its end", m, len(rest))
	}
	return m.check()
}

// short checks the length of a text. The generator limits arrays and byte strings only:
// until this check a text may be as long as the message lets it.
func short(field, s string, limit int) error {
	if len(s) > limit {
		return fmt.Errorf("%s of %d bytes, at most %d are read", field, len(s), limit)
	}
	return nil
}

func first(errs ...error) error {
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}

func (r *Request) check() error {
	switch {
	case r.Kind == KindHello && r.Hello != nil:
		return r.Hello.check()
	case r.Kind == KindLoad && r.Load != nil:
		return r.Load.check()
	case r.Kind == KindRenew && r.Renew != nil:
		for _, ids := range [][]string{r.Renew.Loads, r.Renew.Claims} {
			for _, id := range ids {
				if err := short("transfer_id", id, 144); err != nil {
					return err
				}
			}
		}
		return nil
	case r.Kind == KindFinish && len(r.Finishes) > 0:
		for _, f := range r.Finishes {
			if err := first(short("transfer_id", f.TransferID, 144), short("reason", f.Reason, 1024), short("digest", f.Restart, 16)); err != nil {
				return err
			}
		}
		return nil
	case r.Kind == KindJoin && r.Join != nil && r.Join.Agent != nil:
		return r.Join.Agent.check()
	case r.Kind == KindSignal && r.Signal != nil:
		return short("transport", r.Signal.Transport, 16)
	}
	return fmt.Errorf("request of kind %d without its part: the peer speaks another version", r.Kind)
}

func (a *Agent) check() error {
	err := first(short("agent id", a.ID, 64), short("engine_id", a.EngineID, 256),
		short("model", a.Model, 512), short("model_fingerprint", a.Fingerprint, 64), short("dtype", a.DType, 64), short("host", a.Host, 64))
	for _, f := range a.MustMatch {
		err = first(err, short("must_match", f.Name, 64), short(f.Name, f.Value, 256))
	}
	for _, e := range a.Endpoints {
		err = first(err, short("transport", e.Transport, 16), short("address", e.Address, 512))
	}
	for _, s := range a.Shapes {
		err = first(err, short("region name", s.Name, 256))
	}
	for _, l := range a.Lacks {
		err = first(err, short("transport", l.Transport, 16), short("reason", l.Reason, 512))
	}
	return err
}

func (l *Load) check() error {
	return first(short("transfer_id", l.TransferID, 144), short("transport", l.Transport, 16))
}

func (r *Reply) check() error {
	for _, e := range r.Ends {
		if int(e.Index) >= len(r.Statuses) {
			return fmt.Errorf("the reply has the end of transfer number %d, but the statuses of only %d", e.Index, len(r.Statuses))
		}
		if err := short("reason", e.Reason, 1024); err != nil {
			return err
		}
	}
	for _, t := range r.Tickets {
		if err := short("transport", t.Transport, 16); err != nil {
			return err
		}
	}
	return short("reason", r.Reason, 1024)
}
