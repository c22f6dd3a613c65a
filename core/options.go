// A machine's waits and queues are bounded by its Options, whose defaults stand nowhere else.

package core

import (
	"errors"
	"time"
)

// Errors of a Refuse; they are wrapped with the value and the remedy.
var (
	ErrInvalid   = errors.New("invalid argument")
	ErrDuplicate = errors.New("already under way")
	ErrOverload  = errors.New("too many transfers")
	ErrClosed    = errors.New("agent is closed")
)

// TickInterval is how often a Machine must be told Tick while it is busy.
const TickInterval = 100 * time.Millisecond

// Defaults are the Options of an agent that sets none. These numbers stand nowhere else.
var Defaults = Options{Lease: 30 * time.Second, PeerTimeout: 3 * time.Second, EarlyLoad: 30 * time.Second, Claim: time.Hour, Load: time.Hour, Offer: time.Hour, MomentTimeout: time.Minute, MaxTransfers: 4096, Ends: 16}

// Options bound a Machine's waits and queues. Zero values get the Defaults.
type Options struct {
	Lease         time.Duration // P keeps an offer that nobody renews
	PeerTimeout   time.Duration // silence after which a peer counts as gone
	EarlyLoad     time.Duration // P keeps a claim or load of a request that its engine has not named
	Claim         time.Duration // D keeps a claim that no load follows
	Load          time.Duration // D waits for a load's bytes, whatever P says
	Offer         time.Duration // P keeps an offer, whatever D says
	MomentTimeout time.Duration // a moment that has not passed by then fails; so does a load that D's own memory holds up for so long
	MaxTransfers  int           // the most claims, the most loads, the most offers, and the most early claims and loads together
	Ends          int           // P: offers that a step ends before Yield, see pace.go
	ReportDemands bool          // P: Report when D has blocks for an announced transfer
	ReportClaims  bool          // D: Report a claim that cannot succeed any more

	// OnTransition hears of each row of a table that a half, a peer or a fan takes, for tests; may be nil.
	OnTransition func(Transition)
	// OnStep hears of each step, for tests; may be nil. Only builds with the tag "invariants" have it: without the tag
	// no event need be kept on the heap.
	OnStep func(now time.Time, e Event, actions []Action)
}

// WithDefaults returns the Options with the Defaults in place of the values that are not set.
func (o Options) WithDefaults() Options {
	def(&o.Lease, Defaults.Lease)
	def(&o.PeerTimeout, Defaults.PeerTimeout)
	def(&o.EarlyLoad, Defaults.EarlyLoad)
	def(&o.Claim, Defaults.Claim)
	def(&o.Load, Defaults.Load)
	def(&o.Offer, Defaults.Offer)
	def(&o.MomentTimeout, Defaults.MomentTimeout)
	def(&o.MaxTransfers, Defaults.MaxTransfers)
	def(&o.Ends, Defaults.Ends)
	return o
}

func def[T int | time.Duration](v *T, unset T) {
	if *v <= 0 {
		*v = unset
	}
}

// Transition is one row that a half or a peer has taken, of a table in core/half/doc.go, or a fan, of one in core/machine/doc.go.
type Transition struct {
	Half, From, Event, Guard, To string // From "-": the half begins; To "-": it has ended
	Actions                      string // all, and what the half tells who stands above; sorted
}
