package proxy

import (
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
)

// TestPieces: an object is written with the client's own bytes, however it is cut in pieces, and can be sent again until the
// engine has answered.
func TestPieces(t *testing.T) {
	long := strings.Repeat("x", 2*shortText)
	for name, c := range map[string]struct{ in, out string }{
		"short":      {`{"a":1, "b":2}`, `{"a":1,"b":2,"c":3}`},
		"empty":      {`{}`, `{"c":3}`},
		"long first": {`{"a":"` + long + `","b":2,"c":4}`, `{"a":"` + long + `","b":2,"c":3}`},
		"long last":  {`{"c":[1],"b":2,"a":"` + long + `"}`, `{"b":2,"a":"` + long + `","c":3}`},
		"two long":   {`{"a":"` + long + `", "b":"` + long + `"}`, `{"a":"` + long + `","b":"` + long + `","c":3}`},
		"long ours":  {`{"c":"` + long + `","d":"` + long + `"}`, `{"c":3}`},
	} {
		var b bodies
		b.init(DefaultConfig())
		client := b.begin(httptest.NewRecorder(), "10.0.0.1:1")
		client.add(1000)
		f := must(parseFields([]byte(c.in)))
		if got := string(f.flat([]member{{"c", []byte("3")}})); !strings.Contains(c.in, `"d"`) && got != c.out {
			t.Errorf("%s: as one %.100s", name, got)
		}
		body := f.with([]member{{"c", []byte("3")}}, "d")
		if got := string(body.whole()); got != c.out || body.size() != int64(len(c.out)) {
			t.Errorf("%s: %.100s, %d bytes, want %.100s", name, got, body.size(), c.out)
		}
		counted := len(c.out) > shortText
		if counted && body.own > 100 {
			t.Errorf("%s: %d bytes were copied", name, body.own)
		}
		var s sent
		s.send(body, client)
		req := must(http.NewRequest(http.MethodPost, "http://x", nil))
		s.sendIn(req)
		for range 2 { // as net/http does when a kept connection was closed
			r := must(req.GetBody())
			if got := string(must(io.ReadAll(r))); got != c.out {
				t.Errorf("%s: sent is %.100s", name, got)
			}
			_ = r.Close()
		}
		client.end(0)
		s.letGo()
		if _, err := req.GetBody(); counted && !errors.Is(err, errSent) {
			t.Errorf("%s: a long body is sent again after the answer: %v", name, err)
		}
		if n := b.held(); counted && n != 1000+body.own || !counted && n != 0 {
			t.Errorf("%s: %d bytes are counted while it is sent", name, n)
		}
		if got := string(must(io.ReadAll(req.Body))); got != c.out || req.ContentLength != int64(len(c.out)) {
			t.Errorf("%s: sent is %.100s, said to be %d", name, got, req.ContentLength)
		}
		if b.held() != 0 {
			t.Errorf("%s: %d bytes are counted when it is sent", name, b.held())
		}
		_ = req.Body.Close()
		_ = req.Body.Close()
		s.end()

		// What has not begun when it is let go is sent once. What net/http has forgotten to close is let go in the end.
		client = b.begin(httptest.NewRecorder(), "10.0.0.1:1")
		client.add(1000)
		var late sent
		late.send(f.with([]member{{"c", []byte("3")}}, "d"), client)
		late.letGo()
		late.sendIn(req)
		begin := make([]byte, 2)
		_, err := io.ReadFull(req.Body, begin)
		if err != nil || string(begin) != c.out[:2] {
			t.Errorf("%s: sent late is %q, %v", name, begin, err)
		}
		if late.end(); b.held() != 1000 {
			t.Errorf("%s: %d bytes are counted when only the client's body is held", name, b.held())
		}
		if client.end(0); b.held() != 0 {
			t.Errorf("%s: %d bytes are left", name, b.held())
		}
		if rest, err := io.ReadAll(req.Body); counted && (len(rest) != 0 || !errors.Is(err, errSent)) {
			t.Errorf("%s: after the end %d bytes are read, and %v: an engine would take the begin for all", name, len(rest), err)
		}
	}
}
