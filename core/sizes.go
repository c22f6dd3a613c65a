package core

// Counters count what a machine has done since New, as far as its reports do not tell it.
type Counters struct {
	Offered      uint64 // accepted Offers
	Loaded       uint64 // accepted Loads
	Claimed      uint64 // accepted Claims
	ClaimsLost   uint64 // of them, those that were reported since they could not succeed any more
	ExpiredEarly uint64 // claims and loads whose request P's engine never named
	Retries      uint64 // loads and claims that were begun again, most with P looked up anew
	Partial      uint64 // writes that began before the engine had all of the blocks
	Withdrawn    uint64 // of them, those whose blocks the engine withdrew
}

// Sizes are the numbers of what a machine holds now, for statistics and tests. When
// nothing is under way only Ended is not 0, and it is bounded.
type Sizes struct {
	Loads   int // D's halves, claims among them
	Claims  int
	Kept    int // claims that P has answered and keeps
	Waiting int // loads that P has and whose bytes are awaited
	Peers   int // P agents that are renewed
	Offers  int // P's halves, early ones among them
	Early   int // claims and loads that P's engine has not named
	Probes  int // D agents that are asked whether they live
	FanIns  int // claims and loads of several parts
	FanOuts int // offers of several parts
	Moments int // moments that halves wait for
	Ended   int // transfers whose end is remembered, lost claims among them
}
