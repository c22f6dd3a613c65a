package natsbus

import (
	"crypto/rand"
	"fmt"
	mathrand "math/rand/v2"
	"slices"
	"strings"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/wire"
)

// hostileOperator carries what the agents of a cluster say: it hears all, and sends in any name. It has an nkey of its own.
type hostileOperator struct {
	w   *simWorld
	key *Identity

	requests, answers []*simMessage           // heard of honest agents, the newest last
	opens             map[string]hostileOpen  // by the subjects of their answers
	mine              []hostileOpen           // which were answered
	posed             map[uint64]*sealSession // opened with it by agents that took it for another
	busy              *simAgent               // whose responder is held up
	n                 int
}

// hostileOpen is a session that it opens.
type hostileOpen struct {
	*opening
	to      *simAgent
	session *sealSession
}

func newHostileOperator(w *simWorld) *hostileOperator {
	return &hostileOperator{w: w, key: keyedIdentity(w.t), opens: map[string]hostileOpen{}, posed: map[uint64]*sealSession{}}
}

// as has another's id, and the hostile peer's key.
func (h *hostileOperator) as(id core.AgentID) *Identity {
	return &Identity{signer: h.key.signer, id: id}
}

func (h *hostileOperator) word() string {
	h.n++
	return fmt.Sprint("attacker", h.n)
}

func (h *hostileOperator) send(subj, reply string, data []byte) {
	h.w.net.inject(&simMessage{subj: subj, reply: reply, data: slices.Clone(data)})
}

// listen takes note of all messages, and answers some before their receivers do.
func (h *hostileOperator) listen() {
	for _, m := range h.w.net.listen() {
		kind, chance := kindOfSealed(m.data), m.chance(h.w.seed, 1)
		if strings.Contains(m.subj, elsewhere) {
			h.w.fault("%s answers the hostile peer at %s", h.w.nameOf(m.from.id), m.subj)
		}
		if o, ok := h.opens[m.subj]; ok {
			h.opened(m, o)
			continue
		}
		if begins([]byte(m.subj), inboxRoot) {
			h.answers = append(h.answers, m)
			continue
		}
		h.requests = append(h.requests, m)
		switch to := h.agentAt(m); {
		case to == nil:
		case kind == sealOpen && chance.IntN(3) == 0:
			h.w.tell("hostile-poses", "opens a session as %s", to.name)
			if s, opened, err := h.as(to.id).accept(m.from.id, m.data, chance.Uint64()); err == nil {
				h.posed[s.id] = s
				h.send(m.reply, "", opened)
			}
		case kind == sealRequest && h.posed[sessionOf(m.data)] != nil:
			s, to := h.posed[sessionOf(m.data)], requestTagOf(m.data)
			h.send(m.reply, "", s.sealAnswer(append(sealHeadroom(nil), h.reply()...), &to))
		case kind == sealRequest && chance.IntN(3) == 0:
			h.answer(m, chance)
		}
	}
	h.requests, h.answers = h.requests[max(0, len(h.requests)-32):], h.answers[max(0, len(h.answers)-32):]
}

// opened has a session that it has opened, if the answer is one.
func (h *hostileOperator) opened(m *simMessage, o hostileOpen) {
	if kindOfSealed(m.data) != sealOpened {
		return
	}
	var err error
	if o.session, err = o.finish(m.data); err != nil {
		h.w.fault("the answer to the hostile peer's own open is none: %v", err)
		return
	}
	delete(h.opens, m.subj)
	h.mine = append(h.mine, o)
	h.request(o, o.self.id, inboxOf(o.self.id)+".x")
}

// elsewhere is in the subjects of others at which it wants its own requests answered.
const elsewhere = ".elsewhere"

// request sends a request of a session in some agent's name.
func (h *hostileOperator) request(o hostileOpen, name core.AgentID, reply string) {
	data, err := message(wire.KindSignal, name, h.word()).MarshalMsg(sealHeadroom(nil))
	if err != nil {
		h.w.t.Fatal(err)
	}
	h.send(subject(o.to.id, name), reply, o.session.sealRequest(data))
}

func (h *hostileOperator) agentAt(m *simMessage) *simAgent {
	for _, a := range h.w.agents {
		if covers(subject(a.id, ">"), m.subj) {
			return a
		}
	}
	return nil
}

func (h *hostileOperator) reply() []byte {
	data, err := (&wire.Reply{Reason: h.word()}).MarshalMsg(nil)
	if err != nil {
		h.w.t.Fatal(err)
	}
	return data
}

// answer answers a request in the place of who was asked.
func (h *hostileOperator) answer(m *simMessage, rnd *mathrand.Rand) {
	what := rnd.IntN(5)
	h.w.tell("hostile-answer", "answers at %s, by way %d", m.reply, what)
	switch what {
	case 0:
		h.send(m.reply, "", h.reply())
	case 1, 2: // an earlier answer of the same session
		for _, a := range slices.Backward(h.answers) {
			if kindOfSealed(a.data) == sealAnswer && sessionOf(a.data) == sessionOf(m.data) {
				h.send(m.reply, "", a.data)
				return
			}
		}
	case 3:
		to := requestTagOf(m.data)
		h.send(m.reply, "", h.key.notice(m.from.id, &to, noticeAgain, ""))
	default:
		h.w.net.inject(&simMessage{subj: m.reply, absent: true})
	}
}

func (h *hostileOperator) strike() {
	w := h.w
	a, b := w.two()
	own := h.key.id
	sealed := func() *simMessage {
		if len(h.requests) == 0 {
			return nil
		}
		return h.requests[w.rnd.IntN(len(h.requests))]
	}
	switch what := w.rnd.IntN(8); what {
	case 0, 1: // again, as it was
		if m := sealed(); m != nil {
			w.tell("hostile-replay", "sends a message to %s again", m.subj)
			h.send(m.subj, m.reply, m.data)
		}
	case 2: // again, in another's name
		if m := sealed(); m != nil && h.agentAt(m) != nil {
			w.tell("hostile-name", "sends a message of another as %s", b.name)
			h.send(subject(h.agentAt(m).id, b.id), inboxOf(b.id)+".x", m.data)
		}
	case 3, 4:
		if m := sealed(); m != nil && kindOfSealed(m.data) == sealRequest {
			h.answer(m, w.rnd)
		}
	case 5: // a session, as itself or as another
		name := []core.AgentID{own, b.id}[w.rnd.IntN(2)]
		w.tell("hostile-open", "opens a session with %s as %s", a.name, w.nameOf(name))
		o, err := h.as(name).open(a.id)
		if err != nil {
			w.t.Fatal(err)
		}
		reply := fmt.Sprint(inboxOf(name), ".open", h.n)
		h.n++
		h.opens[reply] = hostileOpen{opening: o, to: a}
		h.send(subject(a.id, name), reply, o.message)
	case 6: // its own session, in another's name
		if len(h.mine) > 0 {
			o := h.mine[w.rnd.IntN(len(h.mine))]
			name, reply := own, inboxOf(b.id)+elsewhere
			if o.to != b && w.rnd.IntN(2) == 0 {
				name, reply = b.id, inboxOf(b.id)+".x"
			}
			w.tell("hostile-session", "asks %s over its own session as %s, to be answered at %s", o.to.name, w.nameOf(name), reply)
			h.request(o, name, reply)
		}
	default: // not sealed
		w.tell("hostile-plain", "asks %s as %s", a.name, b.name)
		data, err := message(wire.KindSignal, b.id, h.word()).MarshalMsg(nil)
		if err != nil {
			w.t.Fatal(err)
		}
		h.send(subject(a.id, b.id), inboxOf(b.id)+".x", data)
	}
}

// fill has very many messages of no session wait at an agent whose processors are at work. All are in the names of the agents
// of the hostile peer's key.
func (h *hostileOperator) fill() {
	if h.busy != nil {
		return
	}
	h.busy = h.w.agents[0]
	h.busy.bus.sessionless.responders <- struct{}{}
	h.w.tell("hostile-fill", "at %s", h.busy.name)
	for i := range maxSessionlessOf + 40 {
		m := make([]byte, openBytes)
		_, _ = rand.Read(m)
		m[0], m[1], m[2] = sealMagic, sealVersion, byte(sealOpen)
		name := core.AgentID(fmt.Sprint(ownerOf(h.key.id), keySeparator, i))
		h.send(subject(h.busy.id, name), inboxOf(name)+".x", m)
	}
}

// forgotten sends the newest requests again: their receiver may not know any more that it has had them.
func (h *hostileOperator) forgotten(a *simAgent) {
	n := 0
	for _, m := range slices.Backward(h.requests) {
		if n < 4 && h.agentAt(m) == a {
			n++
			h.send(m.subj, m.reply, m.data)
		}
	}
}

func (h *hostileOperator) release() {
	if h.busy != nil {
		<-h.busy.bus.sessionless.responders
		h.busy.bus.answerSessionless()
		h.busy = nil
	}
}

func (h *hostileOperator) leave() { h.release() }

func (h *hostileOperator) owns(id, account string) bool {
	return ownerOf(core.AgentID(id)) == ownerOf(h.key.id) && account == ownerOf(h.key.id)
}

func (h *hostileOperator) check(broken func(string)) {
	for _, a := range h.w.agents {
		waits := a.bus.sessionless
		of := map[string]int{}
		waits.mu.Lock()
		for _, owner := range waits.waits.All() {
			of[owner]++
		}
		waits.mu.Unlock()
		for owner, n := range of {
			if n > maxSessionlessOf {
				broken(fmt.Sprintf("%d messages of %s wait at %s, of %d", n, owner, a.name, maxSessionlessOf))
			}
		}
	}
}
