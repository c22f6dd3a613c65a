package bootstrap

import (
	"encoding/json"
	"unicode/utf8"
)

// object is a JSON object of a request, and the errors of its fields. Unknown fields
// are ignored, as pydantic does. Unlike pydantic, object takes no "3" and no 3.0 for a
// number.
type object struct {
	fields map[string]json.RawMessage
	bad    []FieldError
}

// readObject reads a body. The error is an *InvalidError.
func readObject(body []byte) (*object, error) {
	// A map and not a struct: encoding/json would match names in any case.
	var fields map[string]json.RawMessage
	if !utf8.Valid(body) {
		return nil, &InvalidError{[]FieldError{{"json_invalid", []any{"body"}, "the body is not UTF-8"}}}
	}
	if !json.Valid(body) {
		err := json.Unmarshal(body, &fields)
		return nil, &InvalidError{[]FieldError{{"json_invalid", []any{"body"}, "JSON decode error: " + err.Error()}}}
	}
	// null unmarshals into a nil map without an error.
	if err := json.Unmarshal(body, &fields); err != nil || fields == nil {
		return nil, &InvalidError{[]FieldError{{"model_attributes_type", []any{"body"}, "the body must be a JSON object"}}}
	}
	return &object{fields: fields}, nil
}

// has says whether the field is there and is not null.
func (o *object) has(name string) bool {
	raw, ok := o.fields[name]
	return ok && string(raw) != "null"
}

// text and number decode a field that must be there.
func (o *object) text(name string) (s string) {
	o.take(name, &s, "string_type", "string")
	return s
}

func (o *object) number(name string) (n int) {
	o.take(name, &n, "int_type", "integer")
	return n
}

// take decodes one field. null would leave the zero value without an error.
func (o *object) take(name string, into any, kind, want string) {
	raw, ok := o.fields[name]
	if !ok {
		o.bad = append(o.bad, fieldError("missing", name, "Field required"))
		return
	}
	if string(raw) == "null" || json.Unmarshal(raw, into) != nil {
		o.bad = append(o.bad, fieldError(kind, name, "Input should be a valid %s, got %s", want, excerpt(raw)))
	}
}

// err is an *InvalidError if a field was wrong.
func (o *object) err() error {
	if o.bad == nil {
		return nil
	}
	return &InvalidError{Fields: o.bad}
}

// decodeRegistration reads the body of POST /register. The error is an
// *InvalidError.
func decodeRegistration(body []byte) (Registration, error) {
	o, err := readObject(body)
	if err != nil {
		return Registration{}, err
	}
	r := Registration{EngineID: o.text("engine_id"), DPRank: o.number("dp_rank"), TPRank: o.number("tp_rank"), PPRank: o.number("pp_rank"), Addr: o.text("addr")}
	if err := o.err(); err != nil {
		return Registration{}, err
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
