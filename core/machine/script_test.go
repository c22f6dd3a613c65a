package machine_test

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/rig/coretest"
)

// transportError wraps the error of package core that a text begins with, if there is one.
func transportError(text string) error {
	for _, known := range []error{core.ErrConnectionLost, core.ErrNotExpected, core.ErrMemory, core.ErrOtherWay} {
		if rest, ok := strings.CutPrefix(text, known.Error()); ok {
			return fmt.Errorf("%w%s", known, rest)
		}
	}
	return errors.New(text)
}

func (s *script) number(c *coretest.Command, key string, def uint64) uint64 {
	return s.parse(c, c.Value(key, fmt.Sprint(def)))
}

func (s *script) parse(c *coretest.Command, text string) uint64 {
	n, err := strconv.ParseUint(text, 10, 64)
	if err != nil {
		s.t.Fatalf("%s: %v", c.Pos, err)
	}
	return n
}

func (s *script) duration(c *coretest.Command, key string, def time.Duration) time.Duration {
	d, err := time.ParseDuration(c.Value(key, def.String()))
	if err != nil {
		s.t.Fatalf("%s: %v", c.Pos, err)
	}
	return d
}

// moment reads after=, from which on an offer or load counts.
func (s *script) moment(c *coretest.Command) core.Moment { return core.Moment(s.number(c, "after", 0)) }

// instant is a time since the script's begin, or zero.
func (s *script) instant(c *coretest.Command, key string) time.Time {
	if c.Value(key, "") == "" {
		return time.Time{}
	}
	return time.Unix(0, 0).Add(s.duration(c, key, 0))
}

func (s *script) stats(c *coretest.Command) core.TransferStats {
	return core.TransferStats{Bytes: s.number(c, "bytes", 0), Segments: 1}
}

func (s *script) code(c *coretest.Command) core.Code {
	return s.codeNamed(c, c.Value("code", "ok"))
}

// answer reads answer=; without it a code says whether P has refused.
func (s *script) answer(c *coretest.Command) core.LoadAnswer {
	def := core.LoadAccepted
	if s.code(c) != core.OK {
		def = core.LoadRefused
	}
	name := c.Value("answer", def.String())
	for a := core.LoadAccepted; a <= core.LoadAbsent; a++ {
		if a.String() == name {
			return a
		}
	}
	s.t.Fatalf("%s: no answer %q", c.Pos, name)
	return 0
}

func (s *script) codeNamed(c *coretest.Command, name string) core.Code {
	for code := range core.Code(100) {
		if code.String() == name {
			return code
		}
	}
	s.t.Fatalf("%s: no code %q", c.Pos, name)
	return 0
}

var statusNames = []string{"unknown", "early", "prefill", "offered", "sending", "sent", "ended", "restart"}

func (s *script) ids(c *coretest.Command, key string) (ids []core.TransferID) {
	for _, w := range strings.Fields(c.Value(key, "")) {
		ids = append(ids, partID(w))
	}
	return ids
}

// blocks reads "0 1 2 | 7 8": a list per group.
func (s *script) blocks(c *coretest.Command) (blocks [][]kv.BlockID) {
	text := c.Value("blocks", "")
	if text == "" {
		return nil
	}
	for _, group := range strings.Split(text, "|") {
		ids := []kv.BlockID{}
		for _, w := range strings.Fields(group) {
			n, err := strconv.ParseUint(w, 10, 32)
			if err != nil {
				s.t.Fatalf("%s: %v", c.Pos, err)
			}
			ids = append(ids, kv.BlockID(n))
		}
		blocks = append(blocks, ids)
	}
	return blocks
}

// found reads parts=["at from k/n@source | ..."], in which "-" is no address, with
// peers=, opened= and of=, which has a list of regions for each.
func (s *script) found(c *coretest.Command) (list []core.FoundPart) {
	peers, opened, of := strings.Fields(c.Value("peers", "")), strings.Fields(c.Value("opened", "")), strings.Split(c.Value("of", ""), "|")
	for i, part := range strings.Split(c.Value("parts", ""), "|") {
		words := strings.Fields(part)
		f := core.FoundPart{From: core.Target{Bootstrap: strings.TrimPrefix(words[0], "-"), EngineID: words[1]}, Peer: core.AgentID(peers[i])}
		if _, err := fmt.Sscanf(words[2], "%d/%d@%d", &f.Share.K, &f.Share.Of, &f.Share.Source); err != nil {
			s.t.Fatalf("%s: %v", c.Pos, err)
		}
		if len(opened) > i {
			d, err := time.ParseDuration(opened[i])
			if err != nil {
				s.t.Fatalf("%s: %v", c.Pos, err)
			}
			f.Opened = time.Unix(0, 0).Add(d)
		}
		if i < len(of) {
			f.Regions = numbers(s, c, strings.Fields(of[i]))
		}
		list = append(list, f)
	}
	return list
}

func numbers(s *script, c *coretest.Command, words []string) (out []uint32) {
	for _, w := range words {
		out = append(out, uint32(s.parse(c, w)))
	}
	return out
}

// match is of this machine's caches with those of a peer, whose blocks have size=
// tokens.
func (s *script) match(c *coretest.Command) *kv.Match {
	d := s.layout(c, s.list(c, "size"))
	if c.Value("regions", "") == "" && c.Value("size", "") == "" {
		return nil // alike
	}
	m, err := kv.NewMatch(s.layouts[c.Word(0)].Shapes(), d.Shapes())
	if err != nil {
		s.t.Fatalf("%s: %v", c.Pos, err)
	}
	return m
}

func (s *script) first(c *coretest.Command) []uint32 { return s.list(c, "first") }

func (s *script) list(c *coretest.Command, key string) (first []uint32) {
	for _, w := range strings.Fields(c.Value(key, "")) {
		n, err := strconv.ParseUint(w, 10, 32)
		if err != nil {
			s.t.Fatalf("%s: %v", c.Pos, err)
		}
		first = append(first, uint32(n))
	}
	return first
}

func tokens(n []uint32) string {
	if n == nil {
		return ""
	}
	return fmt.Sprintf(" tokens=%v", n)
}

func of(regions []uint32) string {
	if regions == nil {
		return ""
	}
	return fmt.Sprintf(" of=%v", regions)
}

func prompt(fingerprint uint64) string {
	if fingerprint == 0 {
		return ""
	}
	return fmt.Sprintf(" prompt=%d", fingerprint)
}

func describe(a core.Action) string {
	why := func(s string) string {
		if s == "" {
			return ""
		}
		return " (" + s + ")"
	}
	switch v := a.(type) {
	case core.Refuse:
		return fmt.Sprintf("error: %v%s", v.Err, sentinel(v.Err))
	case core.AnswerLoad:
		return strings.TrimSpace("answer " + v.Code.String() + " " + v.Reason)
	case core.AnswerRenew:
		said := "answer"
		for _, a := range v.Answers {
			said += " " + statusNames[a.Status]
			if a.Status >= core.StatusEnded {
				said += fmt.Sprintf("(%v %s)", a.Code, a.Reason)
			}
		}
		return said
	case core.Resolve:
		fresh := ""
		if v.Part {
			fresh = " part"
		}
		if v.Fresh {
			fresh += " fresh"
		}
		return fmt.Sprintf("resolve %s seq=%d from=%s%s%s", v.ID, v.Seq, v.From.Bootstrap, v.From.EngineID, fresh)
	case core.Expect:
		return fmt.Sprintf("expect %s peer=%s blocks=%v%s", v.ID, v.Peer, v.Blocks, tokens(v.Tokens)+of(v.Regions))
	case core.SendLoad:
		return fmt.Sprintf("send-load %s seq=%d to=%s grant=%s first=%v blocks=%v%s lease=%v", v.ID, v.Seq, v.Peer, v.Grant, v.First, v.Blocks, tokens(v.Tokens)+of(v.Regions)+prompt(v.Prompt), v.Lease)
	case core.SendRenew:
		if len(v.Claims) > 0 {
			return fmt.Sprintf("send-renew %v claims=%v to=%s", v.Loads, v.Claims, v.Peer)
		}
		return fmt.Sprintf("send-renew %v to=%s", v.Loads, v.Peer)
	case core.SendProbe:
		return fmt.Sprintf("send-probe %s", v.Peer)
	case core.SendFinish:
		return fmt.Sprintf("send-finish %s to=%s %v%s", v.ID, v.Peer, v.Code, why(v.Reason))
	case core.SendRestart:
		return fmt.Sprintf("send-restart %s to=%s digest=%s", v.ID, v.Peer, v.Digest)
	case core.Forget:
		if v.Gone {
			return fmt.Sprintf("forget %s gone", v.Peer)
		}
		return fmt.Sprintf("forget %s", v.Peer)
	case core.Revoke:
		return fmt.Sprintf("revoke %s", v.ID)
	case core.Write:
		verb, extent := "write", ""
		if v.Extends {
			verb = "extend"
		}
		if v.Begin != nil || v.End != nil {
			extent = fmt.Sprintf(" ready=%v..", v.Begin)
			if v.End != nil {
				extent += fmt.Sprint(v.End)
			}
		}
		return fmt.Sprintf("%s %s to=%s grant=%s src=%v dst=%v%s%s", verb, v.ID, v.Peer, v.Grant, v.Src.Blocks, v.Dst.Blocks, tokens(v.Dst.Tokens)+of(v.Dst.Regions), extent)
	case core.Await:
		return fmt.Sprintf("await %d", v.Moment)
	case core.Yield:
		return "yield"
	case core.StopWrite:
		return fmt.Sprintf("stop-write %s", v.ID)
	case core.Report:
		return fmt.Sprintf("report %v %s token=%d %v%s blocks=%d bytes=%d wait=%v state=%s", v.Side, v.ID, v.Token, v.Code, why(v.Reason), v.Blocks, v.Stats.Bytes, v.Wait, v.State)
	}
	return fmt.Sprintf("unknown action %T", a)
}
