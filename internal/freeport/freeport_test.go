package freeport

import "testing"

func TestTake(t *testing.T) {
	ports, err := Take(50)
	if err != nil {
		t.Fatal(err)
	}
	seen, room := map[int]bool{}, ephemeral()-lowest >= 50 // else they are any
	for _, p := range ports {
		if seen[p] || room && (p < lowest || p >= ephemeral()) {
			t.Errorf("port %d of %v: twice, or not from %d below %d", p, ports, lowest, ephemeral())
		}
		seen[p] = true
	}
}
