// A rank's registration is checked, and an error names every field that is wrong.

package bootstrap

import (
	"fmt"
	"strings"
	"unicode"
	"unicode/utf8"
)

// Bounds of one registration. They are far above any real engine and exist so
// that an unauthenticated client can neither fill memory nor the logs.
const (
	// MaxRank is the highest dp, tp or pp rank.
	MaxRank = 65535
	// MaxEngineID is the longest engine id, in bytes.
	MaxEngineID = 256
	// MaxAddr is the longest address, in bytes.
	MaxAddr = 1024
)

// Registration is one rank of an engine and where it is reached.
type Registration struct {
	EngineID string `json:"engine_id"`
	DPRank   int    `json:"dp_rank"`
	TPRank   int    `json:"tp_rank"`
	PPRank   int    `json:"pp_rank"`
	Addr     string `json:"addr"`
}

// FieldError is the error of one field, in the shape in which FastAPI reports it.
type FieldError struct {
	Type string `json:"type"`
	Loc  []any  `json:"loc"`
	Msg  string `json:"msg"`
}

// InvalidError is a registration that could never be accepted.
type InvalidError struct {
	Fields []FieldError
}

// Error names each field and what is wrong with it.
func (e *InvalidError) Error() string {
	parts := make([]string, len(e.Fields))
	for i, f := range e.Fields {
		parts[i] = fmt.Sprintf("%v: %s", f.Loc[len(f.Loc)-1], f.Msg)
	}
	return "bootstrap: invalid registration: " + strings.Join(parts, "; ")
}

// fieldError is a FieldError of a field of the request's body.
func fieldError(kind, field, format string, args ...any) FieldError {
	return FieldError{Type: kind, Loc: []any{"body", field}, Msg: fmt.Sprintf(format, args...)}
}

// validate returns nil or an *InvalidError that names every bad field.
func (r Registration) validate() error {
	var bad []FieldError
	text := func(field, value string, limit int) {
		if e := checkText(field, value, limit); e != nil {
			bad = append(bad, *e)
		}
	}
	rank := func(field string, value int) {
		if value < 0 || value > MaxRank {
			bad = append(bad, fieldError("value_error", field, "%d is not a rank, give one from 0 to %d", value, MaxRank))
		}
	}
	text("engine_id", r.EngineID, MaxEngineID)
	rank("dp_rank", r.DPRank)
	rank("tp_rank", r.TPRank)
	rank("pp_rank", r.PPRank)
	text("addr", r.Addr, MaxAddr)
	if bad != nil {
		return &InvalidError{Fields: bad}
	}
	return nil
}

// checkText bounds a text, so that it fills neither memory nor logs.
func checkText(field, value string, limit int) *FieldError {
	var e FieldError
	switch {
	case value == "":
		e = fieldError("string_too_short", field, "must not be empty")
	case len(value) > limit:
		e = fieldError("string_too_long", field, "is %d bytes long, at most %d are allowed", len(value), limit)
	case !utf8.ValidString(value) || strings.ContainsFunc(value, unicode.IsControl):
		e = fieldError("string_pattern_mismatch", field, "%q must be UTF-8 without control characters", value)
	default:
		return nil
	}
	return &e
}
