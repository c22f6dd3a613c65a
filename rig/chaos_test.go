package rig

import (
	"bytes"
	"context"
	"errors"
	"testing"
)

func TestChaosBadArguments(t *testing.T) {
	for _, args := range [][]string{{"more"}, {"--faults", "-1"}, {"--nope"}, {"--parts", "faults,nope"}, {"--kinds", "SIGKILL,nope"}, {"--kinds", "SIGKILL,"}, {"--transport", "pigeon"}} {
		if err := runChaos(context.Background(), args, &bytes.Buffer{}); !errors.Is(err, errUsage) {
			t.Errorf("%v: %v, want an error of usage", args, err)
		}
	}
}
