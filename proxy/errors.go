package proxy

import (
	"encoding/json"
	"net/http"
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
	upstream    = "upstream_error"
)

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
	w.WriteHeader(status)
	_, _ = w.Write(body) // an error means that the client has gone
}
