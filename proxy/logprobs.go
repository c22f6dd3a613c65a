// SGLang's /generate with return_logprob: only P has the logprobs of the prompt's
// tokens. They go before D's, as SGLang's own routers have it.

package proxy

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
)

// maxLogprobs bounds P's answer, and D's or an event of it, where they are merged.
const maxLogprobs = 64 << 20

// promptLogs are the members of meta_info that P knows.
var promptLogs = []string{"input_token_logprobs", "input_top_logprobs", "input_token_ids_logprobs"}

// prompt is P's answer, for the logprobs in it.
type prompt struct {
	done chan struct{} // closed when text is there
	text []byte        // nil after a failure
	of   *bodies
}

// wantsPrompt reports whether the client asked for something that D's answer lacks.
func (c Contract) wantsPrompt(r *request) bool {
	return c == SGLang && r.endpoint == "/generate" && bytes.Contains(r.fields.last("return_logprob"), []byte("true"))
}

// byIndex returns the meta_info objects of P's answer. If the request is a batch, they are by their position in it;
// if the answer is a stream, by the index in its events.
func (p *prompt) byIndex() map[int]fields {
	out := map[int]fields{}
	add := func(at int, text []byte) {
		f, err := parseFields(text)
		if err != nil {
			return
		}
		if raw := f.last("index"); raw != nil {
			if n, err := strconv.Atoi(string(raw)); err == nil {
				at = n
			}
		}
		if meta, err := parseFields(orObject(f.last("meta_info"))); err == nil && out[at] == nil {
			out[at] = meta
		}
	}
	if !bytes.HasPrefix(p.text, []byte("data:")) {
		for i, one := range elements(p.text) {
			add(i, one)
		}
		return out
	}
	for event := range bytes.SplitSeq(p.text, []byte("\n\n")) {
		if data, ok := bytes.CutPrefix(event, []byte("data:")); ok {
			add(0, bytes.TrimSpace(data))
		}
	}
	return out
}

func orObject(raw []byte) []byte {
	if raw == nil {
		return []byte("{}")
	}
	return raw
}

// elements are the elements of an array, or the text itself if it is none.
func elements(text []byte) []json.RawMessage {
	var list []json.RawMessage
	if json.Unmarshal(text, &list) != nil {
		return []json.RawMessage{text}
	}
	return list
}

// merged is D's object with P's logprobs before its own. If P's answer has no logprobs for D's
// object, D's object stays as it is.
func merged(d []byte, at int, prompts map[int]fields) []byte {
	f, err := parseFields(d)
	if err != nil {
		return d
	}
	if raw := f.last("index"); raw != nil {
		if n, err := strconv.Atoi(string(raw)); err == nil {
			at = n
		}
	}
	p, meta := prompts[at], f.last("meta_info")
	own, err := parseFields(orObject(meta))
	if p == nil || meta == nil || err != nil {
		return d
	}
	var ours []member
	for _, name := range promptLogs {
		if raw := p.last(name); isArray(raw) {
			ours = append(ours, member{name, joined(raw, own.last(name))})
		}
	}
	return f.flat([]member{{"meta_info", own.flat(ours)}})
}

func isArray(raw []byte) bool { return len(raw) > 1 && raw[0] == '[' }

// joined is one array made of two.
func joined(a, b []byte) json.RawMessage {
	if !isArray(b) {
		return a
	}
	a, b = bytes.TrimSpace(a[1:len(a)-1]), bytes.TrimSpace(b[1:len(b)-1])
	out := append([]byte{'['}, a...)
	if len(a) > 0 && len(b) > 0 {
		out = append(out, ',')
	}
	return append(append(out, b...), ']')
}

// relayMerged is answer.relay of an answer into which P's logprobs go.
func (a *answer) relayMerged(w http.ResponseWriter, ctx context.Context, p *prompt) error {
	select {
	case <-p.done: // P has answered when D has its KV cache
	case <-ctx.Done():
		return ctx.Err()
	}
	if p.text == nil || a.resp.StatusCode != http.StatusOK {
		return a.relay(w)
	}
	prompts, held := p.byIndex(), p.of.beginAnswer()
	defer held.end(0)
	body := io.Reader(bytes.NewReader(a.first))
	if a.err == nil {
		body = io.MultiReader(body, a.resp.Body)
	}
	passHeader(w.Header(), a.resp.Header)
	w.Header().Del("Content-Length")
	write := func(chunk []byte) error {
		boundWrite(w)
		_, err := w.Write(chunk)
		return err
	}
	if !a.streams() {
		text, err := held.readAll(io.LimitReader(body, maxLogprobs+1), -1)
		if err == nil && len(text) > maxLogprobs {
			err = fmt.Errorf("the decode server's answer has more than %d bytes", maxLogprobs)
		}
		if err != nil {
			return err
		}
		if list := elements(text); isArray(bytes.TrimSpace(text)) {
			for i := range list {
				list[i] = merged(list[i], i, prompts)
			}
			if text, err = json.Marshal(list); err != nil {
				return err
			}
		} else {
			text = merged(text, 0, prompts)
		}
		held.add(int64(len(text))) // D's own lives on beside it
		w.WriteHeader(a.resp.StatusCode)
		return write(text)
	}
	w.WriteHeader(a.resp.StatusCode)
	c := http.NewResponseController(w)
	for lines := bufio.NewReaderSize(body, 64<<10); ; {
		line, err := readLine(lines, held)
		if data, ok := bytes.CutPrefix(line, []byte("data:")); ok && err == nil {
			line = append(append([]byte("data: "), merged(bytes.TrimSpace(data), 0, prompts)...), '\n')
		}
		if len(line) > 0 {
			if err := write(line); err != nil {
				return err
			}
			if len(line) == 1 { // the end of an event
				if err := c.Flush(); err != nil {
					return err
				}
			}
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

// readLine reads up to and with the next newline.
func readLine(r *bufio.Reader, held *heldBody) (line []byte, err error) {
	for {
		part, err := r.ReadSlice('\n')
		if line = append(line, part...); len(line) > smallBody || held.bytes > 0 {
			if err := held.holds(int64(cap(line))); err != nil { // the line before it counts no more
				return nil, err
			}
		}
		switch {
		case len(line) > maxLogprobs:
			return nil, fmt.Errorf("an event of the decode server has more than %d bytes", maxLogprobs)
		case !errors.Is(err, bufio.ErrBufferFull):
			return line, err
		}
	}
}
