package attack

import (
	"io"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
)

// TestRouterNestedAnswer: a prefill server's answer of 3.5 MiB, arrays within arrays around a list, made the router hold 3.3 GiB.
// The router serves others beside such answers of either server, and holds little.
func TestRouterNestedAnswer(t *testing.T) {
	const levels, size = 4000, 3500 << 10
	list := strings.Repeat("0,", size/2) + `"error"`
	nested := func(open, closing, inner string) string {
		return strings.Repeat(open, levels) + inner + strings.Repeat(closing, levels)
	}
	answers := []string{
		nested("[", "]", list),
		nested(`{"a":`, "}", "["+list+"]"),
		`{"choices":[],"kv_transfer_params":` + nested("[", "]", list) + "}",
		`{"choices":[],"kv_transfer_params":` + nested(`{"remote_block_ids":`, "}", "["+list+"]") + "}",
		strings.Repeat("[", size), // it never closes
	}
	const good = `{"choices":[],"kv_transfer_params":{"remote_engine_id":"e0","remote_block_ids":[1],"remote_host":"h","remote_port":1}}`
	var prefill, decode atomic.Value // what they answer
	answer := func(v *atomic.Value) http.HandlerFunc {
		return func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, v.Swap(good).(string)) }
	}
	v := startRouterBefore(t, answer(&prefill), answer(&decode), "--contract nixl --retries 0")
	calm := completions(t, v, "127.0.0.1")
	v.watch()
	h, sent := &honest{}, 0
	for n := range 2 * 2 * len(answers) {
		prefill.Store(good)
		decode.Store(good)
		nested := []*atomic.Value{&prefill, &decode}[n%2]
		nested.Store(answers[n/2%len(answers)])
		c := http.Client{Timeout: bound}
		resp, err := c.Post(v.boot+"/v1/completions", "application/json", strings.NewReader(`{"model":"odd","prompt":"x"}`))
		if err != nil {
			t.Errorf("answer %d: %v", n, err)
			continue
		}
		_, _ = io.Copy(io.Discard, resp.Body)
		_ = resp.Body.Close()
		if nested.Load() != good {
			t.Errorf("answer %d was not asked for: the request ended with %s", n, resp.Status)
		}
		sent++
		h.completeFrom(t, v, "127.0.0.1", 8<<10)
	}
	v.watch()
	v.peak = v.mib("VmHWM")
	got(t, "3,300 MiB held for one answer", "%d answers: %s, %s", sent, h.comparedWith(t, calm), v.growth(t))
}
