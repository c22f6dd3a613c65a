// Which text an engine takes for JSON depends on its parser, and on its FastAPI: some releases
// go by the Content-Type, some do not. Python's parser reads UTF-16 and UTF-32, and NaN.
// scripts/referee holds this file against real releases.

package proxy

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strconv"
	"strings"

	"github.com/kvconn/kvconn/internal/httpserve"
)

// errReserved is a request that would choose the address that D connects to.
var errReserved = errors.New("must not be in this request: only the router sets it, and only in completion requests")

// errCompressed is a body that the router cannot look into, and that some engine may unpack.
var errCompressed = errors.New("the router looks into bodies, and unpacks none: send it as it is")

// checkPacked refuses a body that is compressed: SGLang unpacks those of X-Body-Compressed, before it looks at their type.
func checkPacked(h http.Header) error {
	for _, name := range []string{"Content-Encoding", "X-Body-Compressed"} {
		for _, value := range h[name] {
			for one := range strings.SplitSeq(value, ",") {
				if one = strings.TrimSpace(one); !strings.EqualFold(one, "identity") && (one != "" || name != "Content-Encoding") {
					return fmt.Errorf("%s: %q: %w", name, value, errCompressed)
				}
			}
		}
	}
	return nil
}

// xargsName is the member whose members vLLM puts beside its own kv_transfer_params.
const xargsName = "vllm_xargs"

// checkXargs refuses a completion request whose extra arguments have our parameters.
func (f fields) checkXargs(c Contract) error {
	for _, m := range f {
		if m.name != xargsName {
			continue
		}
		if name := findEncoded(m.value, c.reserved()); name != "" {
			return fmt.Errorf("%s in %s %w", name, xargsName, errReserved)
		}
	}
	return nil
}

// mayBeJSON says whether some engine may read a text as JSON, whatever its Content-Type says. JSON
// comes in other encodings than UTF-8 too, and Python reads some that Go does not.
func mayBeJSON(text []byte) bool {
	text = bytes.TrimLeft(text, " \t\r\n")
	if len(text) == 0 {
		return false
	}
	return text[0] == '{' || text[0] == '[' || text[0] >= 0x80 || bytes.IndexByte(text[:min(len(text), 4)], 0) >= 0
}

// beforeJSON are the bytes that can stand before an object or array, in all of JSON's
// encodings: space, the bytes of a mark, and the zeros of wide characters.
const beforeJSON = " \t\r\n\x00\xef\xbb\xbf\xfe\xff"

// readBegin reads until it is known whether JSON begins.
func (g *gathered) readBegin(body io.Reader) (isJSON bool, err error) {
	for {
		came, err := g.read(body)
		for _, c := range came {
			if strings.IndexByte(beforeJSON, c) < 0 {
				return c == '{' || c == '[', nil
			}
		}
		if err != nil {
			return false, err
		}
	}
}

// findEncoded is the first of these names that stands in a text, or "". It reads the name in any
// encoding and with any escapes of JSON, and does not ask whether it is a member's: the text
// may be JSON for Python only.
func findEncoded(text []byte, names []string) string {
	longest := 0
	for _, name := range names {
		longest = max(longest, len(name))
	}
	found := func(plain []byte) string {
		i := slices.IndexFunc(names, func(name string) bool { return bytes.Contains(plain, []byte(name)) })
		if i < 0 {
			return ""
		}
		return names[i]
	}
	plain := make([]byte, 0, min(len(text), encodedPiece))
	for _, c := range text {
		if c == 0 { // of UTF-16 or UTF-32
			continue
		}
		if len(plain) == encodedPiece { // what stands in the next piece may begin in this one
			if name := found(plain); name != "" {
				return name
			}
			plain = append(plain[:0], plain[len(plain)-longest-len(`\u0000`):]...)
		}
		plain = append(plain, c)
		if at := len(plain) - len(`\u0000`); at >= 0 && plain[at] == '\\' && plain[at+1] == 'u' {
			if n, err := strconv.ParseUint(string(plain[at+2:]), 16, 16); err == nil && n < 0x80 {
				plain = append(plain[:at], byte(n))
			}
		}
	}
	return found(plain)
}

// encodedPiece bounds the part of a text that findEncoded holds decoded, beside the text itself.
const encodedPiece = 64 << 10

// passed is a body that goes on as it is. begin is what has come of it, rest comes later and is nil if begin is all.
type passed struct {
	begin sent
	rest  io.Reader
}

// read reads the client's body. If an engine may take it for JSON,
// it is first searched, at every depth, for parameters that only we may set.
func (b *passed) read(p *Proxy, w http.ResponseWriter, r *http.Request) error {
	if r.ContentLength == 0 {
		return nil
	}
	if err := checkPacked(r.Header); err != nil {
		return err
	}
	held, err := p.bodies.beginRequest(w, r)
	defer held.end(0) // the bodies to send have become holders by then
	if err != nil {
		return err
	}
	defer httpserve.Awaiting(r.Context())()
	body := p.bodyOf(w, r)
	kind := strings.ToLower(r.Header.Get("Content-Type"))
	if strings.HasPrefix(kind, "multipart/") || kind == "application/octet-stream" {
		return b.readBytes(p, body, r.ContentLength, held)
	}
	text, err := held.readAll(body, r.ContentLength)
	if err != nil {
		return err
	}
	if kind != "" && !strings.Contains(kind, "json") && !mayBeJSON(text) {
		b.begin.send(pieces{last: text}, held)
		return nil
	}
	name, err := memberAmong(text, p.cfg.Contract.reserved())
	switch {
	case err != nil && len(text) > 0: // engines take some text for JSON that is not JSON
		return fmt.Errorf("%w; if the body is not meant to be JSON, its Content-Type must say so", err)
	case name != "":
		return fmt.Errorf("%s %w", name, errReserved)
	}
	b.begin.send(pieces{last: text}, held)
	return nil
}

// readBytes does what read does, for bodies whose type is no text. Such bodies are large, and the router passes them
// on as they come. If a body begins like JSON, it searches the body, since some engines do not look at the type.
func (b *passed) readBytes(p *Proxy, body io.Reader, length int64, held *heldBody) error {
	g := held.gather(length)
	isJSON, err := g.readBegin(body)
	if err != nil && err != io.EOF {
		return err
	}
	if !isJSON {
		begin, err := g.stop()
		if err != nil {
			return err
		}
		b.begin.send(pieces{before: begin}, held)
		b.rest = body
		return nil
	}
	if err := held.expect(length); err != nil {
		return err
	}
	text, err := g.readAll(body)
	if err != nil {
		return err
	}
	if name := findEncoded(text, p.cfg.Contract.reserved()); name != "" {
		return fmt.Errorf("%s %w", name, errReserved)
	}
	b.begin.send(pieces{last: text}, held)
	return nil
}
