package core_test

import (
	"fmt"
	"slices"
	"testing"

	"github.com/kvconn/kvconn/core"
)

// TestPartsOfAnAnswer: each transfer of a renewal is in one part beside its own answer, in
// order. Only the last part says that none follows.
func TestPartsOfAnAnswer(t *testing.T) {
	for _, c := range [][2]int{{0, 0}, {1, 0}, {0, 1}, {8, 0}, {7, 1}, {7, 2}, {9, 0}, {0, 9}, {1000, 3000}, {4096, 0}} {
		whole := core.SendRenew{Peer: "p"}
		var answers, told []core.Answer
		for i := range c[0] + c[1] {
			answers = append(answers, core.Answer{Reason: fmt.Sprint(i)})
			if id := core.TransferID(fmt.Sprint(i)); i < c[0] {
				whole.Loads = append(whole.Loads, id)
			} else {
				whole.Claims = append(whole.Claims, id)
			}
		}
		var got core.SendRenew
		parts, last := 0, false
		for part, some := range whole.Parts(answers) {
			n := len(part.Loads) + len(part.Claims)
			if n != len(some) || n > core.MaxLocked || part.Peer != "p" || last || len(part.Loads) > 0 && len(got.Claims) > 0 {
				t.Fatalf("%v: part %+v with %d answers after %d parts", c, part, len(some), parts)
			}
			for i, id := range slices.Concat(part.Loads, part.Claims) {
				if some[i].Reason != string(id) {
					t.Fatalf("%v: the answer to %q is that of %q", c, id, some[i].Reason)
				}
			}
			got.Loads, got.Claims = append(got.Loads, part.Loads...), append(got.Claims, part.Claims...)
			told = append(told, some...)
			parts, last = parts+1, !part.More
		}
		if !last || !slices.Equal(got.Loads, whole.Loads) || !slices.Equal(got.Claims, whole.Claims) || len(told) != len(answers) {
			t.Errorf("%v: %d parts have %d loads, %d claims and %d answers, the last says that it is: %v", c, parts, len(got.Loads), len(got.Claims), len(told), last)
		}
	}
	whole, parts := core.SendRenew{Peer: "p", Loads: make([]core.TransferID, 20)}, 0
	for part, some := range whole.Parts(make([]core.Answer, 3)) { // too few: the machine refuses them
		if parts++; len(part.Loads) != 20 || len(some) != 3 || part.More {
			t.Errorf("%+v with %d answers", part, len(some))
		}
	}
	if parts != 1 {
		t.Errorf("answers that do not fit are in %d parts", parts)
	}
}
