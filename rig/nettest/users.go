// The configuration of examples/nats for the nkeys of a test.

package nettest

import (
	"bytes"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// ClusterUsers writes examples/nats/kvconn.conf for the nkeys of a prefill engine and of
// decode engines. A test runs in its package's folder, one or two below the repository's root.
func ClusterUsers(t testing.TB, prefill string, decodes ...string) (file string) {
	t.Helper()
	return ClusterOf(t, []string{prefill}, decodes)
}

// ClusterOf writes that file for several prefill engines. An engine that is among both has the role "both".
func ClusterOf(t testing.TB, prefills, decodes []string) (file string) {
	t.Helper()
	text, err := os.ReadFile("../examples/nats/kvconn.conf")
	if os.IsNotExist(err) {
		text, err = os.ReadFile("../../examples/nats/kvconn.conf")
	}
	if err != nil {
		t.Fatal(err)
	}
	const p, d = "PREFILL_KEY", "DECODE_KEY"
	var out strings.Builder
	for block := range accountsOf(string(text)) {
		switch own := strings.Fields(block)[0]; {
		case strings.HasPrefix(block, "  ") && strings.HasSuffix(own, p):
			for _, key := range prefills {
				out.WriteString(linesFor(block, p, key, d, decodes))
			}
		case strings.HasPrefix(block, "  ") && strings.HasSuffix(own, d):
			for _, key := range decodes {
				if !slices.Contains(prefills, key) { // else it has its account already
					out.WriteString(linesFor(block, d, key, p, prefills))
				}
			}
		default:
			out.WriteString(block)
		}
	}
	name := filepath.Join(t.TempDir(), "nats.conf")
	if err := os.WriteFile(name, []byte(out.String()), 0o600); err != nil {
		t.Fatal(err)
	}
	return name
}

// EarlierClusterOf is ClusterOf as the file was before each prefill engine was held to the entries of its own engine ids: each may
// write all.
func EarlierClusterOf(t testing.TB, prefills, decodes []string) (file string) {
	t.Helper()
	file = ClusterOf(t, prefills, decodes)
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	for _, key := range prefills {
		text = bytes.ReplaceAll(text, []byte("$KV.kvconn_ranks."+key+".>"), []byte("$KV.kvconn_ranks.>"))
	}
	if err := os.WriteFile(file, text, 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

// linesFor is an engine's account. A line that names another engine stands there once for each of the others.
func linesFor(block, own, key, other string, others []string) string {
	var out strings.Builder
	for line := range strings.Lines(block) {
		if !strings.Contains(line, other) {
			out.WriteString(strings.ReplaceAll(line, own, key))
			continue
		}
		for _, o := range others {
			if o != key {
				out.WriteString(strings.NewReplacer(own, key, other, o).Replace(line))
			}
		}
	}
	return out.String()
}

// accountsOf are the parts of the configuration: each account is one, and so is what stands around them.
func accountsOf(conf string) func(yield func(string) bool) {
	return func(yield func(string) bool) {
		block := ""
		for line := range strings.Lines(conf) {
			if block += line; strings.HasPrefix(block, "  ") && line != "  }\n" || strings.TrimSpace(block) == "" {
				continue
			}
			if !yield(block) {
				return
			}
			block = ""
		}
	}
}
