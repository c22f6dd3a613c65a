// The number of a prompt's tokens is read out of an answer while the answer passes.

package proxy

import "bytes"

const (
	usageName    = "usage"
	promptTokens = "prompt_tokens"
	// mostDigits bounds a number of tokens.
	mostDigits = 12
)

// usage reads out of an engine's answer, as its bytes come, how many tokens the prompt has: usage.prompt_tokens of the text,
// or of the last event that has it. It keeps nothing else of the answer. The zero value reads a text.
type usage struct {
	events bool  // the answer is a stream of events, and each line a text of its own
	tokens int64 // 0: no number has come

	depth  int  // of objects and arrays
	inside bool // the object at depth 2 is the text's usage
	quoted bool // within a string
	escape bool // behind a backslash in it
	name   [len(promptTokens)]byte
	length int   // of the last string, of which name has the begin
	key    bool  // it names the value that follows, and that is looked for
	number int64 // that is being read
	digits int   // of number; 0: none is being read
}

// read takes the next bytes of the answer.
func (u *usage) read(text []byte) {
	for len(text) > 0 {
		if n := u.plain(text); n > 0 {
			u.keep(text[:n])
			text = text[n:]
			continue
		}
		u.step(text[0])
		text = text[1:]
	}
}

// plain is how many bytes of the text only go on with a string. Strings are most of an answer.
func (u *usage) plain(text []byte) int {
	if !u.quoted || u.escape {
		return 0
	}
	if n := bytes.IndexAny(text, "\"\\\n"); n >= 0 {
		return n
	}
	return len(text)
}

// keep takes a part of a string.
func (u *usage) keep(part []byte) {
	if u.length < len(u.name) {
		copy(u.name[u.length:], part)
	}
	u.length += len(part)
}

// is reports whether the last string is this name.
func (u *usage) is(name string) bool {
	return u.length == len(name) && string(u.name[:u.length]) == name
}

func (u *usage) step(c byte) {
	switch {
	case c == '\n' && u.events:
		*u = usage{events: true, tokens: u.tokens}
		return
	case u.escape:
		u.escape = false
		u.length += len(u.name) // no name that is looked for has an escape
		return
	case u.quoted && c == '\\':
		u.escape = true
		return
	case u.quoted:
		u.quoted = c != '"'
		return
	}
	isDigit := c >= '0' && c <= '9'
	if u.digits > 0 && !isDigit {
		if u.digits <= mostDigits && bytes.IndexByte([]byte(",} \t\r\n"), c) >= 0 { // else it is no whole number, or none of tokens
			u.tokens = u.number
		}
		u.digits = 0
	}
	named := u.key
	u.key = false
	switch {
	case c == '"':
		u.quoted, u.length = true, 0
	case c == ':':
		u.key = u.depth == 1 && u.is(usageName) || u.depth == 2 && u.is(promptTokens)
	case c == '{' || c == '[':
		u.depth++
		u.inside = u.inside || named && u.depth == 2 && c == '{'
	case c == '}' || c == ']':
		u.depth--
		u.inside = u.inside && u.depth >= 2
	case isDigit && (u.digits > 0 || named && u.inside):
		if u.digits++; u.digits == 1 {
			u.number = int64(c - '0')
		} else if u.digits <= mostDigits {
			u.number = u.number*10 + int64(c-'0')
		}
	case c == ' ' || c == '\t' || c == '\r' || c == '\n':
		u.key = named
	}
}
