package machine

import (
	"strings"
	"testing"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/kv"
)

func TestPartIDs(t *testing.T) {
	long := core.TransferID(strings.Repeat("x", core.MaxTransferID))
	for _, s := range []kv.Share{{K: 0, Of: 1, Source: 0}, {K: 1, Of: 2, Source: 0}, {K: 63, Of: 64, Source: kv.MaxSources - 1}} {
		for _, id := range []core.TransferID{"a", "a/1@2", "0/1@0", long} {
			part := PartID(id, s)
			base, back, ok := splitPart(part)
			if !ok || base != id || back != s || !isPart(part) || isPart(id) || len(part) > MaxPartID || checkWireID(part) != nil {
				t.Errorf("%+v of %q is %q, which reads as %+v of %q (%v)", s, id, part, back, base, ok)
			}
		}
	}
	for _, bad := range []core.TransferID{"", "\x00", "\x000/1@0", "a\x00", "a\x000/1", "a\x000/1@", "a\x00/1@0", "a\x001/1@0", "a\x00-1/2@0", "a\x00+0/1@0",
		"a\x0000/1@0", "a\x000/1@00", "a\x000/0@0", "a\x000/65@0", "a\x000/1@65536", "a\x000/1@0\x00", "a\x000/1@0\x000/1@0", "a\x00 0/1@0", long + "x\x000/1@0"} {
		if base, s, ok := splitPart(bad); ok || checkWireID(bad) == nil {
			t.Errorf("%q reads as %+v of %q", bad, s, base)
		}
	}
}
