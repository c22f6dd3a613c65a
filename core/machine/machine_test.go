package machine_test

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/core/machine"
	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/rig/coretest"
	"github.com/kvconn/kvconn/rig/leaktest"
)

// TestTranscripts runs testdata/*.txt. A line is the machine's name, an event and its
// values. The machine's actions are printed after it, one a line. "open" makes a machine,
// whose name is its agent id.
func TestTranscripts(t *testing.T) {
	leaktest.Check(t)
	coretest.RunTranscripts(t, "testdata/*.txt", newScript)
}

func newScript(t *testing.T) (func(*coretest.Command) string, func()) {
	s := &script{t: t, now: time.Unix(0, 0), machines: map[string]*scripted{}, layouts: map[string]*kv.Layout{}, table: readTransitions(t)}
	return s.run, s.end
}

type script struct {
	t        *testing.T
	now      time.Time
	machines map[string]*scripted
	layouts  map[string]*kv.Layout
	table    transitionTable
}

type scripted struct {
	*machine.Told
	ledger *ledger
	rows   []core.Transition // those that it has taken and that are still to be printed
}

func (s *script) end() {
	for _, name := range slices.Sorted(maps.Keys(s.machines)) {
		m := s.machines[name]
		m.ledger.end()
		for _, f := range m.ledger.broken {
			s.t.Errorf("%s: %s", name, f)
		}
		left := m.Sizes()
		left.Ended = 0
		if left != (core.Sizes{}) {
			s.t.Errorf("%s: left at the end: %+v", name, left)
		}
	}
	if transcript, of := strings.CutPrefix(s.t.Name(), "TestTranscripts/"); of { // those of seeds end otherwise than the seeds
		s.table.checkUntakenBy(s.t, transcript)
	}
}

func (s *script) run(c *coretest.Command) string {
	name, what := c.Word(0), c.Word(1)
	if at := s.duration(c, "now", -1); at >= 0 { // a machine's own clock, in runs of the simulator
		s.now = time.Unix(0, 0).Add(at)
	}
	if what == "open" {
		m := &scripted{ledger: newLedger()}
		m.Told = &machine.Told{Machine: s.open(c, m)}
		s.machines[name] = m
		return ""
	}
	m := s.machines[name]
	if m == nil {
		s.t.Fatalf("%s: no machine %q", c.Pos, name)
	}
	var out strings.Builder
	if said, ok := s.ask(m, what, s.id(c)); ok {
		out.WriteString(said + "\n")
	} else if what == "tick" || what == "sleep" {
		s.tick(m, c)
	} else if answer := m.ledger.tell(m.Told, s.now, s.event(what, c)); answer != nil {
		out.WriteString(describe(answer) + "\n")
	}
	for _, a := range m.Actions() {
		m.ledger.action(a)
		out.WriteString(describe(a) + "\n")
	}
	for _, r := range m.rows {
		out.WriteString(rowText(r) + "\n")
	}
	m.rows = nil
	if what == "withdraw" && m.Reading(s.id(c)) {
		out.WriteString("its blocks are being read\n")
	}
	m.ledger.untold(m.Told)
	return strings.ReplaceAll(out.String(), "\x00", "~")
}

// partID reads an id, in which ~ stands before the share of a part.
func partID(text string) core.TransferID {
	return core.TransferID(strings.ReplaceAll(text, "~", "\x00"))
}

func sentinel(err error) string {
	for name, target := range map[string]error{"ErrInvalid": core.ErrInvalid, "ErrDuplicate": core.ErrDuplicate, "ErrOverload": core.ErrOverload, "ErrClosed": core.ErrClosed} {
		if errors.Is(err, target) {
			return " [" + name + "]"
		}
	}
	return ""
}

// layout has groups= groups of 100 blocks, opaque ones or of size= tokens, which are
// a list, and regions= regions in each.
func (s *script) layout(c *coretest.Command, sizes []uint32) *kv.Layout {
	var regions []kv.Region
	for g := range s.number(c, "groups", max(1, uint64(len(sizes)))) {
		r := kv.Region{Name: "k", Group: uint32(g), Base: 1 << 20 * (1 + g), BlockStride: 1024, BlockBytes: 1024, NumBlocks: 100}
		if sizes != nil {
			r.Tokens, r.Heads, r.TokenStride, r.HeadStride, r.BlockBytes = sizes[g], 1, 4, 4, 4*uint64(sizes[g])
		}
		for range s.number(c, "regions", 1) {
			regions = append(regions, r)
			r.Name, r.Base = r.Name+"k", r.Base+1<<24
		}
	}
	l, err := kv.NewLayout(regions)
	if err != nil {
		s.t.Fatal(err)
	}
	return l
}

func (s *script) open(c *coretest.Command, m *scripted) *machine.Machine {
	l := s.layout(c, s.list(c, "size"))
	s.layouts[c.Word(0)] = l
	rows := c.Value("rows", "") // "yes": those of halves and fans are printed; "peers": those of peers
	return machine.New(l, core.Options{Lease: s.duration(c, "lease", 0), PeerTimeout: s.duration(c, "timeout", 0),
		EarlyLoad: s.duration(c, "early", 0), Claim: s.duration(c, "claim", 0), Load: s.duration(c, "load", 0), Offer: s.duration(c, "offer", 0), MomentTimeout: s.duration(c, "moment", 0), MaxTransfers: int(s.number(c, "max", 0)), Ends: int(s.number(c, "at-once", 0)), ReportClaims: c.Value("report", "") == "claims", OnTransition: func(change core.Transition) {
			s.table.check(s.t, change)
			if rows == "yes" && !isPeer(change.Half) || rows == "peers" && isPeer(change.Half) {
				m.rows = append(m.rows, change)
			}
		}})
}

// ask answers a question, which is no event; ok says that it is one.
func (s *script) ask(m *scripted, what string, id core.TransferID) (said string, ok bool) {
	switch what {
	case "reading":
		return fmt.Sprint(m.Reading(id)), true
	case "in-use":
		inUse := m.InUse()
		slices.Sort(inUse)
		return fmt.Sprint(slices.Compact(inUse)), true
	case "state":
		if id != "" {
			return fmt.Sprintf("load %s, offer %s", m.StateOf(core.SideLoad, id), m.StateOf(core.SideOffer, id)), true
		}
		n := m.Sizes()
		return fmt.Sprintf("loads=%d offers=%d early=%d peers=%d ended=%d busy=%v", n.Loads, n.Offers, n.Early, n.Peers, n.Ended, m.Busy()), true
	}
	return "", false
}

// tick lets time pass: with "tick" the machine is told each TickInterval, with "sleep" once at the end, since the
// process does not run for as long.
func (s *script) tick(m *scripted, c *coretest.Command) {
	if c.Word(2) == "" { // once, at now=
		m.Tell(s.now, core.Tick{})
		return
	}
	d, err := time.ParseDuration(c.Word(2))
	if err != nil {
		s.t.Fatalf("%s: %v", c.Pos, err)
	}
	every := core.TickInterval
	if c.Word(1) == "sleep" {
		every = d
	}
	for end := s.now.Add(d); s.now.Before(end); {
		s.now = s.now.Add(min(end.Sub(s.now), every))
		m.Tell(s.now, core.Tick{})
	}
}

// id is the transfer of a command, times= times as long.
func (s *script) id(c *coretest.Command) core.TransferID {
	if n := s.number(c, "times", 1); n != 1 {
		return core.TransferID(strings.Repeat(c.Word(2), int(n)))
	}
	return partID(c.Word(2))
}

// event reads the event of a command.
func (s *script) event(what string, c *coretest.Command) core.Event {
	id, peer, why := s.id(c), core.AgentID(c.Value("peer", "")), c.Value("why", "")
	account := core.Account(c.Value("account", string(peer)))
	absent := c.Value("absent", "") == "yes"
	var failure error
	if text := c.Value("err", ""); text != "" {
		failure = transportError(text)
	}
	switch what {
	case "load":
		return core.LoadRequest{ID: id, Selection: kv.Selection{Blocks: s.blocks(c), First: s.first(c), Tokens: s.list(c, "tokens")}, Token: s.number(c, "token", 1), Prompt: s.number(c, "prompt", 0), After: s.moment(c), From: core.Target{Bootstrap: c.Value("at", ""), EngineID: c.Value("from", "")}}
	case "offer":
		return core.OfferRequest{ID: id, Selection: kv.Selection{First: s.first(c), Blocks: s.blocks(c)}, Token: s.number(c, "token", 1), Prompt: s.number(c, "prompt", 0), After: s.moment(c)}
	case "announce":
		return core.Announce{ID: id}
	case "partial":
		return core.PartialOffer{ID: id, First: s.first(c), Blocks: s.blocks(c), Ready: s.list(c, "ready"), Regions: numbers(s, c, strings.Fields(c.Value("in", ""))), Prompt: s.number(c, "prompt", 0), After: s.moment(c)}
	case "passed":
		return core.MomentPassed{Moment: core.Moment(s.parse(c, c.Word(2)))}
	case "failed":
		return core.MomentFailed{Moment: core.Moment(s.parse(c, c.Word(2))), Err: failure}
	case "withdraw":
		return core.Withdraw{ID: id}
	case "cancel":
		return core.Cancel{ID: id, Reason: why}
	case "remapped":
		return core.Remapped{ID: id, Reason: why}
	case "resolved":
		return core.Resolved{ID: id, Seq: s.number(c, "seq", 1), Peer: peer, Opened: s.instant(c, "opened"), Code: s.code(c), Reason: why}
	case "found":
		return core.ResolvedParts{ID: id, Seq: s.number(c, "seq", 1), Found: s.found(c)}
	case "expecting":
		return core.Expecting{ID: id, Grant: []byte(c.Value("grant", "")), Err: failure}
	case "answered":
		return core.LoadAnswered{ID: id, Seq: s.number(c, "seq", 1), Answer: s.answer(c), Code: s.code(c), Reason: why}
	case "restart":
		return core.RestartMessage{From: peer, ID: id, Digest: c.Value("digest", "")}
	case "received":
		return core.Received{ID: id, Stats: s.stats(c), Err: failure}
	case "revoked":
		return core.Revoked{ID: id}
	case "written":
		return core.Written{ID: id, Stats: s.stats(c), Err: failure}
	case "finish":
		return core.FinishMessage{From: peer, Account: account, ID: id, Code: s.code(c), Reason: why}
	case "loaded":
		return core.LoadMessage{ID: id, Peer: peer, Account: account, Grant: []byte(c.Value("grant", "")), Match: s.match(c), Selection: kv.Selection{First: s.first(c), Blocks: s.blocks(c), Tokens: s.list(c, "tokens"), Regions: numbers(s, c, strings.Fields(c.Value("of", "")))}, Prompt: s.number(c, "prompt", 0), Lease: s.duration(c, "lease", 30*time.Second)}
	case "renew":
		return core.RenewMessage{From: peer, Account: account, Loads: s.ids(c, "ids"), Claims: s.ids(c, "claims")}
	case "renewed":
		var answers []core.Answer
		for _, w := range strings.Fields(c.Value("says", "")) {
			a := core.Answer{Status: core.Status(slices.Index(statusNames, w))}
			if a.Status >= core.StatusEnded {
				a.Code, a.Reason = s.code(c), why
			}
			answers = append(answers, a)
		}
		for _, end := range strings.Split(c.Value("ends", ""), " | ") { // an index, its code and reason
			if f := strings.SplitN(end, " ", 3); len(f) == 3 {
				a := &answers[s.parse(c, f[0])]
				a.Code, a.Reason = s.codeNamed(c, f[1]), f[2]
			}
		}
		return core.RenewReplied{Renewal: core.SendRenew{Peer: peer, Loads: s.ids(c, "ids"), Claims: s.ids(c, "claims"), More: c.Value("more", "") == "yes"}, Answers: answers, Absent: absent, Err: failure}
	case "claim":
		return core.ClaimRequest{ID: id, From: core.Target{Bootstrap: c.Value("at", ""), EngineID: c.Value("from", "")}, Token: s.number(c, "token", 0)}
	case "probed":
		return core.ProbeReplied{Peer: peer, Absent: absent, Away: c.Value("away", "") == "yes", Err: failure}
	case "down":
		return core.PeerDown{Peer: peer}
	case "resume":
		return core.Resume{}
	case "close":
		return core.Close{}
	case "abandon":
		return core.Abandon{}
	}
	s.t.Fatalf("%s: unknown event %q", c.Pos, what)
	return nil
}
