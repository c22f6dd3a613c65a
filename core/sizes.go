// What statistics and tests learn of a machine beside its reports: what it has done, and what it holds.

package core

// Counters count those things that a machine has done since New and that its reports do not tell.
type Counters struct {
	Offered      uint64 // accepted Offers
	Loaded       uint64 // accepted Loads
	Claimed      uint64 // accepted Claims
	ClaimsLost   uint64 // of the accepted Claims, those that were reported since they could not succeed any more
	ExpiredEarly uint64 // claims and loads whose request P's engine never named
	Retries      uint64 // loads and claims that were begun again, most with P looked up anew
	Partial      uint64 // writes that began before the engine had all of the blocks
	Withdrawn    uint64 // of the Partial ones, those whose blocks the engine withdrew
}

// Sizes count what a machine holds now, for statistics and tests. When nothing is under
// way all but Ended are 0, and Ended is bounded.
type Sizes struct {
	Loads   int // D's halves, claims among them
	Claims  int
	Kept    int // claims that P has answered and keeps
	Waiting int // loads that P has and whose bytes are awaited
	Peers   int // P agents at which D renews transfers
	Offers  int // P's halves, early ones among them
	Early   int // claims and loads that P's engine has not named
	Probes  int // D agents that are asked whether they live
	FanIns  int // claims and loads of several parts
	FanOuts int // offers of several parts
	Moments int // moments that halves wait for
	Ended   int // transfers whose end is remembered, lost claims among them
}
