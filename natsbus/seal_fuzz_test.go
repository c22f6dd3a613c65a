package natsbus

import (
	"bytes"
	"slices"
	"testing"
)

// FuzzSealed: whatever an unknown agent sends is no request, no answer and no session, and ends nothing.
func FuzzSealed(f *testing.F) {
	d, p, e := NewIdentity(), NewIdentity(), NewIdentity()
	asks, answers := established(f, d, p)
	request := sealedRequest(asks, "put it there")
	to := requestTagOf(request)
	o, err := d.open(p.id)
	if err != nil {
		f.Fatal(err)
	}
	theirs, err := e.open(p.id)
	if err != nil {
		f.Fatal(err)
	}
	_, opened, err := p.accept(d.id, o.message, 9)
	if err != nil {
		f.Fatal(err)
	}
	_, forged, err := (&Identity{signer: e.signer, id: p.id}).accept(d.id, o.message, 9)
	if err != nil {
		f.Fatal(err)
	}
	ours := [][]byte{request, sealedAnswer(answers.sealSession, "I do", &to), opened, p.notice(d.id, &to, noticeAgain, ""), p.notice(d.id, &to, noticeRefused, "full")}
	for _, m := range ours {
		for _, n := range []int{len(m) - 1, sealHeader, sealStart, 1, 0} {
			f.Add(slices.Clone(m[:n]))
		}
		changed := slices.Clone(m)
		changed[len(m)/2] ^= 0x40
		f.Add(changed)
	}
	f.Add(slices.Clone(theirs.message))
	f.Add(slices.Clone(forged))
	f.Add(e.notice(d.id, &to, noticeAgain, ""))
	f.Fuzz(func(t *testing.T, m []byte) {
		if slices.ContainsFunc(ours, func(o []byte) bool { return bytes.Equal(o, m) }) || bytes.Equal(m, o.message) {
			return
		}
		b := &Bus{}
		b.opt.Identity, b.log = p, nopLog
		seals := newSeals(p)
		seals.responder.add(answers)
		v := &inboundRequest{link: &link{id: p.id, seals: seals}, from: d.id, m: unboundMessage(slices.Clone(m))}
		if b.admit(v) && b.unseal(v) {
			t.Errorf("it is a request: %x", m)
		}
		if n := len(seals.responder.by); n != 1 {
			t.Errorf("there are %d sessions", n)
		}
		for _, a := range []*pendingAnswer{{self: d, invalid: &seals.invalid, to: p.id, requestTag: to, session: asks}, {self: d, invalid: &seals.invalid, to: p.id, requestTag: requestTagOf(o.message), opening: o}} {
			if a.right(unboundMessage(slices.Clone(m))) || a.opened != nil || a.forgotten {
				t.Errorf("it is an answer: %x", m)
			}
		}
	})
}
