package node

import (
	"fmt"
	"strings"
	"testing"

	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/wire"
)

// TestModelsAreComparedByFingerprint: equal weights fit under two names, and different
// weights are refused under one.
func TestModelsAreComparedByFingerprint(t *testing.T) {
	agent := func(model, fingerprint string, facts map[string]string) *wire.Agent {
		c := Config{Model: model, Fingerprint: fingerprint, MustMatch: facts}
		a := describe(&c, "a", &kv.Layout{}, nil, nil)
		describeShapes(a, []kv.Shape{{Name: "layer.0", BlockStride: 64, BlockBytes: 64, NumBlocks: 4}})
		return a
	}
	eagle := map[string]string{"speculative": "eagle", "backend": "A"}
	for _, c := range []struct {
		p, d *wire.Agent
		says string
	}{
		{agent("llama", "1:a", nil), agent("copy of llama", "1:a", nil), ""},
		{agent("llama", "1:a", nil), agent("llama", "1:b", nil),
			`model "llama" with fingerprint 1:a at the prefill engine, model "llama" with fingerprint 1:b at the decode engine: their weights or configurations differ`},
		{agent("llama", "", nil), agent("llama", "1:b", nil),
			`model "llama" with fingerprint none at the prefill engine, model "llama" with fingerprint 1:b at the decode engine: set "model" in both configurations or in neither`},
		{agent("llama", "", nil), agent("qwen", "", nil), `model "llama" at the prefill engine, "qwen" at the decode engine`},
		{agent("llama", "", eagle), agent("llama", "", map[string]string{"speculative": "eagle", "backend": "A"}), ""},
		{agent("llama", "", eagle), agent("llama", "", map[string]string{"backend": "A"}), `speculative "eagle" at the prefill engine, "none" at the decode engine`},
		{agent("llama", "", nil), agent("llama", "", map[string]string{"backend": "B"}), `backend "none" at the prefill engine, "B" at the decode engine`},
		{agent("llama", "", map[string]string{"backend": "none"}), agent("llama", "", nil), ""},
	} {
		_, err := compatible(c.p, c.d, nil)
		if got := fmt.Sprint(err); c.says == "" && err != nil || c.says != "" && got != c.says {
			t.Errorf("%s, want %s", got, c.says)
		}
		if len(c.says) > maxReason {
			t.Errorf("%d bytes: the peer does not hear all of it", len(c.says))
		}
	}
}

func TestFactsAreFew(t *testing.T) {
	many := map[string]string{}
	for i := range 17 {
		many[fmt.Sprint(i)] = ""
	}
	for says, facts := range map[string]map[string]string{
		"17 names":               many,
		`""`:                     {"": "x"},
		"value of 257 bytes":     {"x": strings.Repeat("y", 257)},
		"a name of 1 to 64 byte": {strings.Repeat("x", 65): ""},
	} {
		c := testConfig(RoleDecode)
		c.MustMatch = facts
		if err := c.Check(); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%v, want %s", err, says)
		}
	}
	c := testConfig(RoleDecode)
	c.Fingerprint = strings.Repeat("x", 65)
	if err := c.Check(); err == nil || !strings.Contains(err.Error(), "model_fingerprint") {
		t.Error(err)
	}
}
