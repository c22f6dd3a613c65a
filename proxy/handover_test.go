package proxy

import (
	"io"
	"net/http"
	"regexp"
	"strconv"
	"testing"
	"time"

	"github.com/kvconn/kvconn/rig/leaktest"
)

func handOvers(t *testing.T, r router) (count int, sum float64) {
	t.Helper()
	_, text := r.get(t, "/metrics")
	value := func(name string) string {
		m := regexp.MustCompile(`(?m)^kvconn_proxy_hand_over_seconds_` + name + ` (\S+)$`).FindStringSubmatch(text)
		if m == nil {
			t.Fatalf("no %s in %s", name, text)
		}
		return m[1]
	}
	count, err := strconv.Atoi(value("count"))
	if err != nil {
		t.Fatal(err)
	}
	if sum, err = strconv.ParseFloat(value("sum"), 64); err != nil {
		t.Fatal(err)
	}
	return count, sum
}

// The hand-over runs from P's answer to D's first event, however long P took. An answer that is no stream has no first event.
func TestHandOver(t *testing.T) {
	const prefill, handOver = 400 * time.Millisecond, 50 * time.Millisecond
	for _, contract := range []Contract{Mooncake, NIXL} {
		t.Run(string(contract), func(t *testing.T) {
			leaktest.Check(t)
			answered, answer := make(chan struct{}, 1), `{"kv_transfer_params":{"do_remote_prefill":true}}`
			p := func(w http.ResponseWriter, _ *http.Request) {
				time.Sleep(prefill)
				w.Header().Set("Content-Type", "application/json")
				io.WriteString(w, answer)
				w.(http.Flusher).Flush()
				answered <- struct{}{}
			}
			kind := "text/event-stream"
			d := func(w http.ResponseWriter, _ *http.Request) {
				<-answered
				time.Sleep(handOver)
				w.Header().Set("Content-Type", kind)
				io.WriteString(w, "data: one\n\ndata: [DONE]\n\n")
			}
			var r router
			if contract == NIXL {
				r, _, _ = nixlPair(t, p, d)
			} else {
				r, _, _ = pairOf(t, p, d)
			}
			began := time.Now()
			r.post(t, `{"stream":true}`)
			took := time.Since(began)
			eventually(t, "it is counted", func() bool { count, _ := handOvers(t, r); return count == 1 })
			least := 0.0
			if contract == NIXL { // by Mooncake's D does not wait for what the router reads of P
				least = handOver.Seconds()
			}
			if _, sum := handOvers(t, r); sum < least || sum > (took-prefill).Seconds() {
				t.Errorf("%v s, of a request that took %v", sum, took)
			}
			answer = `{"kv_transfer_params":{"kvconn_error":"no blocks"}}`
			r.post(t, `{"stream":true}`)
			if count, _ := handOvers(t, r); count != 1 {
				t.Error("a prompt that D computes is counted")
			}
			kind = "application/json"
			r.post(t, `{}`)
			if count, _ := handOvers(t, r); count != 1 {
				t.Error("an answer that is no stream is counted")
			}
		})
	}
}
