package main

import "testing"

// TestApply: each mutant's old text stands once in its file. Whether it is found
// is what make mutants shows.
func TestApply(t *testing.T) {
	names := map[string]bool{}
	for _, m := range mutants {
		if _, err := m.apply("../.."); err != nil {
			t.Errorf("mutant %s: %v", m.name, err)
		}
		if names[m.name] || m.name == "" || m.breaks == "" || m.old == m.now {
			t.Errorf("mutant %q: has no name of its own, or does nothing", m.name)
		}
		names[m.name] = true
	}
}
