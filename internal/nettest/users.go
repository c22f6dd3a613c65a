package nettest

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// ClusterUsers writes examples/nats/kvconn.conf for the nkeys of a prefill engine and of
// decode engines. A test runs in its package's folder, one or two below the repository's root.
func ClusterUsers(t testing.TB, prefill string, decodes ...string) (file string) {
	t.Helper()
	text, err := os.ReadFile("../examples/nats/kvconn.conf")
	if os.IsNotExist(err) {
		text, err = os.ReadFile("../../examples/nats/kvconn.conf")
	}
	if err != nil {
		t.Fatal(err)
	}
	conf := strings.ReplaceAll(string(text), "PREFILL_KEY", prefill)
	// A line or user that names a decode engine stands there once for each of them.
	var out strings.Builder
	for block := range blocksOf(conf) {
		if !strings.Contains(block, "DECODE_KEY") {
			out.WriteString(block)
			continue
		}
		for _, d := range decodes {
			out.WriteString(strings.ReplaceAll(block, "DECODE_KEY", d))
		}
	}
	name := filepath.Join(t.TempDir(), "nats.conf")
	if err := os.WriteFile(name, []byte(out.String()), 0o600); err != nil {
		t.Fatal(err)
	}
	return name
}

// blocksOf are the lines of a configuration; those of a user are one block.
func blocksOf(conf string) func(yield func(string) bool) {
	return func(yield func(string) bool) {
		block := ""
		for line := range strings.Lines(conf) {
			if block += line; strings.HasPrefix(strings.TrimSpace(block), "{ nkey:") && !strings.Contains(line, "} }") {
				continue
			}
			if !yield(block) {
				return
			}
			block = ""
		}
	}
}
