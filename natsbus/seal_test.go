package natsbus

import (
	"bytes"
	"crypto/ed25519"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/kvconn/kvconn/core"
)

func keyedIdentity(t testing.TB) *Identity {
	t.Helper()
	seed, _ := newNKey(t)
	i, err := NewKeyedIdentity(seed)
	if err != nil {
		t.Fatal(err)
	}
	return i
}

// established is a session of two agents, as each of them has it.
func established(t testing.TB, requester, responder *Identity) (asks *sealSession, answers *responderSession) {
	t.Helper()
	o, err := requester.open(responder.id)
	if err != nil {
		t.Fatal(err)
	}
	s, opened, err := responder.accept(requester.id, o.message, 7)
	if err != nil {
		t.Fatal(err)
	}
	if asks, err = o.finish(opened); err != nil {
		t.Fatal(err)
	}
	if len(o.message) != openBytes || len(opened) != openedBytes || kindOfSealed(o.message) != sealOpen || kindOfSealed(opened) != sealOpened {
		t.Fatalf("messages of %d and %d bytes", len(o.message), len(opened))
	}
	return asks, newResponderSession(responder, s, o.message)
}

func sealedRequest(s *sealSession, text string) []byte {
	return s.sealRequest(append(sealHeadroom(nil), text...))
}

func sealedAnswer(s *sealSession, text string, to *requestTag) []byte {
	return s.sealAnswer(append(sealHeadroom(nil), text...), to)
}

// TestSeal: what two agents seal, each reads of the other, once and in its place only. A message
// of which one bit is another one is nobody's.
func TestSeal(t *testing.T) {
	plain := func() *Identity { return NewIdentity() }
	for what, pair := range map[string][2]*Identity{
		"keys of their own": {plain(), plain()}, "nkeys": {keyedIdentity(t), keyedIdentity(t)}, "an nkey and none": {keyedIdentity(t), plain()},
	} {
		asks, answers := established(t, pair[0], pair[1])
		if asks.peer != pair[1].id || answers.peer != pair[0].id || asks.id != 7 || answers.id != 7 {
			t.Fatalf("%s: %v and %v", what, asks, answers)
		}
		request := sealedRequest(asks, "put it there")
		to := requestTagOf(request)
		if len(request) != sealOverhead+len("put it there") || kindOfSealed(request) != sealRequest {
			t.Errorf("%s: a request of %d bytes", what, len(request))
		}
		if got, err := answers.requests.unseal(slices.Clone(request), nil); err != nil || string(got) != "put it there" {
			t.Errorf("%s: %q, %v", what, got, err)
		}
		answer := sealedAnswer(answers.sealSession, "I do", &to)
		if got, err := asks.openAnswer(slices.Clone(answer), &to); err != nil || string(got) != "I do" {
			t.Errorf("%s: %q, %v", what, got, err)
		}
		for bit := range 8 * len(request) {
			m := slices.Clone(request)
			m[bit/8] ^= 1 << (bit % 8)
			if got, err := answers.requests.unseal(m, nil); err == nil {
				t.Fatalf("%s: with bit %d of the request changed it is read as %q", what, bit, got)
			}
		}
		for bit := range 8 * len(answer) {
			m := slices.Clone(answer)
			m[bit/8] ^= 1 << (bit % 8)
			if got, err := asks.openAnswer(m, &to); err == nil {
				t.Fatalf("%s: with bit %d of the answer changed it is read as %q", what, bit, got)
			}
		}
		again := sealedRequest(asks, "put it there") // the same words
		if bytes.Equal(again[sealHeader:], request[sealHeader:]) {
			t.Errorf("%s: two requests look alike", what)
		}
		next := requestTagOf(again)
		if _, err := asks.openAnswer(slices.Clone(answer), &next); err == nil {
			t.Errorf("%s: the answer to one request is taken for another's", what)
		}
		// An answer that was made to another message with the number of the request.
		ahead := to
		ahead[len(ahead)-1] ^= 1
		if _, err := asks.openAnswer(sealedAnswer(answers.sealSession, "no", &ahead), &to); err == nil {
			t.Errorf("%s: an answer to something else with the request's number is taken", what)
		}
		if _, err := asks.openAnswer(slices.Clone(request), &to); err == nil {
			t.Errorf("%s: a request is its own answer", what)
		}
		if _, err := answers.requests.unseal(slices.Clone(answer), nil); err == nil {
			t.Errorf("%s: an answer is taken as a request", what)
		}
		other, _ := established(t, pair[0], pair[1])
		if _, err := answers.requests.unseal(sealedRequest(other, "x"), nil); err == nil {
			t.Errorf("%s: a request of another session of the same two is taken", what)
		}
		if _, err := other.openAnswer(slices.Clone(answer), &to); err == nil {
			t.Errorf("%s: an answer of another session of the same two is taken", what)
		}
	}
}

// TestForgedOpen: nobody opens a session in another's name or answers in another's place, and
// what was said for one pair of agents is nothing for another.
func TestForgedOpen(t *testing.T) {
	for what, make := range map[string]func() *Identity{"keys of their own": NewIdentity, "nkeys": func() *Identity { return keyedIdentity(t) }} {
		d, p, e := make(), make(), make()
		as := func(i *Identity, id core.AgentID) *Identity { // i says that it is id
			return &Identity{signer: i.signer, key: i.key, id: id}
		}
		shows := func(public *Identity, signs *Identity) *Identity { // id and key of one, signed by another
			forged := slices.Concat([]byte(signs.signer[:ed25519.SeedSize]), []byte(public.public()))
			return &Identity{signer: forged, id: public.id}
		}
		opens := func(i *Identity, to core.AgentID) *opening {
			o, err := i.open(to)
			if err != nil {
				t.Fatal(err)
			}
			return o
		}
		honest := opens(d, p.id)
		_, opened, err := p.accept(d.id, honest.message, 1)
		if err != nil {
			t.Fatal(err)
		}
		refused := func(how string, from core.AgentID, m []byte) {
			if _, _, err := p.accept(from, m, 2); err == nil {
				t.Errorf("%s: %s: a session is opened as %s", what, how, from)
			}
		}
		refused("another's key", d.id, opens(as(e, d.id), p.id).message)
		refused("another's signature", d.id, opens(shows(d, e), p.id).message)
		refused("its own id", e.id, honest.message)
		refused("meant for another", d.id, opens(d, e.id).message)
		refused("a part of the id", d.id[:len(d.id)-1], honest.message)
		for i := sealStart; i < openBytes; i++ {
			m := slices.Clone(honest.message)
			m[i] ^= 1
			refused(fmt.Sprint("byte ", i), d.id, m)
		}
		weak := opens(d, p.id) // all secrets with this key are zero
		clear(weak.message[sealStart+ed25519.PublicKeySize:][:dhBytes])
		_, dh, _ := keysOf(weak.message)
		copy(weak.message[openBytes-ed25519.SignatureSize:], ed25519.Sign(d.signer, signText("open", d.id, p.id, d.public(), dh)))
		refused("a key of low order", d.id, weak.message)

		for how, m := range map[string][]byte{
			"another's key": func() []byte { _, m, _ := as(e, p.id).accept(d.id, honest.message, 1); return m }(),
			"another's signature": func() []byte {
				_, m, _ := shows(p, e).accept(d.id, honest.message, 1)
				return m
			}(),
			"the answer to another open": func() []byte { _, m, _ := p.accept(d.id, opens(d, p.id).message, 1); return m }(),
		} {
			if s, err := honest.finish(m); len(m) != openedBytes || err == nil {
				t.Errorf("%s: %s: the session is %v", what, how, s)
			}
		}
		for i := sealStart; i < openedBytes; i++ {
			m := slices.Clone(opened)
			m[i] ^= 1
			if _, err := honest.finish(m); err == nil {
				t.Errorf("%s: byte %d of the answer does not matter", what, i)
			}
		}
		// Notices.
		to := requestTagOf(honest.message)
		n := p.notice(d.id, &to, noticeRefused, "no place")
		if code, reason, err := d.readNotice(n, p.id, &to); err != nil || code != noticeRefused || reason != "no place" || kindOfSealed(n) != sealNotice {
			t.Errorf("%s: %v %q %v", what, code, reason, err)
		}
		for i := sealStart; i < len(n); i++ {
			m := slices.Clone(n)
			m[i] ^= 1
			if _, _, err := d.readNotice(m, p.id, &to); err == nil {
				t.Errorf("%s: byte %d of a notice does not matter", what, i)
			}
		}
		other := requestTagOf(opens(d, p.id).message)
		for how, read := range map[string]func() error{
			"another's":       func() error { _, _, err := d.readNotice(e.notice(d.id, &to, noticeAgain, ""), p.id, &to); return err },
			"to another":      func() error { _, _, err := e.readNotice(n, p.id, &to); return err },
			"of another word": func() error { _, _, err := d.readNotice(n, p.id, &other); return err },
			"of another's key": func() error {
				_, _, err := d.readNotice(as(e, p.id).notice(d.id, &to, noticeAgain, ""), p.id, &to)
				return err
			},
		} {
			if read() == nil {
				t.Errorf("%s: a notice that is %s is believed", what, how)
			}
		}
	}
}

// TestNumbersOfASession: however many seal at a time, no number is used twice with a key, and the
// responder takes each once.
func TestNumbersOfASession(t *testing.T) {
	d, p := NewIdentity(), NewIdentity()
	asks, answers := established(t, d, p)
	s := newResponderSessions()
	s.add(answers)
	const agents, each = 16, 200
	sealed := make(chan []byte, agents*each)
	var wg sync.WaitGroup
	for range agents {
		wg.Go(func() {
			for range each {
				request := sealedRequest(asks, "x")
				to := requestTagOf(request)
				sealed <- request
				sealed <- sealedAnswer(answers.sealSession, "y", &to)
			}
		})
	}
	seen := map[string]bool{}
	var requests [][]byte
	for range 2 * agents * each {
		m := <-sealed
		if name := fmt.Sprint(kindOfSealed(m), numberOf(m)); seen[name] {
			t.Fatalf("number %d is used twice", numberOf(m))
		} else {
			seen[name] = true
		}
		if kindOfSealed(m) == sealRequest {
			requests = append(requests, m)
		}
	}
	wg.Wait()
	slices.SortFunc(requests, func(a, b []byte) int { return int(numberOf(a)) - int(numberOf(b)) })
	taken := 0
	var mu sync.Mutex
	for range 4 {
		wg.Go(func() {
			for _, m := range requests {
				if _, err := answers.requests.unseal(slices.Clone(m), nil); err != nil {
					t.Error(err)
				}
				if s.use(answers, numberOf(m)) == arrivalNew {
					mu.Lock()
					taken++
					mu.Unlock()
				}
			}
		})
	}
	wg.Wait()
	if taken != len(requests) { // whoever comes to a number first takes it
		t.Errorf("%d of %d requests are taken", taken, len(requests))
	}
}

// TestServersNonce: a NATS server gets no signature of what another agent would believe.
func TestServersNonce(t *testing.T) {
	seed, _ := newNKey(t)
	key, _, err := seedKey(seed)
	if err != nil {
		t.Fatal(err)
	}
	i, err := NewKeyedIdentity(seed)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := signNonce(key, []byte("kEPn5o1zhHmFNVs")); err != nil {
		t.Errorf("a server's nonce: %v", err)
	}
	for what, text := range map[string][]byte{
		"an open": signText("open", i.id, "P", i.public(), make([]byte, dhBytes)), "a notice": signText("notice", "D", i.id),
		"a proof to a bootstrap port": nkeyText(rightAsk, make([]byte, 32)),
	} {
		if signature, err := signNonce(key, text); err == nil {
			t.Errorf("%s is signed: %x", what, signature)
		}
	}
	// And none can be sent: a server's words are JSON, whose texts are UTF-8.
	var info struct{ Nonce string }
	text := signText("open", i.id, "P")
	if err := json.Unmarshal(slices.Concat([]byte(`{"nonce":"`), bytes.ReplaceAll(text, []byte{0}, []byte(`\u0000`)), []byte(`"}`)), &info); err != nil || info.Nonce == string(text) || !strings.HasSuffix(info.Nonce, string(text[1:])) {
		t.Errorf("%q is read as %q, %v", text, info.Nonce, err)
	}
}
