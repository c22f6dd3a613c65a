// If no engine has served a request, the client is told why; and some failures are worth another attempt.

package proxy

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"strconv"

	"go.uber.org/zap"
)

// apiError is an error in the shape that OpenAI clients understand.
type apiError struct {
	Error struct {
		Message string `json:"message"`
		Type    string `json:"type"`
		Code    int    `json:"code"`
	} `json:"error"`
}

// Kinds of errors that the router itself answers.
const (
	badRequest  = "invalid_request_error"
	unavailable = "service_unavailable"
)

// failure is why an attempt has no answer for the client.
type failure struct {
	role   string // of the server that failed
	url    string
	at     *target // nil when either engine may be at fault
	err    error
	answer *engineAnswer // nil when no engine answered
}

// engineAnswer is an engine's own error.
type engineAnswer struct {
	status int
	header http.Header // nil for JSON
	body   []byte
}

func (f *failure) Error() string { return f.role + " server " + f.url + ": " + f.err.Error() }

func (f *failure) Unwrap() error { return f.err }

// mayRetry reports whether another engine might do better. If the request itself is at
// fault, every engine refuses it.
func (f *failure) mayRetry() bool {
	if errors.Is(f.err, errAnswers) { // the router has no memory for another's answer either
		return false
	}
	if f.answer == nil {
		return true
	}
	switch f.answer.status {
	case http.StatusInternalServerError, http.StatusBadGateway, http.StatusServiceUnavailable, http.StatusGatewayTimeout:
		return true
	}
	return false
}

// answerFailure answers a request that the engines have not served. If the failure is an error of the
// client's, or an answer of D's, the client gets the engine's own answer, else 503 and the reason.
func (p *Proxy) answerFailure(w http.ResponseWriter, client context.Context, r *request, f *failure) {
	r.err = f
	switch {
	case p.ending(client):
		p.refuse(w, r, shuttingDown)
		if p.ctx.Err() == nil && !p.draining.Load() {
			r.outcome = clientGone // nobody sees the answer
		}
	case f.answer != nil && f.answer.status >= 400 && (f.role == decodeRole || f.answer.status < 500):
		r.outcome = strconv.Itoa(f.answer.status)
		passHeader(w.Header(), f.answer.header)
		w.Header().Del("Content-Length") // it is of a body that may have been cut
		w.Header().Set("X-Request-Id", r.id)
		kind := ""
		if f.answer.header == nil {
			kind = "application/json"
		}
		writeBody(w, f.answer.status, kind, f.answer.body)
	default:
		p.log.Warn("no engine has answered the request", zap.String("request_id", r.id), zap.Error(f))
		p.refuse(w, r, f.Error())
	}
}

// refuse answers a request with 503 and the reason.
func (p *Proxy) refuse(w http.ResponseWriter, r *request, reason string) {
	r.fail(w, http.StatusServiceUnavailable, unavailable, reason)
}

// fail answers a request with an error of the router's own.
func (r *request) fail(w http.ResponseWriter, status int, kind, message string) {
	r.outcome = strconv.Itoa(status)
	writeError(w, status, kind, message)
}

func writeError(w http.ResponseWriter, status int, kind, message string) {
	var e apiError
	e.Error.Message, e.Error.Type, e.Error.Code = message, kind, status
	writeJSON(w, status, e)
}

func writeJSON(w http.ResponseWriter, status int, v any) {
	body, err := json.Marshal(v)
	if err != nil { // only strings and ints are ever marshalled here
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	writeBody(w, status, "application/json", body)
}

func writeBody(w http.ResponseWriter, status int, contentType string, body []byte) {
	boundWrite(w)
	if contentType != "" {
		w.Header().Set("Content-Type", contentType)
	}
	w.Header().Set("Content-Length", strconv.Itoa(len(body))) // whole also when the handler goes on
	w.WriteHeader(status)
	_, _ = w.Write(body) // an error means that the client has gone
}
