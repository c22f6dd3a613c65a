package machine_test

import (
	"errors"
	"slices"
	"strings"
	"time"

	"github.com/kvconn/kvconn/core"
)

// collect takes the machine's actions, reports at once and the rest in order.
func (u *user) collect() {
	for _, a := range u.m.Actions() {
		u.ledger.action(a)
		switch v := a.(type) {
		case core.Report:
			u.known(v.Code)
			for id := range u.writing {
				if v.Side == core.SideOffer && whole(id) == v.ID {
					u.t.Errorf("offer %q is reported while its blocks are read: %+v", v.ID, v)
				}
			}
			continue
		case core.SendFinish:
			u.known(v.Code)
		case core.Write:
			u.checkWrite(v)
			u.writing[v.ID] = true
		}
		q := u.queueOf(a)
		*q = append(*q, a)
	}
	u.ledger.untold(u.m)
	// Loads of nothing have no bound here but the room for their reports.
	// While a step has left work over, early transfers may have twice their room.
	// Ends are remembered in three places with a limit each: the engine's, peers' words, lost claims.
	if s := u.m.Sizes(); s.Claims > maxFound*fuzzTransfers || s.Offers > 3*fuzzTransfers || s.Early > 2*fuzzTransfers || s.Ended > 3*fuzzTransfers || s.Peers > 2*fuzzTransfers || s.Probes > 2*fuzzTransfers {
		u.t.Errorf("over the limit of %d: %+v", fuzzTransfers, s)
	}
}

func (u *user) known(c core.Code) {
	if strings.HasPrefix(c.String(), "code-") {
		u.t.Errorf("%v leaves the machine", c)
	}
}

// checkWrite: whatever blocks D names, the machine reads only blocks that the engine has
// offered under this id, of the prompt that D asks for, and the plan stays within them.
func (u *user) checkWrite(w core.Write) {
	if after := u.holding[whole(w.ID)]; !u.passed[after] {
		u.t.Errorf("%q is read before moment %d", w.ID, after)
	}
	if u.writing[w.ID] {
		u.t.Errorf("%q is written twice at a time", w.ID)
	}
	for g, ids := range w.Src.Blocks {
		for _, id := range ids {
			if has := u.offered[whole(w.ID)]; g >= len(has) || !slices.Contains(has[g], id) {
				u.t.Errorf("block %d of group %d is read for %q, offered are %v", id, g, w.ID, has)
			}
		}
	}
	if p, d := u.prompts[whole(w.ID)], uint64(w.Grant[0]); p != d && p != 0 && d != 0 {
		u.t.Errorf("%q is of prompt %d, and is written for a load of prompt %d", w.ID, p, d)
	}
	if w.Match == nil {
		w.Match = u.match
	}
	pairs, err := w.Match.Pairs(w.Src, w.Dst)
	if err != nil {
		u.t.Errorf("no plan for %+v: %v", w, err)
	}
	for _, p := range pairs {
		if p.SrcOffset+p.Length > u.layout.Regions[p.SrcRegion].Extent() {
			u.t.Errorf("%+v is read outside of its region", p)
		}
	}
}

// queueOf is the queue of an action.
func (u *user) queueOf(a core.Action) *[]core.Action {
	if core.OfMemory(a) {
		return &u.memory
	}
	return &u.control
}

func (u *user) queued() int { return len(u.memory) + len(u.control) }

// perform does the oldest action of one of the queues.
func (u *user) perform() {
	if u.queued() == 0 {
		return
	}
	q := &u.memory
	if len(u.memory) == 0 || len(u.control) > 0 && u.byte()%2 == 0 {
		q = &u.control
	}
	a := (*q)[0]
	*q = (*q)[1:]
	switch v := a.(type) {
	case core.Expect:
		if after := u.free[whole(v.ID)]; !u.passed[after] {
			u.t.Errorf("%q is expected before moment %d", v.ID, after)
		}
		if u.byte()%4 == 1 {
			u.tell(core.Expecting{ID: v.ID, Err: errors.New("no place")})
			break
		}
		u.armed = append(u.armed, v.ID)
		u.tell(core.Expecting{ID: v.ID, Grant: []byte("grant")})
	case core.Revoke:
		u.armed = slices.DeleteFunc(u.armed, func(id core.TransferID) bool { return id == v.ID })
		u.tell(core.Revoked(v))
	case core.Yield:
		u.tell(core.Resume{})
	case core.SendFinish, core.SendRestart, core.Forget, core.StopWrite:
	default:
		u.asked = append(u.asked, a)
	}
	u.collect()
}

// answer brings the outcome of one of the actions that take their time.
func (u *user) answer() {
	if len(u.asked) == 0 {
		return
	}
	i := int(u.byte()) % len(u.asked)
	a := u.asked[i]
	u.asked = slices.Delete(u.asked, i, i+1)
	switch v := a.(type) {
	case core.Resolve:
		// The codes are node's own, and the registry's entries have legal ids.
		code := pick(u, []core.Code{core.OK, core.OK, core.Unreachable, core.Refused})
		peer := pick(u, []core.AgentID{"p", "q", "r"})
		opened := pick(u, []time.Time{{}, u.now, u.now.Add(-time.Second), u.now.Add(-time.Minute)})
		if !v.Part && code == core.OK && u.byte()%3 == 2 {
			u.tell(core.ResolvedParts{ID: v.ID, Seq: v.Seq, Found: u.found(opened)})
			break
		}
		u.tell(core.Resolved{ID: v.ID, Seq: v.Seq, Peer: peer, Opened: opened, Code: code, Reason: "as it is"})
	case core.SendLoad:
		answer := core.LoadAnswer(u.byte() % 4)
		code := core.OK
		if answer == core.LoadRefused {
			code = u.code()
		}
		u.tell(core.LoadAnswered{ID: v.ID, Seq: v.Seq, Answer: answer, Code: code, Reason: "as it is"})
	case core.SendRenew:
		u.tell(core.RenewReplied{Renewal: v, Answers: u.answers(len(v.Loads) + len(v.Claims)), Absent: u.byte()%4 == 3, Err: u.failure()})
	case core.SendProbe:
		b := u.byte()
		u.tell(core.ProbeReplied{Peer: v.Peer, Absent: b%4 == 3, Away: b%8 == 7, Err: u.failure()})
	case core.Write:
		delete(u.writing, v.ID)
		u.tell(core.Written{ID: v.ID, Stats: core.TransferStats{Bytes: 1}, Err: u.failure()})
	case core.Await:
		if err := u.failure(); err != nil {
			u.tell(core.MomentFailed{Moment: v.Moment, Err: err})
			break
		}
		u.passed[v.Moment] = true
		u.tell(core.MomentPassed(v))
	default:
		u.t.Fatalf("unknown action %T", a)
	}
	u.collect()
}

// end closes the machine and performs the actions that are left: nothing may remain.
func (u *user) end() {
	u.tell(core.Close{})
	u.collect()
	for range 10000 {
		switch {
		case u.queued() > 0:
			u.perform()
		case len(u.asked) > 0:
			u.answer()
		default:
			if left := u.m.Sizes(); left != (core.Sizes{Ended: left.Ended}) {
				u.t.Errorf("left after Close: %+v", left)
			}
			u.ledger.end()
			for _, fault := range u.ledger.broken {
				u.t.Error(fault)
			}
			if err := u.m.Try(u.now, core.LoadRequest{ID: "late", From: core.Target{EngineID: "e"}}); !errors.Is(err, core.ErrClosed) {
				u.t.Errorf("a load after Close: %v", err)
			}
			return
		}
	}
	u.t.Errorf("no end of actions: %d to perform, %d to answer", u.queued(), len(u.asked))
}
