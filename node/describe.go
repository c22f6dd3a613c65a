// An agent describes itself to its peers, and judges by their descriptions whether the two can exchange blocks.

package node

import (
	"cmp"
	"errors"
	"fmt"
	"strings"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/local"
	"github.com/kvconn/kvconn/wire"
)

// describe makes this agent's registry entry, which is also its hello.
func describe(c *Config, id core.AgentID, l *kv.Layout, endpoints []wire.Endpoint, lacks []wire.Lack) *wire.Agent {
	d := &wire.Agent{
		Version: wire.Version, ID: string(id), EngineID: c.EngineID,
		DPRank: c.DPRank, TPRank: c.TPRank, PPRank: c.PPRank, TPSize: c.TPSize, PPSize: c.PPSize, DPSize: c.DPSize, Joined: c.BootstrapJoin != "",
		Model: c.Model, Fingerprint: c.Fingerprint, DType: c.DType, BlockTokens: c.BlockTokens, MustMatch: c.facts(),
		Endpoints: endpoints, Lacks: lacks, RouteInfo: c.RouteInfo, Host: local.Host(),
	}
	describeShapes(d, l.Shapes())
	return d
}

// compatible matches the caches of two agents, or says why they cannot exchange
// blocks, with both values. m is what is known of how their regions fit; nil: nothing.
func compatible(p, d *wire.Agent, m *kv.Match) (*kv.Match, error) {
	switch {
	case p.Version != d.Version:
		return nil, fmt.Errorf("wire version %d at the prefill engine, %d at the decode engine: run the same kvconn on both", p.Version, d.Version)
	case p.DType != "" && d.DType != "" && p.DType != d.DType:
		return nil, fmt.Errorf("dtype %q at the prefill engine, %q at the decode engine: start both with the same", p.DType, d.DType)
	}
	if err := cmp.Or(sameModel(p, d), sameFacts(p, d)); err != nil {
		return nil, err
	}
	if err := errors.Join(ranksOf(p).Check(rankOf(p)), ranksOf(d).Check(rankOf(d))); err != nil {
		return nil, err
	}
	var err error
	if m == nil {
		m, err = kv.NewMatch(shapes(p), shapes(d))
	}
	if err == nil && ranksOf(p) == kv.One && ranksOf(d) == kv.One {
		err = m.Whole() // with more ranks D looks whether all ranks together have what it needs
	}
	if p.BlockTokens != 0 && d.BlockTokens != 0 && p.BlockTokens != d.BlockTokens {
		unequal := fmt.Sprintf("a block has %d tokens at the prefill engine, %d at the decode engine", p.BlockTokens, d.BlockTokens)
		switch {
		case err != nil: // first what an operator has set, then what follows from it
			err = fmt.Errorf("%s: %w", unequal, err)
		case m.Opaque():
			err = fmt.Errorf("%s: give both engines the same block size, or register the caches with their tokens and heads", unequal)
		}
	}
	if err != nil {
		return nil, err
	}
	return m, nil
}

func describeShapes(d *wire.Agent, shapes []kv.Shape) {
	for _, s := range shapes {
		d.Shapes = append(d.Shapes, wire.Shape{Name: s.Name, BlockStride: s.BlockStride, BlockBytes: s.BlockBytes, NumBlocks: s.NumBlocks, Group: s.Group,
			Tokens: s.Tokens, Heads: s.Heads, FirstHead: s.FirstHead, TotalHeads: s.TotalHeads, TokenStride: s.TokenStride, HeadStride: s.HeadStride, IndexKind: uint32(s.IndexKind)})
	}
}

// shapes is the reverse of describeShapes.
func shapes(a *wire.Agent) []kv.Shape {
	out := make([]kv.Shape, len(a.Shapes))
	for i, s := range a.Shapes {
		out[i] = kv.Shape{Name: s.Name, BlockStride: s.BlockStride, BlockBytes: s.BlockBytes, NumBlocks: s.NumBlocks, Group: s.Group,
			Tokens: s.Tokens, Heads: s.Heads, FirstHead: s.FirstHead, TotalHeads: s.TotalHeads, TokenStride: s.TokenStride, HeadStride: s.HeadStride, IndexKind: kv.IndexKind(s.IndexKind)}
	}
	return out
}

// ranksOf is how many ranks an agent's engine has.
func ranksOf(a *wire.Agent) kv.Ranks {
	return kv.Ranks{TP: max(a.TPSize, 1), PP: max(a.PPSize, 1)}
}

// dpSizeOf is how many dp ranks there are with it.
func dpSizeOf(a *wire.Agent) int { return max(a.DPSize, 1) }

func rankOf(a *wire.Agent) kv.Rank { return kv.Rank{TP: a.TPRank, PP: a.PPRank} }

func rankText(a *wire.Agent) string {
	return fmt.Sprintf("engine %q dp%d tp%d pp%d", a.EngineID, a.DPRank, a.TPRank, a.PPRank)
}

// refusedError: the peer was found, but one of the two agents refuses the other.
type refusedError struct{ reason string }

func (e *refusedError) Error() string { return e.reason }

// refuse answers a request that this agent does not carry out.
func refuse(format string, args ...any) *wire.Reply {
	return &wire.Reply{Code: int(core.Refused), Reason: fmt.Sprintf(format, args...)}
}

// maxReason is how many bytes of a reason are carried.
const maxReason = 256

// shorten cuts a reason to maxReason, between characters.
func shorten(s string) string {
	if len(s) <= maxReason {
		return s
	}
	return strings.ToValidUTF8(s[:maxReason], "")
}
