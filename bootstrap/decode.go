package bootstrap

import (
	"encoding/json"
	"unicode/utf8"
)

// decodeRegistration reads the body of POST /register. The error is an
// *InvalidError. Fields that it does not know are ignored, as pydantic does;
// unlike pydantic it takes no "3" and no 3.0 for a rank.
func decodeRegistration(body []byte) (Registration, error) {
	var r Registration
	// A map and not the struct: encoding/json would match names in any case.
	var fields map[string]json.RawMessage
	if !utf8.Valid(body) {
		return r, &InvalidError{[]FieldError{{"json_invalid", []any{"body"}, "the body is not UTF-8"}}}
	}
	if !json.Valid(body) {
		err := json.Unmarshal(body, &fields)
		return r, &InvalidError{[]FieldError{{"json_invalid", []any{"body"}, "JSON decode error: " + err.Error()}}}
	}
	// null unmarshals into a nil map without an error.
	if err := json.Unmarshal(body, &fields); err != nil || fields == nil {
		return r, &InvalidError{[]FieldError{{"model_attributes_type", []any{"body"}, "the body must be a JSON object"}}}
	}

	var bad []FieldError
	// take decodes one field. null would leave the zero value without an error.
	take := func(name string, into any, kind, want string) {
		raw, ok := fields[name]
		if !ok {
			bad = append(bad, fieldError("missing", name, "Field required"))
			return
		}
		if string(raw) == "null" || json.Unmarshal(raw, into) != nil {
			bad = append(bad, fieldError(kind, name, "Input should be a valid %s, got %s", want, excerpt(raw)))
		}
	}
	take("engine_id", &r.EngineID, "string_type", "string")
	take("dp_rank", &r.DPRank, "int_type", "integer")
	take("tp_rank", &r.TPRank, "int_type", "integer")
	take("pp_rank", &r.PPRank, "int_type", "integer")
	take("addr", &r.Addr, "string_type", "string")
	if bad != nil {
		return Registration{}, &InvalidError{Fields: bad}
	}
	if err := r.validate(); err != nil {
		return Registration{}, err
	}
	return r, nil
}

// excerpt keeps an error short when the value is not.
func excerpt(raw []byte) string {
	const limit = 64
	if len(raw) <= limit {
		return string(raw)
	}
	cut := limit
	for cut > 0 && !utf8.RuneStart(raw[cut]) {
		cut--
	}
	return string(raw[:cut]) + "…"
}
