package natsbus

import (
	"crypto/ed25519"
	"fmt"
	"slices"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/wire"
)

// noticeCode says why a request gets no sealed answer.
type noticeCode byte

const (
	noticeAgain   noticeCode = 1 // its session is not known here: the requester is to open another
	noticeRefused noticeCode = 2 // the request is refused, and there is no session to seal an answer with: the reason says why
)

// notice makes a notice. There is no key to seal it with, so it is signed: else whoever hears a
// request could end it. It is bound to that request.
func (i *Identity) notice(requester core.AgentID, to *requestTag, code noticeCode, reason string) []byte {
	text := append([]byte{byte(code)}, reason...)
	signature := ed25519.Sign(i.signer, signText("notice", requester, i.id, to[:], text))
	return slices.Concat([]byte{sealMagic, sealVersion, byte(sealNotice)}, i.public(), signature, text)
}

// readNotice reads a responder's notice of a request.
func (i *Identity) readNotice(m []byte, from core.AgentID, request *requestTag) (code noticeCode, reason string, err error) {
	rest := m[sealStart:]
	public, signature, text := rest[:ed25519.PublicKeySize], rest[ed25519.PublicKeySize:noticeBytes-1-sealStart], m[noticeBytes-1:]
	if err := signed(public, from, signText("notice", i.id, from, request[:], text), signature); err != nil {
		return 0, "", err
	}
	return noticeCode(text[0]), string(text[1:]), nil
}

// refuse is a plain reply.
func refuse(format string, args ...any) *wire.Reply {
	return &wire.Reply{Code: int(core.Refused), Reason: fmt.Sprintf(format, args...)}
}

// later refuses what may be asked for again.
func later(format string, args ...any) *wire.Reply {
	return &wire.Reply{Code: int(core.Failed), Again: wire.AgainLater, Reason: fmt.Sprintf(format, args...)}
}
