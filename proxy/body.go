// A request's JSON object is changed by members. What the router does not set stays the client's own bytes.

package proxy

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
)

// field is one member of a request's JSON object, as the client wrote it: a
// number that went through a float64 would not be the client's number.
type field struct {
	name  string
	text  []byte // name and value
	value []byte
}

// fields are a request's members in the client's order. If several members have one name
// the last counts, as in the engines' parsers.
type fields []field

// maxMembers bounds the members of a request's object: each takes 64 bytes beside its text, which may have 5, and up to 48 for
// its name. Together that is 28 KiB, which requestMemory has room for while engines compute. Engines know about a hundred.
const maxMembers = 256

// parseFields reads a client's body, which the fields go on to use.
func parseFields(body []byte) (fields, error) {
	if err := checkJSON(body); err != nil {
		return nil, err
	}
	at := skipSpace(body, 0)
	if body[at] != '{' {
		kind := map[byte]string{'[': "array", '"': "string", 'n': "null", 't': "bool", 'f': "bool"}[body[at]]
		if kind == "" {
			kind = "number"
		}
		return nil, fmt.Errorf("the body must be a JSON object, not %s", kind)
	}
	f := make(fields, 0, 16)
	// The text is valid JSON, so each step finds what it looks for.
	for at = skipSpace(body, at+1); body[at] != '}'; {
		if len(f) == maxMembers {
			return nil, fmt.Errorf("the body has more than %d members: the router reads no more of an object", maxMembers)
		}
		begin, end := at, endOfString(body, at)
		name, err := memberName(body[begin:end])
		if err != nil {
			return nil, err
		}
		at = skipSpace(body, end)     // the colon
		from := skipSpace(body, at+1) // the value
		at = endOfValue(body, from)
		f = append(f, field{name, body[begin:at], body[from:at]})
		if at = skipSpace(body, at); body[at] == ',' {
			at = skipSpace(body, at+1)
		}
	}
	return f, nil
}

// errNotJSON is wrapped by the errors of bodies that are not JSON.
var errNotJSON = errors.New("the body is not valid JSON")

func checkJSON(body []byte) error {
	if json.Valid(body) {
		return nil
	}
	var v any // says where
	return fmt.Errorf("%w: %w", errNotJSON, json.Unmarshal(body, &v))
}

// memberAmong is the first of these names that any object in the body has as a member, or
// "".
func memberAmong(body []byte, names []string) (string, error) {
	if err := checkJSON(body); err != nil {
		return "", err
	}
	for at := 0; ; {
		quote := bytes.IndexByte(body[at:], '"')
		if quote < 0 {
			return "", nil
		}
		begin := at + quote
		at = endOfString(body, begin)
		if rest := bytes.TrimLeft(body[at:], " \t\r\n"); len(rest) == 0 || rest[0] != ':' {
			continue // a value
		}
		name, err := memberName(body[begin:at])
		if err != nil {
			return "", fmt.Errorf("%w: %w", errNotJSON, err)
		}
		if slices.Contains(names, name) {
			return name, nil
		}
	}
}

func skipSpace(b []byte, at int) int {
	for b[at] == ' ' || b[at] == '\t' || b[at] == '\n' || b[at] == '\r' {
		at++
	}
	return at
}

// endOfString is the place behind the string that begins at a place.
func endOfString(b []byte, at int) int {
	quote := at
	for at++; ; at += 2 { // from behind the quote, and behind each escaped byte
		if quote < at { // else each escape would search all the text that follows
			quote = at + bytes.IndexByte(b[at:], '"')
		}
		escape := bytes.IndexByte(b[at:quote], '\\')
		if escape < 0 {
			return quote + 1
		}
		at += escape
	}
}

// endOfValue is endOfString of any value.
func endOfValue(b []byte, at int) int {
	depth := 0
	for {
		switch b[at] {
		case '"':
			at = endOfString(b, at)
		case '{', '[':
			depth++
			at++
		case '}', ']':
			depth--
			at++
		case ',', ':', ' ', '\t', '\n', '\r':
			at++
		default: // a number or a word, which ends where something else begins
			for at++; strings.IndexByte(",:}] \t\n\r", b[at]) < 0; at++ {
			}
		}
		if depth == 0 {
			return at
		}
	}
}

// longestName is more than any name takes that the router looks for, and longestText with each letter escaped.
const (
	longestName = 42
	longestText = 2 + 6*longestName
)

// memberName is the text of a JSON string, or "" of one that is too long to be looked for: it is not kept.
func memberName(text []byte) (string, error) {
	if len(text) > longestText {
		return "", nil
	}
	if !bytes.ContainsRune(text, '\\') {
		if text = text[1 : len(text)-1]; len(text) > longestName {
			return "", nil
		}
		return string(text), nil
	}
	var name string
	if err := json.Unmarshal(text, &name); err != nil || len(name) > longestName {
		return "", err
	}
	return name, nil
}

// last is the value of a member, nil when there is none.
func (f fields) last(name string) []byte {
	for _, m := range slices.Backward(f) {
		if m.name == name {
			return m.value
		}
	}
	return nil
}

// oneToken is the request to P: compute the prompt, keep its KV for the transfer, and
// answer one token, which nobody reads.
func (f fields) oneToken(ours []member) pieces {
	one := json.RawMessage("1")
	ours = append(ours, member{"stream", json.RawMessage("false")}, member{"max_tokens", one})
	if f.last("max_completion_tokens") != nil {
		ours = append(ours, member{"max_completion_tokens", one})
	}
	// The samples of a prompt have one cache.
	for _, name := range []string{"n", "best_of"} {
		if raw := f.last(name); raw != nil && string(raw) != "null" {
			ours = append(ours, member{name, one})
		}
	}
	// Engines refuse min_tokens above max_tokens. If it is no number, P refuses it itself.
	var least float64
	if raw := f.last("min_tokens"); raw != nil && json.Unmarshal(raw, &least) == nil && least > 1 {
		ours = append(ours, member{"min_tokens", one})
	}
	return f.with(ours, "stream_options") // refused where stream is false
}

// member is a member that the router sets.
type member struct {
	name  string
	value json.RawMessage
}

// with writes the object with our members in the place of the client's of these names, and
// without the members of the other names. Long members are the client's own bytes, unless the text is short.
func (f fields) with(ours []member, without ...string) pieces {
	all := 2
	for _, m := range f {
		all += len(m.text) + 1
	}
	for _, m := range ours {
		all += len(m.name) + len(m.value) + 4
	}
	longest := ownPiece
	if all <= shortText {
		longest = all
	}
	return f.write(longest, ours, without)
}

// flat is with as one text of its own.
func (f fields) flat(ours []member) []byte { return f.write(math.MaxInt, ours, nil).last }

// write is with; members up to a length are copied.
func (f fields) write(longest int, ours []member, without []string) (p pieces) {
	size := 2 + len(f)
	for _, m := range f {
		if len(m.text) <= longest {
			size += len(m.text)
		}
	}
	for _, m := range ours {
		size += len(m.name) + len(m.value) + 4
	}
	out := append(make([]byte, 0, size), '{')
	for _, m := range f {
		if slices.Contains(without, m.name) || slices.ContainsFunc(ours, func(o member) bool { return o.name == m.name }) {
			continue
		}
		if len(m.text) <= longest {
			out = append(append(out, m.text...), ',')
			continue
		}
		p.before, p.own = append(p.before, out, m.text), p.own+int64(len(out))
		out = append(out[len(out):], ',')
	}
	for _, m := range ours {
		out = append(append(append(append(out, '"'), m.name...), `":`...), m.value...)
		out = append(out, ',')
	}
	if last := len(out) - 1; out[last] == ',' {
		out[last] = '}'
	} else {
		out = append(out, '}')
	}
	p.last, p.own = out, p.own+int64(len(out))
	return p
}
