// What the router sends to P and to D, and what their answers mean.

package proxy

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"time"

	"go.uber.org/zap"
)

// maxSmallAnswer bounds answers that are kept whole: P's, and errors.
const maxSmallAnswer = 8 << 20

// prefill sends the request to P, waits until P has computed the prompt, and
// returns P's kv_transfer_params.
func (p *Proxy) prefill(ctx context.Context, a *attempt) (json.RawMessage, *failure) {
	// P's work increases with the prompt.
	defer a.prefill.begin(1 + int64(a.size)>>10)()
	ctx, stop := a.prefill.untilRoleChange(ctx)
	defer stop()
	began := time.Now()
	defer a.toPrefill.end()
	resp, f := p.send(ctx, a, a.prefill, &a.toPrefill)
	if f != nil {
		return nil, f
	}
	defer resp.Body.Close()
	// The body is read to its end, or the connection could not be used again.
	most := int64(maxSmallAnswer)
	if a.prompt != nil {
		most = maxLogprobs
	}
	text, held, err := p.readAnswer(resp, most+1)
	defer held.end(0)
	switch {
	case resp.StatusCode < 200 || resp.StatusCode > 299: // the status says enough if the body breaks off
		a.keep(held)
		return nil, a.prefill.answered(resp, text)
	case errors.Is(err, errAnswers) && (p.cfg.Contract == NIXL || a.prompt != nil):
		return nil, a.prefill.failed(err)
	case errors.Is(err, errAnswers):
		return nil, nil // it is large, see below
	case err != nil:
		return nil, a.prefill.failed(fmt.Errorf("its answer broke off: %w", err))
	case int64(len(text)) > most && (p.cfg.Contract == NIXL || a.prompt != nil):
		return nil, a.prefill.failed(fmt.Errorf("its answer is larger than %d bytes", most))
	case int64(len(text)) > most:
		return nil, nil // by the other contracts only an error matters, which is small
	}
	if p.cfg.FallbackDecode { // a D may yet compute this prompt
		a.readTokens(text)
	}
	if a.prompt != nil {
		a.prompt.text = text
		a.keep(held)
	}
	if p.cfg.Contract != NIXL && !bytes.Contains(text, []byte("error")) && !bytes.Contains(text, []byte("abort")) {
		p.metrics.prefill.Observe(time.Since(began).Seconds())
		return nil, nil // the answer has nothing that readPrefillAnswer looks for
	}
	params, status, err := readPrefillAnswer(text)
	if err != nil {
		f := a.prefill.failed(err)
		f.answer = &engineAnswer{status: status, body: text}
		a.keep(held)
		return nil, f
	}
	if reason := refusal(params); reason != "" {
		a.refusal.Store(&reason)
		p.metrics.refusals.Inc()
		a.readTokens(text)
		p.decodeComputes(a, wasRefused)
		p.lines.refused.Do(func(note string) {
			p.log.Warn("the prefill server has nothing to load"+note, a.logFields(zap.String("reason", reason))...)
		})
	}
	if p.cfg.Contract == NIXL && params == nil {
		// D must compute the prompt, as it does for one without a whole block.
		p.metrics.noParams.Inc()
		a.readTokens(text)
		p.decodeComputes(a, withoutParams)
		p.lines.noParams.Do(func(note string) {
			p.log.Info("the prefill server answers no kv_transfer_params, so the decode server computes the prompt itself"+note, a.logFields()...)
		})
	}
	p.metrics.prefill.Observe(time.Since(began).Seconds())
	return params, nil
}

// readAnswer reads what there is of an engine's answer, at most so much.
func (p *Proxy) readAnswer(resp *http.Response, most int64) ([]byte, *heldBody, error) {
	held := p.bodies.beginAnswer()
	text, err := held.readAll(io.LimitReader(resp.Body, most), min(resp.ContentLength, most))
	return text, held, err
}

// readPrefillAnswer reads P's answer with a good status. An error in it means that no KV
// cache will come.
func readPrefillAnswer(text []byte) (params json.RawMessage, status int, err error) {
	var a struct {
		Error   json.RawMessage `json:"error"`
		Choices []struct {
			FinishReason string `json:"finish_reason"`
		} `json:"choices"`
		Params json.RawMessage `json:"kv_transfer_params"`
		Meta   struct {
			FinishReason struct {
				Type    string `json:"type"`
				Message string `json:"message"`
			} `json:"finish_reason"`
		} `json:"meta_info"` // SGLang's /generate
	}
	if first, ok := bytes.CutPrefix(text, []byte("data: ")); ok { // a stream, as by the SGLang contract
		text, _, _ = bytes.Cut(first, []byte("\n\n"))
	}
	if list := elements(text); len(list) > 0 && isArray(text) { // SGLang's answer to a batch
		for _, one := range list {
			if isArray(one) { // no engine's answer; each level would be read anew
				continue
			}
			if _, status, err = readPrefillAnswer(one); err != nil {
				return nil, status, err
			}
		}
		return nil, 0, nil
	}
	if json.Unmarshal(text, &a) != nil {
		return nil, 0, nil // an engine of another kind; its status was good
	}
	if len(a.Error) > 0 && string(a.Error) != "null" {
		status, reason := readError(a.Error)
		return nil, status, errors.New(reason)
	}
	for _, c := range a.Choices {
		if c.FinishReason == "abort" || c.FinishReason == "error" {
			return nil, http.StatusInternalServerError, fmt.Errorf("the prefill ended with finish_reason %q", c.FinishReason)
		}
	}
	if a.Meta.FinishReason.Type == "abort" {
		return nil, http.StatusInternalServerError, fmt.Errorf("the prefill was aborted: %s", shorten([]byte(a.Meta.FinishReason.Message)))
	}
	if string(a.Params) == "null" {
		a.Params = nil
	}
	var inner struct {
		Error json.RawMessage `json:"error"`
	}
	if a.Params != nil && json.Unmarshal(a.Params, &inner) == nil && len(inner.Error) > 0 && string(inner.Error) != "null" {
		status, reason := readError(inner.Error)
		return nil, status, errors.New(reason)
	}
	return a.Params, 0, nil
}

// refusal is P's reason, in kvconn's own member, why there is nothing to load.
func refusal(params json.RawMessage) string {
	var said struct {
		Reason string `json:"kvconn_error"`
	}
	if params == nil || json.Unmarshal(params, &said) != nil {
		return ""
	}
	return shorten([]byte(said.Reason))
}

// readError reads an error member: OpenAI's object, or a text.
func readError(raw json.RawMessage) (status int, reason string) {
	var e struct {
		Message string          `json:"message"`
		Code    json.RawMessage `json:"code"`
	}
	if json.Unmarshal(raw, &e) != nil || e.Message == "" {
		if json.Unmarshal(raw, &reason) != nil {
			reason = string(raw)
		}
		return http.StatusInternalServerError, shorten([]byte(reason))
	}
	status, err := strconv.Atoi(string(e.Code))
	if err != nil || status < 400 || status > 599 {
		status = http.StatusInternalServerError
	}
	return status, shorten([]byte(e.Message))
}

// decode sends the request to D and waits until D begins to answer. Headers alone do not
// say so: engines send those of a stream before they have anything to stream. An error
// after them is still one that another engine may mend.
func (p *Proxy) decode(ctx context.Context, a *attempt, params json.RawMessage) (answer, *failure) {
	ctx, stop := a.decode.untilRoleChange(ctx)
	defer stop()
	end := a.decode.begin(1)
	a.toDecode.send(p.cfg.Contract.decodeBody(a, params), a.held)
	resp, f := p.send(ctx, a, a.decode, &a.toDecode)
	if f != nil {
		a.toDecode.end()
		end()
		return answer{}, f
	}
	d := readFirst(resp)
	d.end, d.sent = end, &a.toDecode
	if f := p.checkBegin(a, &d); f != nil {
		d.close()
		return answer{}, f
	}
	return d, nil
}

// checkBegin says whether the begin of D's answer is an error.
func (p *Proxy) checkBegin(a *attempt, d *answer) *failure {
	switch {
	case d.resp.StatusCode >= 400:
		rest, held, _ := p.readAnswer(d.resp, maxSmallAnswer) // the status says enough if it breaks off
		defer held.end(0)
		a.keep(held)
		f := a.decode.answered(d.resp, append(bytes.Clone(d.first), rest...))
		f.at = nil // it may have failed because P did
		return f
	case len(d.first) == 0 && d.err == io.EOF:
		return a.decode.failed(fmt.Errorf("answered %s with an empty body", d.resp.Status))
	case d.err != nil && d.err != io.EOF:
		return a.decode.failed(d.brokeOff())
	case !d.streams():
		return nil
	}
	raw, ok := d.errorEvent()
	switch {
	case !ok && d.err != nil && d.err != io.EOF: // errorEvent may have read on
		return a.decode.failed(d.brokeOff())
	case !ok:
		return nil
	}
	var e struct {
		Error json.RawMessage `json:"error"`
	}
	if json.Unmarshal(raw, &e) != nil || len(e.Error) == 0 {
		return nil
	}
	status, reason := readError(e.Error)
	f := a.decode.failed(errors.New(reason))
	f.at = nil
	f.answer = &engineAnswer{status: status, body: bytes.Clone(raw)}
	return f
}

// send posts one half of a request.
func (p *Proxy) send(ctx context.Context, a *attempt, t target, body *sent) (*http.Response, *failure) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, t.server.path(a.endpoint), nil)
	if err != nil {
		return nil, t.failed(err)
	}
	body.sendIn(req)
	for _, name := range []string{"Authorization", "Traceparent", "Tracestate"} {
		if v, ok := a.header[name]; ok {
			req.Header[name] = v
		}
	}
	req.Header["Content-Type"] = []string{"application/json"}
	req.Header["X-Request-Id"] = []string{a.engineRequestID()}
	if t.dp != unranked && p.cfg.Contract != SGLang { // SGLang's engines are told the dp rank in the body
		req.Header["X-Data-Parallel-Rank"] = []string{strconv.Itoa(t.dp)}
	}
	since := t.server.times()
	resp, err := p.client.Do(req)
	body.letGo()
	if err != nil {
		if ctx.Err() == nil {
			p.noteDown(t.server, since, err)
		}
		return nil, t.failed(err)
	}
	return resp, nil
}

// failed is a failure of the target itself.
func (t target) failed(err error) *failure {
	return &failure{role: t.server.role, at: &t, url: t.server.url, err: err}
}

// answered is the failure of an answer without success.
func (t target) answered(resp *http.Response, body []byte) *failure {
	f := t.failed(fmt.Errorf("answered %d %s: %s", resp.StatusCode, http.StatusText(resp.StatusCode), shorten(body)))
	f.answer = &engineAnswer{status: resp.StatusCode, header: resp.Header, body: body}
	return f
}

func shorten(text []byte) string {
	return strings.ToValidUTF8(strings.TrimSpace(string(text[:min(len(text), 500)])), "")
}
