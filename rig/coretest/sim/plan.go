// What the world of a seed is like is drawn here.

package sim

import (
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/kv"
)

// plan is what a seed's world is like.
type plan struct {
	kind     bool // nothing is lost, late, cancelled or broken: all must end well
	calm     bool // only the engines are awkward: each end must have its reason
	opt      core.Options
	cluster  bool // agents are clients of servers that they do not share: that nobody listens is no proof
	ranks    int  // how transfers lie between engines of several ranks
	latent   bool // the first prefill rank of a deal has all that its decode ranks need
	oneSided bool // bytes land without the receiver's process, as by RDMA
	pulls    bool // the receiver copies out of the sender's memory
	proves   bool // and finds at a validity page, behind each copy, that the sender had the blocks
	prefills int  // ranks of the prefill engine
	decodes  []int
	devices  bool // the engines work on devices: moments are awaited
	requests int
	blocks   int  // of a prompt, at each prefill rank
	cut      bool // ranks have blocks of tokens and heads, each as it likes
	tokens   int  // of a prompt, then
	// blockTokens of the prefill engine and of each decode engine.
	blockTokens []int
	pool        int  // blocks of a rank
	stages      bool // each prefill rank has some of the layers
	// decodeStages: each rank of a decode engine has some of the layers, and perhaps a prefill rank has none of them.
	decodeStages bool
	index        kv.IndexKind // what ids name
	begin        int          // position of the first block that prefill has of a prompt
	mismatched   int          // the decode engine, from 1 on, whose ids name something else
	other        kv.IndexKind // there
	perPeer      int          // requests to one peer at a time, as in node

	loss, double, slow float64 // of each message
	hang               float64 // of each renewal that gets no answer: for long not even its time-out is told
	killed             float64 // of each load: its P dies
	mute               float64 // of each news of an end: every try to tell it is lost
	breaks             float64 // of each frame: its connection breaks
	errors             float64 // of each call of the transport: it fails
	cancels            float64
	lost               float64 // of each moment: it fails, or does not pass for long
	faults             int
	sleeps             int     // of engines: other memory lies at the addresses of their blocks
	elsewhere          float64 // of each write: its way is not there just now
	hostile            bool    // a peer says what it likes
	drips              float64 // of each write: after its first frame P sends no more, and says that it does
	hoards             bool    // the hostile peer claims an offer of its own, and renews that for ever
	slowCopies         float64 // of each last copy of D's, and of a few others: it takes longer than P waits for it
	jumps              int     // of clocks, in worlds where else nothing is in the way
	silentDeath        bool    // nothing happens but the death of one of two decode ranks, whose shares are claimed
}

// How a transfer lies between engines of several ranks.
const (
	shares     = iota // one prefill rank has several decode ranks, or the reverse
	pairs             // each decode rank has a transfer of its own
	allWithAll        // each decode rank has a part from each prefill rank
	byHeads           // each rank of either engine has its heads
)

// Bounds that node and the transports have by configuration.
const (
	connectTimeout = time.Second
	stallTimeout   = 1200 * time.Millisecond
	closeTimeout   = 2 * time.Second
	goodbye        = time.Second     // what Close keeps of it
	act            = 5 * time.Second // requests and faults begin within
)

func (w *world) newPlan() plan {
	p := plan{
		oneSided: w.chance(0.4),
		cluster:  w.chance(0.3),
		ranks:    w.rnd.IntN(4) % 3,
		latent:   w.chance(0.25),
		prefills: 1 + w.rnd.IntN(regions),
		requests: 4 + w.rnd.IntN(8),
		blocks:   4,
		pool:     14,
		perPeer:  []int{1, 2, 16}[w.rnd.IntN(3)],
		opt: core.Options{
			Lease:        []time.Duration{2, 3, 5}[w.rnd.IntN(3)] * time.Second,
			PeerTimeout:  []time.Duration{900, 1500}[w.rnd.IntN(2)] * time.Millisecond,
			EarlyLoad:    2 * time.Second,
			Claim:        10 * time.Second,
			MaxTransfers: []int{4, 16, 64}[w.rnd.IntN(3)],
			Ends:         []int{1, 2, 16}[w.seed/3%3],
		},
	}
	p.opt.ReportClaims = w.seed%7 < 4 // whatever else the seed brings
	p.decodes = []int{1 + w.rnd.IntN(3)}
	if w.chance(0.5) {
		p.decodes = append(p.decodes, 1+w.rnd.IntN(2))
	}
	if w.seed%20 < 3 {
		p.jumps = w.rnd.IntN(4)
	}
	if p.cut = w.chance(0.5); p.cut {
		if w.chance(0.4) {
			p.ranks = byHeads
		}
		for range 1 + len(p.decodes) {
			p.blockTokens = append(p.blockTokens, 1<<w.rnd.IntN(3))
		}
		p.blocks = 5/p.blockTokens[0] + w.rnd.IntN(2)
		p.tokens = p.blocks*p.blockTokens[0] - w.rnd.IntN(p.blockTokens[0])
	}
	w.chooseIndex(&p)
	switch w.seed % 10 {
	case 0:
		p.kind, p.opt.MaxTransfers, p.opt.Claim = true, 64, time.Minute
		p.pool, p.requests = 100, min(p.requests, 8) // enough at once, else engines could wait for each other
	case 1, 2:
		p.calm, p.cancels, p.opt.MaxTransfers, p.opt.Claim = true, 0.3, 64, time.Minute
	case 3, 4, 5:
		p.loss, p.double, p.slow = 0.05, 0.05, 0.1
		p.mute, p.breaks, p.errors, p.cancels, p.faults = 0.1, 0.01, 0.01, 0.1, 1+w.rnd.IntN(5)
	case 6, 7:
		p.loss, p.double, p.slow = 0.2, 0.2, 0.2
		p.mute, p.breaks, p.errors, p.cancels, p.faults = 0.2, 0.04, 0.03, 0.15, w.rnd.IntN(4)
	default: // the net is good, but whole processes and ways go
		p.hang, p.killed, p.mute, p.cancels, p.faults = 0.3, 0.06, 0.05, 0.05, 2+w.rnd.IntN(5)
		if p.silentDeath = w.seed%40 == 9; p.silentDeath {
			p.hang, p.killed, p.mute, p.cancels, p.faults = 0, 0, 0, 0, 0
			p.ranks, p.prefills, p.decodes[0] = shares, 1, 2
		}
	}
	p.stages = p.ranks == allWithAll && p.prefills > 1 && !p.latent && w.chance(0.6)
	p.decodeStages = p.ranks == allWithAll && !p.latent && w.seed%5 < 2
	if !p.kind && !p.calm && !p.silentDeath && !p.cut && w.chance(0.3) {
		p.mismatched, p.other = 1+w.rnd.IntN(len(p.decodes)), otherThan(p.index)
	}
	if p.hostile = w.seed%3 == 1; p.hostile && !p.kind && !p.calm && !p.silentDeath {
		if w.seed/3%4 != 2 {
			p.drips, p.opt.Load = 0.05, 25*time.Second
		} else { // else P's own bound would end what drips
			p.hoards, p.opt.Offer = true, 25*time.Second
		}
	}
	if !p.kind && !p.calm && !p.silentDeath && w.seed%4 == 1 {
		p.sleeps, p.elsewhere = 2, []float64{0.3, 1}[w.seed/4%2]
	}
	if p.devices = w.seed%3 == 2; p.devices {
		p.opt.MomentTimeout = 10 * time.Second
		if !p.kind && !p.calm {
			p.opt.MomentTimeout, p.lost = latest+reach, 0.02
		}
		if p.kind { // several looks, each of which may take two leases, hold no load up for too long
			p.opt.MomentTimeout = time.Minute
		}
	}
	p.pulls = !p.oneSided && w.pulling.Float64() < 0.5
	p.proves = w.seed/2%2 == 1
	if p.pulls && !p.kind && !p.calm && !p.silentDeath && w.pulling.Float64() < 0.7 {
		p.slowCopies, p.mute = 0.3, 0.8 // and D hears late why P has stopped
	}
	return p
}

// absence is for how long nobody must have listened as a D before P believes that the D is
// gone.
func (p *plan) absence() time.Duration {
	if p.cluster {
		return p.opt.PeerTimeout - 2*core.TickInterval
	}
	return p.opt.PeerTimeout / 3
}

// quiet is how long after the last call of an engine and the last fault all must
// have ended: leases, then the time-outs of what they make the agents say.
func (p *plan) quiet() time.Duration {
	return p.opt.Load + p.opt.Offer + p.opt.Claim + p.opt.Lease + max(p.opt.Lease, p.opt.EarlyLoad) + p.opt.MomentTimeout + 4*p.opt.PeerTimeout + 2*connectTimeout + 2*stallTimeout + closeTimeout + 8*time.Second
}
