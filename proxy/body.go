package proxy

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
)

// fields is a request's JSON object with its values as the client wrote them:
// a number that went through a float64 would not be the client's number.
type fields map[string]json.RawMessage

// parseFields reads a client's body.
func parseFields(body []byte) (fields, error) {
	var f fields
	if err := json.Unmarshal(body, &f); err != nil {
		var wrongType *json.UnmarshalTypeError
		if errors.As(err, &wrongType) {
			return nil, fmt.Errorf("the body must be a JSON object, not a %s", wrongType.Value)
		}
		return nil, fmt.Errorf("the body is not valid JSON: %w", err)
	}
	if f == nil { // null unmarshals without an error
		return nil, errors.New("the body must be a JSON object, not null")
	}
	return f, nil
}

type prefillParams struct {
	DoRemoteDecode  bool   `json:"do_remote_decode"`
	DoRemotePrefill bool   `json:"do_remote_prefill"`
	TransferID      string `json:"transfer_id"`
}

type decodeParams struct {
	DoRemoteDecode      bool   `json:"do_remote_decode"`
	DoRemotePrefill     bool   `json:"do_remote_prefill"`
	RemoteBootstrapAddr string `json:"remote_bootstrap_addr"`
	RemoteEngineID      string `json:"remote_engine_id"`
	TransferID          string `json:"transfer_id"`
}

// prefillBody is the request to P: compute the prompt, keep its KV for the
// transfer, and answer one token, which nobody reads.
func prefillBody(f fields, transferID string) ([]byte, error) {
	f = maps.Clone(f)
	one := json.RawMessage("1")
	f["stream"] = json.RawMessage("false")
	delete(f, "stream_options") // refused where stream is false
	f["max_tokens"] = one
	if _, ok := f["max_completion_tokens"]; ok {
		f["max_completion_tokens"] = one
	}
	// Engines refuse min_tokens above max_tokens. What is no number is left for
	// P to refuse.
	var least float64
	if raw, ok := f["min_tokens"]; ok && json.Unmarshal(raw, &least) == nil && least > 1 {
		f["min_tokens"] = one
	}
	return f.with(prefillParams{DoRemoteDecode: true, TransferID: transferID})
}

// decodeBody is the request to D: fetch the prompt's KV from P, then answer.
func decodeBody(f fields, rank prefillRank, transferID string) ([]byte, error) {
	return maps.Clone(f).with(decodeParams{
		DoRemotePrefill:     true,
		RemoteBootstrapAddr: rank.server.bootstrap,
		RemoteEngineID:      rank.engineID,
		TransferID:          transferID,
	})
}

// with sets kv_transfer_params and marshals. What the client may have sent
// under that name is dropped: it would choose the address that D connects to.
func (f fields) with(params any) ([]byte, error) {
	raw, err := json.Marshal(params)
	if err != nil {
		return nil, err
	}
	f["kv_transfer_params"] = raw
	var buf bytes.Buffer
	enc := json.NewEncoder(&buf)
	enc.SetEscapeHTML(false) // it would rewrite the client's strings
	if err := enc.Encode(f); err != nil {
		return nil, err
	}
	return buf.Bytes(), nil
}
