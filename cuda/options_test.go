package cuda

import (
	"testing"

	"github.com/kvconn/kvconn/core"
)

// TestOptionsDefaults: Options that set nothing have the defaults that other packages take from
// here and from core. A smaller ring has smaller slots.
func TestOptionsDefaults(t *testing.T) {
	var o, small Options
	small.RingBytes = 1 << 20
	for _, o := range []*Options{&o, &small} {
		if err := o.complete(); err != nil {
			t.Fatal(err)
		}
	}
	if o.RingBytes != DefaultRingBytes || o.SlotBytes != DefaultSlotBytes || o.StallTimeout != core.DefaultStallTimeout {
		t.Errorf("Options that set nothing are %+v, want a ring of %d bytes, slots of %d and a stall timeout of %s", o, DefaultRingBytes, DefaultSlotBytes, core.DefaultStallTimeout)
	}
	if small.SlotBytes != small.RingBytes/leastSlots {
		t.Errorf("a ring of %d bytes has slots of %d", small.RingBytes, small.SlotBytes)
	}
}
