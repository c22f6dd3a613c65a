package core_test

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/core/coretest"
	"github.com/kvconn/kvconn/internal/leaktest"
)

// TestTranscripts runs testdata/*.txt. A line is the machine's name, an event and its
// values. The machine's actions are printed after it, one a line. "open" makes a machine,
// whose name is its agent id.
func TestTranscripts(t *testing.T) {
	leaktest.Check(t)
	coretest.RunTranscripts(t, "testdata/*.txt", newScript)
}

func newScript(t *testing.T) (func(*coretest.Command) string, func()) {
	s := &script{t: t, now: time.Unix(0, 0), machines: map[string]*scripted{}, layouts: map[string]*core.Layout{}, table: readTransitions(t)}
	return s.run, s.end
}

type script struct {
	t        *testing.T
	now      time.Time
	machines map[string]*scripted
	layouts  map[string]*core.Layout
	table    transitionTable
}

type scripted struct {
	*core.Machine
	ledger *ledger
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
}

func (s *script) run(c *coretest.Command) string {
	name, what := c.Word(0), c.Word(1)
	if at := s.duration(c, "now", -1); at >= 0 { // a machine's own clock, in runs of the simulator
		s.now = time.Unix(0, 0).Add(at)
	}
	if what == "open" {
		s.machines[name] = &scripted{s.open(c), newLedger()}
		return ""
	}
	m := s.machines[name]
	if m == nil {
		s.t.Fatalf("%s: no machine %q", c.Pos, name)
	}
	said, err := s.event(m, what, c)
	var out strings.Builder
	if err != nil {
		fmt.Fprintf(&out, "error: %v%s\n", err, sentinel(err))
	}
	if said != "" {
		out.WriteString(said + "\n")
	}
	for _, a := range m.Actions() {
		m.ledger.action(a)
		out.WriteString(describe(a) + "\n")
	}
	m.ledger.untold(m.Machine)
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
func (s *script) layout(c *coretest.Command, sizes []uint32) *core.Layout {
	var regions []core.Region
	for g := range s.number(c, "groups", max(1, uint64(len(sizes)))) {
		r := core.Region{Name: "k", Group: uint32(g), Base: 1 << 20 * (1 + g), BlockStride: 1024, BlockBytes: 1024, NumBlocks: 100}
		if sizes != nil {
			r.Tokens, r.Heads, r.TokenStride, r.HeadStride, r.BlockBytes = sizes[g], 1, 4, 4, 4*uint64(sizes[g])
		}
		for range s.number(c, "regions", 1) {
			regions = append(regions, r)
			r.Name, r.Base = r.Name+"k", r.Base+1<<24
		}
	}
	l, err := core.NewLayout(regions)
	if err != nil {
		s.t.Fatal(err)
	}
	return l
}

func (s *script) open(c *coretest.Command) *core.Machine {
	l := s.layout(c, s.list(c, "size"))
	s.layouts[c.Word(0)] = l
	return core.New(l, core.Options{Lease: s.duration(c, "lease", 0), PeerTimeout: s.duration(c, "timeout", 0),
		EarlyLoad: s.duration(c, "early", 0), Claim: s.duration(c, "claim", 0), Load: s.duration(c, "load", 0), Offer: s.duration(c, "offer", 0), MomentTimeout: s.duration(c, "moment", 0), MaxTransfers: int(s.number(c, "max", 0)), ReportClaims: c.Value("report", "") == "claims", OnTransition: func(change core.Transition) { s.table.check(s.t, change) }})
}

func (s *script) event(m *scripted, what string, c *coretest.Command) (said string, err error) {
	id := partID(c.Word(2))
	if n := s.number(c, "times", 1); n != 1 {
		id = core.TransferID(strings.Repeat(string(id), int(n)))
	}
	peer := core.AgentID(c.Value("peer", ""))
	absent := c.Value("absent", "") == "yes"
	var failure error
	if text := c.Value("err", ""); text != "" {
		failure = transportError(text)
	}
	switch what {
	case "load":
		r := core.LoadRequest{ID: id, Selection: core.Selection{Blocks: s.blocks(c), First: s.first(c), Tokens: s.list(c, "tokens")}, Token: s.number(c, "token", 1), Prompt: s.number(c, "prompt", 0), After: s.moment(c), From: core.Target{Bootstrap: c.Value("at", ""), EngineID: c.Value("from", "")}}
		if err = m.Load(s.now, r); err == nil {
			m.ledger.accepted(core.SideLoad, r.Token)
			delete(m.ledger.claims, r.ID)
		}
	case "offer":
		r := core.OfferRequest{ID: id, Selection: core.Selection{First: s.first(c), Blocks: s.blocks(c)}, Token: s.number(c, "token", 1), Prompt: s.number(c, "prompt", 0), After: s.moment(c)}
		if err = m.Offer(s.now, r); err == nil {
			m.ledger.accepted(core.SideOffer, r.Token)
		}
	case "announce":
		err = m.Announce(s.now, id)
	case "partial":
		err = m.OfferPartial(s.now, core.PartialOffer{ID: id, First: s.first(c), Blocks: s.blocks(c), Ready: s.list(c, "ready"), Regions: numbers(s, c, strings.Fields(c.Value("in", ""))), Prompt: s.number(c, "prompt", 0), After: s.moment(c)})
	case "passed":
		m.MomentPassed(s.now, core.Moment(s.parse(c, c.Word(2))))
	case "failed":
		m.MomentFailed(s.now, core.Moment(s.parse(c, c.Word(2))), failure)
	case "withdraw":
		if err = m.Withdraw(s.now, id); m.Reading(id) {
			said = "its blocks are being read"
		}
	case "reading":
		said = fmt.Sprint(m.Reading(id))
	case "given":
		given := m.Given()
		slices.Sort(given)
		said = fmt.Sprint(slices.Compact(given))
		if m.AnyGiven() != (len(given) > 0) {
			said += " and not"
		}
	case "cancel":
		if err = m.Cancel(s.now, id, c.Value("why", "")); err == nil {
			delete(m.ledger.claims, id)
		}
	case "remapped":
		m.Remapped(s.now, id, c.Value("why", ""))
	case "resolved":
		m.Resolved(s.now, id, s.number(c, "seq", 1), peer, s.instant(c, "opened"), s.code(c), c.Value("why", ""))
	case "found":
		m.ResolvedParts(s.now, id, s.number(c, "seq", 1), s.found(c))
	case "expecting":
		m.Expecting(s.now, id, []byte(c.Value("grant", "")), failure)
	case "answered":
		m.LoadAnswered(s.now, id, s.number(c, "seq", 1), s.answer(c), s.code(c), c.Value("why", ""))
	case "restart":
		m.RestartArrived(peer, id, c.Value("digest", ""))
	case "received":
		if failure == nil {
			m.ledger.disarmed(id)
		}
		m.Received(s.now, id, s.stats(c), failure)
	case "revoked":
		m.ledger.disarmed(id)
		m.Revoked(s.now, id)
	case "written":
		m.Written(s.now, id, s.stats(c), failure)
	case "finish":
		m.FinishArrived(s.now, peer, id, s.code(c), c.Value("why", ""))
	case "loaded":
		code, why := m.LoadArrived(s.now, core.LoadMessage{ID: id, Peer: peer, Grant: []byte(c.Value("grant", "")), Match: s.match(c), Selection: core.Selection{First: s.first(c), Blocks: s.blocks(c), Tokens: s.list(c, "tokens"), Regions: numbers(s, c, strings.Fields(c.Value("of", "")))}, Prompt: s.number(c, "prompt", 0), Lease: s.duration(c, "lease", 30*time.Second)})
		said = strings.TrimSpace("answer " + code.String() + " " + why)
	case "renew":
		said = "answer"
		for _, a := range m.RenewArrived(s.now, peer, s.ids(c, "ids"), s.ids(c, "claims")) {
			said += " " + statusNames[a.Status]
			if a.Status >= core.StatusEnded {
				said += fmt.Sprintf("(%v %s)", a.Code, a.Reason)
			}
		}
	case "renewed":
		var answers []core.Answer
		for _, w := range strings.Fields(c.Value("says", "")) {
			a := core.Answer{Status: core.Status(slices.Index(statusNames, w))}
			if a.Status >= core.StatusEnded {
				a.Code, a.Reason = s.code(c), c.Value("why", "")
			}
			answers = append(answers, a)
		}
		for _, end := range strings.Split(c.Value("ends", ""), " | ") { // an index, its code and reason
			if f := strings.SplitN(end, " ", 3); len(f) == 3 {
				a := &answers[s.parse(c, f[0])]
				a.Code, a.Reason = s.codeNamed(c, f[1]), f[2]
			}
		}
		m.RenewReplied(s.now, core.SendRenew{Peer: peer, Loads: s.ids(c, "ids"), Claims: s.ids(c, "claims"), More: c.Value("more", "") == "yes"}, answers, absent, failure)
	case "claim":
		r := core.ClaimRequest{ID: id, From: core.Target{Bootstrap: c.Value("at", ""), EngineID: c.Value("from", "")}, Token: s.number(c, "token", 0)}
		err = m.ledger.claim(m.Machine, s.now, r)
	case "probed":
		m.ProbeReplied(s.now, peer, absent, c.Value("away", "") == "yes", failure)
	case "down":
		m.PeerDown(s.now, peer)
	case "tick":
		if c.Word(2) == "" { // once, at now=
			m.Tick(s.now)
			break
		}
		d, err := time.ParseDuration(c.Word(2))
		if err != nil {
			s.t.Fatalf("%s: %v", c.Pos, err)
		}
		for end := s.now.Add(d); s.now.Before(end); {
			s.now = s.now.Add(min(end.Sub(s.now), core.TickInterval))
			m.Tick(s.now)
		}
	case "sleep": // the process does not run for as long
		d, err := time.ParseDuration(c.Word(2))
		if err != nil {
			s.t.Fatalf("%s: %v", c.Pos, err)
		}
		s.now = s.now.Add(d)
		m.Tick(s.now)
	case "close":
		m.Close(s.now)
		clear(m.ledger.claims)
	case "abandon":
		for id := range m.ledger.armed {
			m.ledger.disarmed(id) // its transports are closed
		}
		m.Abandon(s.now)
		clear(m.ledger.claims)
	case "state":
		n := m.Sizes()
		said = fmt.Sprintf("loads=%d offers=%d early=%d peers=%d ended=%d busy=%v", n.Loads, n.Offers, n.Early, n.Peers, n.Ended, m.Busy())
		if id != "" {
			said = fmt.Sprintf("load %s, offer %s", m.StateOf(core.SideLoad, id), m.StateOf(core.SideOffer, id))
		}
	default:
		s.t.Fatalf("%s: unknown event %q", c.Pos, what)
	}
	return said, err
}
