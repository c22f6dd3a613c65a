package node

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"go.uber.org/zap"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/internal/fault"
	"github.com/kvconn/kvconn/wire"
)

// messageSender sends the machine's messages to peers, and gives it their answers.
type messageSender struct {
	log     *zap.Logger
	client  *rpcClient
	peers   *peerTable
	machine *lockedMachine
}

func (s *messageSender) load(v core.SendLoad) {
	answered := func(answer core.LoadAnswer, code core.Code, reason string) {
		s.machine.tell(core.LoadAnswered{ID: v.ID, Seq: v.Seq, Answer: answer, Code: code, Reason: reason})
	}
	groups := make([]wire.Blocks, len(v.Blocks))
	for g := range groups {
		groups[g] = wire.Blocks{First: v.First[g], IDs: v.Blocks[g]}
	}
	if s.peers.isGone(v.Peer) {
		// P was found gone while this load waited: no need to find out again.
		answered(core.LoadAbsent, core.PeerLost, fmt.Sprintf("prefill agent %s is gone", v.Peer))
		return
	}
	began := time.Now()
	if s.peers.unresponsive(v.Peer, began) {
		answered(core.LoadRefused, core.PeerLost, fmt.Sprintf("prefill agent %s does not answer other loads", v.Peer))
		return
	}
	transport, grant := splitTransportName(v.Grant)
	rep, err := s.client.requestWithRetries(v.Peer, &wire.Request{Kind: wire.KindLoad, Load: &wire.Load{
		TransferID: string(v.ID), Transport: transport, Grant: grant, Groups: groups, Tokens: v.Tokens, Regions: v.Regions, Prompt: v.Prompt, LeaseMS: v.Lease.Milliseconds(),
	}})
	answer, code, reason := core.LoadRefused, core.OK, ""
	switch {
	case errors.Is(err, core.ErrTooLarge):
		code, reason = core.Refused, fmt.Sprintf("the load cannot be sent to prefill agent %s: %v", v.Peer, err)
	case err != nil:
		code, reason = core.PeerLost, fmt.Sprintf("prefill agent %s does not answer: %v", v.Peer, err)
		if gone(err) {
			answer = core.LoadAbsent
			s.peers.markGone(v.Peer) // the machine does not, if all bytes of this load came before P went
		} else {
			s.peers.suspect(v.Peer) // its connections may stand, though its host is gone
			s.peers.noteUnanswered(v.Peer, began, s.client.peerTimeout/3)
		}
	case rep.Code == 0:
		answer = core.LoadAccepted
	case rep.Again == wire.AgainAfterHello:
		answer, reason = core.LoadSayHello, rep.Reason
	default:
		if code, reason = core.Code(rep.Code), rep.Reason; code == core.Closed {
			answer = core.LoadAbsent // another may take its place
		}
	}
	if err == nil {
		s.peers.answered(v.Peer)
	}
	answered(answer, code, reason)
}

// maxRenew bounds the transfers that one renewal names, so that it fits into
// any server's messages.
const maxRenew = 1024

func (s *messageSender) renew(v core.SendRenew) {
	answers := make([]core.Answer, 0, len(v.Loads)+len(v.Claims))
	var err error
	for _, claims := range []bool{false, true} {
		ids := v.Loads
		if claims {
			ids = v.Claims
		}
		for part := range slices.Chunk(ids, maxRenew) {
			if err == nil {
				var list []core.Answer
				list, err = s.renewPart(v.Peer, part, claims)
				answers = append(answers, list...)
			}
		}
	}
	s.machine.renewReplied(v, answers, gone(err), err)
}

// renewPart asks for some of the claims, or of the loads.
func (s *messageSender) renewPart(peer core.AgentID, part []core.TransferID, claims bool) ([]core.Answer, error) {
	ids := make([]string, len(part))
	for i, id := range part {
		ids[i] = string(id)
	}
	req := &wire.Renew{Loads: ids}
	if claims {
		req = &wire.Renew{Claims: ids}
	}
	rep, err := accepted(s.client.requestWithin(s.client.peerTimeout/3, peer, &wire.Request{Kind: wire.KindRenew, Renew: req}))
	if err == nil && len(rep.Statuses) != len(ids) && !fault.On("node-answers-of-others") {
		err = fmt.Errorf("prefill agent %s answers for %d transfers, it was asked for %d", peer, len(rep.Statuses), len(ids))
	}
	if err != nil {
		return nil, err
	}
	answers := make([]core.Answer, len(ids))
	for i, status := range rep.Statuses {
		answers[i].Status = core.Status(status)
	}
	for _, e := range rep.Ends {
		answers[e.Index].Code, answers[e.Index].Reason = core.Code(e.Code), e.Reason
	}
	return answers, nil
}

// accepted makes an error of a refusal.
func accepted(rep *wire.Reply, err error) (*wire.Reply, error) {
	if err == nil && rep.Code != 0 {
		err = errors.New(rep.Reason)
	}
	return rep, err
}

// probe asks a decode agent whether it lives.
func (s *messageSender) probe(v core.SendProbe) {
	// The wait is short, since a message is lost while D's link breaks, and the machine asks again.
	_, err := accepted(s.client.requestWithin(s.client.peerTimeout/10, v.Peer, &wire.Request{Kind: wire.KindRenew, Renew: &wire.Renew{}}))
	// D's links broke too, so that it may come back: the machine gives it time.
	s.machine.tell(core.ProbeReplied{Peer: v.Peer, Absent: errors.Is(err, core.ErrAbsent), Away: errors.Is(err, core.ErrAway), Err: err})
}

// finish tells how transfers have ended here.
func (s *messageSender) finish(peer core.AgentID, ends []wire.Finish) {
	_, err := accepted(s.client.requestWithRetries(peer, &wire.Request{Kind: wire.KindFinish, Finishes: ends}))
	if err != nil { // the peer learns it by a renewal or a lease
		s.log.Debug("the ends of transfers were not delivered", zap.Int("transfers", len(ends)), zap.String("peer", string(peer)), zap.Error(err))
	}
}
