package natsbus

import (
	"testing"
	"testing/synctest"

	"go.uber.org/zap"
)

// TestPlainIsSaid: messages without a seal are counted, and a flood of them is ten lines of the log, which say the remedy.
func TestPlainIsSaid(t *testing.T) {
	synctest.Test(t, func(t *testing.T) { // no time passes
		log, logs := observed()
		d, p := NewIdentity(), NewIdentity()
		b := &Bus{}
		b.opt.Identity, b.log, b.seals = p, log, newSeals(p)
		data, err := hello("D").MarshalMsg(nil)
		if err != nil {
			t.Fatal(err)
		}
		for range 1000 {
			v := &asked{link: &link{endpoint: endpoint{name: "NATS cluster c"}, id: p.id, seals: b.seals}, from: d.id, m: unboundMessage(data)}
			if b.admit(v) {
				t.Fatal("a plain message is taken")
			}
		}
		lines := logs.FilterMessageSnippet(string(d.id)).FilterMessageSnippet("NATS cluster c").FilterMessageSnippet("the same release of kvconn").FilterLevelExact(zap.WarnLevel)
		if lines.Len() != 10 {
			t.Errorf("%d lines say it", lines.Len())
		}
		if got := b.Refused(); got["plain"] != 1000 || got["strange"] != 0 {
			t.Errorf("%v", got)
		}
	})
	if got := (&Bus{}).Refused(); got != nil {
		t.Errorf("without a cluster: %v", got)
	}
}
