package proxy

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
)

// maxPrefillAnswer bounds what is read of P's answer, of which only an error is
// of use.
const maxPrefillAnswer = 1 << 20

// statusError is an answer of P that is not a success.
type statusError struct {
	status      int
	contentType string
	body        []byte
}

func (e *statusError) Error() string {
	text := strings.ToValidUTF8(strings.TrimSpace(string(e.body[:min(len(e.body), 500)])), "")
	return fmt.Sprintf("answered %d %s: %s", e.status, http.StatusText(e.status), text)
}

// clientsFault reports whether the client can do something about it.
func (e *statusError) clientsFault() bool { return e.status >= 400 && e.status < 500 }

// prefill sends the request to P and waits until P has computed the prompt.
func (p *Proxy) prefill(ctx context.Context, r *request) error {
	req, err := p.newRequest(ctx, r, r.rank.server, r.prefillBody)
	if err != nil {
		return err
	}
	req.Header.Set("X-Data-Parallel-Rank", strconv.Itoa(r.rank.dp))
	resp, err := p.client.Do(req)
	if err != nil {
		if ctx.Err() == nil {
			p.noteDown(r.rank.server, err)
		}
		return err
	}
	defer resp.Body.Close()
	limited := io.LimitReader(resp.Body, maxPrefillAnswer)
	if resp.StatusCode < 200 || resp.StatusCode > 299 {
		body, _ := io.ReadAll(limited) // the status says enough if the body breaks off
		return &statusError{resp.StatusCode, resp.Header.Get("Content-Type"), body}
	}
	// Read to its end, or the connection could not be used again.
	_, err = io.Copy(io.Discard, limited)
	return err
}

// newRequest is one half of a request, on its way to a server.
func (p *Proxy) newRequest(ctx context.Context, r *request, s *server, body []byte) (*http.Request, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, s.path(r.endpoint), bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	for _, name := range []string{"Authorization", "Traceparent", "Tracestate"} {
		if v, ok := r.header[name]; ok {
			req.Header[name] = v
		}
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("X-Request-Id", r.id)
	return req, nil
}
