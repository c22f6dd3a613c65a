package rig

import (
	"errors"
	"io"
	"testing"
)

func TestBenchAgentsArguments(t *testing.T) {
	for _, args := range [][]string{{"--agents", "0"}, {"--agents", "-1"}, {"--agents", "3001"}, {"more"}, {"--nope"}} {
		if err := runBenchAgents(t.Context(), args, io.Discard); !errors.Is(err, errUsage) {
			t.Errorf("%v: %v, want an error of usage", args, err)
		}
	}
}
