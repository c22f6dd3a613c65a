package proxy

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// read gives a text in parts of a length.
func (u usage) of(text []byte, step int) int64 {
	for ; len(text) > 0; text = text[min(step, len(text)):] {
		u.read(text[:min(step, len(text))])
	}
	return u.tokens
}

// What vLLM answers: python/tests/test_vllm_answers.py writes these files with vLLM's own classes.
func TestUsageOfVLLM(t *testing.T) {
	for name, want := range map[string]int64{"completion.json": 7, "chat.json": 7, "batch.json": 7, "completion.sse": 0, "completion-usage.sse": 7, "chat-usage.sse": 7} {
		text, err := os.ReadFile(filepath.Join("testdata", "vllm", name))
		if err != nil {
			t.Fatal(err)
		}
		for _, step := range []int{1, 2, 7, len(text)} {
			if got := (usage{events: strings.HasSuffix(name, ".sse")}).of(text, step); got != want {
				t.Errorf("%s in parts of %d bytes: %d tokens, want %d", name, step, got, want)
			}
		}
	}
}

func TestUsage(t *testing.T) {
	long := strings.Repeat("x", 1<<16)
	for _, tt := range []struct {
		text string
		want int64
	}{
		{`{"usage":{"prompt_tokens":12,"total_tokens":13}}`, 12},
		{"{ \"usage\" :\n { \"x\" : [{\"prompt_tokens\":3}] , \"prompt_tokens\"\t: 12\n}\n}", 12},
		{`{"choices":[{"usage":{"prompt_tokens":3}}],"usage":{"prompt_tokens_details":{"prompt_tokens":4},"total_tokens":9}}`, 0},
		{`{"text":"\"usage\":{\"prompt_tokens\":3}","usage":null}`, 0},
		{`{"text":"usage","prompt_tokens":3}`, 0},
		{`{"usage":[{"prompt_tokens":3}]}`, 0},
		{`{"usage":3,"x":{"prompt_tokens":3}}`, 0},
		{`{"usage":{"prompt_tokens":"3"}}`, 0},
		{`{"usage":{"prompt_tokens":-3}}`, 0},
		{`{"usage":{"prompt_tokens":3.5}}`, 0},
		{`{"usage":{"prompt_tokens":3e2}}`, 0},
		{`{"usage":{"prompt_tokens":123456789012}}`, 123456789012},
		{`{"usage":{"prompt_tokens":1234567890123}}`, 0},
		{`{"usage":{"prompt_tokens":3},"x":1,"usage":{"prompt_tokens":5}}`, 5},
		{`{"` + long + `":"` + long + `\\","usage":{"` + long + `":1,"prompt_tokens":6}}`, 6},
		{`[{"usage":{"prompt_tokens":3}}]`, 0},
		{`{"us\u0061ge":{"prompt_tokens":3}}`, 0},
		{`{"usage\n":{"prompt_tokens":3}}`, 0},
		{`no answer`, 0},
		{`}}}]]{"usage":{"prompt_tokens":3}}`, 0},
	} {
		for _, step := range []int{1, 3, len(tt.text)} {
			if got := (usage{}).of([]byte(tt.text), step); got != tt.want {
				t.Errorf("%.80s in parts of %d bytes: %d tokens, want %d", tt.text, step, got, tt.want)
			}
		}
	}
	// Each line is a text of its own, whatever became of the one before it.
	events := "data: {\"usage\":{\"prompt_tokens\":3}}\n\n: a comment {\"\n\ndata: {\"text\":\"cut off\n\ndata: {\"usage\":{\"prompt_tokens\":5}}\r\n\r\ndata: {\"usage\":null}\n\ndata: [DONE]\n\n"
	for _, step := range []int{1, 3, len(events)} {
		if got := (usage{events: true}).of([]byte(events), step); got != 5 {
			t.Errorf("events in parts of %d bytes: %d tokens, want 5", step, got)
		}
	}
}

// FuzzUsage reads what encoding/json reads, in whatever parts it comes.
func FuzzUsage(f *testing.F) {
	for _, text := range []string{`{"usage":{"prompt_tokens":12}}`, `{"a":"\"","usage":{"b":[1],"prompt_tokens":2 }}`, `{"usage":{"prompt_tokens":1e2}}`} {
		f.Add([]byte(text), 1)
	}
	f.Fuzz(func(t *testing.T, text []byte, step int) {
		step = max(1, min(step, 64))
		got := (usage{}).of(text, step)
		if whole := (usage{}).of(text, max(1, len(text))); got != whole {
			t.Fatalf("%q: %d tokens in parts of %d, %d as one", text, got, step, whole)
		}
		if events := (usage{events: true}); events.of(text, step) != events.of(text, max(1, len(text))) {
			t.Fatalf("%q as events: the parts matter", text)
		}
		var said struct {
			Usage map[string]json.RawMessage `json:"usage"`
		}
		// encoding/json takes names in any case, and merges two members of one name.
		if got == 0 || !json.Valid(text) || bytes.Count(bytes.ToLower(text), []byte("usage")) != 1 || bytes.Contains(text, []byte(`\`)) || json.Unmarshal(text, &said) != nil {
			return
		}
		var n int64
		if json.Unmarshal(said.Usage["prompt_tokens"], &n) != nil || n != got && bytes.Count(text, []byte("prompt_tokens")) == 1 {
			t.Fatalf("%q: %d tokens, encoding/json finds %s", text, got, said.Usage["prompt_tokens"])
		}
	})
}
