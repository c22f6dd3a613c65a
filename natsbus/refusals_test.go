package natsbus

import (
	"testing"
	"testing/synctest"

	"go.uber.org/zap"
)

// TestOtherReleasesAreSaid: messages without a seal, or with another release's, are counted. A flood of them is ten lines of
// the log, which say the remedy.
func TestOtherReleasesAreSaid(t *testing.T) {
	synctest.Test(t, func(t *testing.T) { // no time passes
		log, logs := observed()
		d, p := NewIdentity(), NewIdentity()
		b := &Bus{}
		b.opt.Identity, b.log, b.seals = p, log, newSeals(p)
		data, err := hello("D").MarshalMsg(nil)
		if err != nil {
			t.Fatal(err)
		}
		o, err := d.open(p.id)
		if err != nil {
			t.Fatal(err)
		}
		next := o.message
		next[1] = sealVersion + 1
		for reason, c := range map[string]struct {
			m    []byte
			says string
		}{
			"plain":   {data, "without a seal"},
			"version": {next, "with a seal of version 2, and this agent knows version 1 only"},
		} {
			for range 1000 {
				v := &inboundRequest{link: &link{endpoint: endpoint{name: "NATS cluster c"}, id: p.id, seals: b.seals}, from: d.id, m: unboundMessage(c.m)}
				if b.admit(v) {
					t.Fatalf("%s: the message is taken", reason)
				}
			}
			lines := logs.FilterMessageSnippet(string(d.id)).FilterMessageSnippet("NATS cluster c").FilterMessageSnippet(c.says).FilterMessageSnippet("the same release of kvconn").FilterLevelExact(zap.WarnLevel)
			if lines.Len() != 10 {
				t.Errorf("%s: %d lines say it", reason, lines.Len())
			}
			if n := b.Refused()[reason]; n != 1000 {
				t.Errorf("%s: %d are counted", reason, n)
			}
		}
		if n := b.Refused()["invalid"]; n != 0 {
			t.Errorf("%d are invalid", n)
		}
	})
	if got := (&Bus{}).Refused(); got != nil {
		t.Errorf("without a cluster: %v", got)
	}
}
