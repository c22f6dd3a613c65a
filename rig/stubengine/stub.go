// Package stubengine is an HTTP server that answers as vLLM does and computes nothing.
// Benchmarks of the router and tests of the launcher put it in an engine's place.
package stubengine

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strconv"
)

// Options of Handler.
type Options struct {
	// Model is what /v1/models names.
	Model string
	// Chunks is how many events a streamed answer has, each with one token.
	Chunks int
}

// maxBody bounds a request: the stub is no place to test limits.
const maxBody = 64 << 20

// Handler serves /health, /v1/models and completions, streamed or whole.
func Handler(o Options) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /health", func(http.ResponseWriter, *http.Request) {})
	mux.HandleFunc("GET /v1/models", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		fmt.Fprintf(w, `{"object":"list","data":[{"id":%q,"object":"model"}]}`, o.Model)
	})
	streamed, whole := events(o), answer(o)
	complete := func(w http.ResponseWriter, r *http.Request) {
		var req struct {
			Stream bool `json:"stream"`
		}
		body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxBody))
		if err == nil {
			err = json.Unmarshal(body, &req)
		}
		if err != nil {
			http.Error(w, `{"error":{"message":`+strconv.Quote(err.Error())+`,"type":"BadRequestError","code":400}}`, http.StatusBadRequest)
			return
		}
		if !req.Stream {
			w.Header().Set("Content-Type", "application/json")
			_, _ = w.Write(whole)
			return
		}
		w.Header().Set("Content-Type", "text/event-stream; charset=utf-8")
		for _, e := range streamed {
			if _, err := w.Write(e); err != nil {
				return
			}
			_ = http.NewResponseController(w).Flush()
		}
		_, _ = io.WriteString(w, "data: [DONE]\n\n")
	}
	mux.HandleFunc("POST /v1/completions", complete)
	mux.HandleFunc("POST /v1/chat/completions", complete)
	return mux
}

// events are those of a streamed answer.
func events(o Options) [][]byte {
	all := make([][]byte, o.Chunks)
	for i := range all {
		reason := "null"
		if i == o.Chunks-1 {
			reason = `"length"`
		}
		all[i] = fmt.Appendf(nil, `data: {"id":"cmpl-1","object":"text_completion","created":1,"model":%q,"choices":[{"index":0,"text":" token%d","logprobs":null,"finish_reason":%s,"stop_reason":null}],"usage":null}`+"\n\n",
			o.Model, i, reason)
	}
	return all
}

// answer is an answer that is not streamed.
func answer(o Options) []byte {
	return fmt.Appendf(nil, `{"id":"cmpl-1","object":"text_completion","created":1,"model":%q,"choices":[{"index":0,"text":" token0","logprobs":null,"finish_reason":"length"}],"usage":{"prompt_tokens":1,"completion_tokens":1,"total_tokens":2},"kv_transfer_params":null}`, o.Model)
}
