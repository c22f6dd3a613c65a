package kv

import (
	"testing"

	"github.com/kvconn/kvconn/rig/arrows"
)

// TestArrowsPointOneWay: files use each other without a cycle.
func TestArrowsPointOneWay(t *testing.T) {
	uses, err := arrows.Read(".")
	if err != nil {
		t.Fatal(err)
	}
	for _, cycle := range uses.Cycles() {
		t.Errorf("a cycle: %v", cycle)
	}
}
