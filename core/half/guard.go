package half

// Guard names the case that the code takes where a state and an event do not decide alone: a column of the tables in doc.go.
type Guard uint8

const (
	Always Guard = iota // the state and the event decide

	// Claims, pending finishes, loads: P is looked up.
	whenFound       // P's agent is found
	whenNotFound    // no agent is found; it may come up yet
	whenUnusable    // the engine is found, and no agent of it will do
	whenUnresolved  // the look-up gives no agent, for either reason
	whenReplaced    // the agent that is found cannot know the request
	whenResolving   // the half, or the claim that the load continues, was resolving
	whenRelocating  // the half, or the claim that the load continues, was relocating
	whenDue         // it is time to look P up again; of peers: to ask again
	whenNoSuccessor // no agent was found in P's place in time

	// Claims, loads, offers: what the peer says, or does not say.
	whenKept   // P says that it keeps the transfer
	whenOver   // the peer says that the transfer has ended
	whenFailed // P says that its half has failed
	whenSilent // P may live, and does not answer
	whenAbsent // nobody listens as the peer

	// Claims.
	whenRetried // the engine does not want to hear of lost claims, so D looks P up again
	whenExpired // no load has followed in time
	whenTold    // likewise, and the engine wants to hear of it
	whenSame    // the load is from the claim's engine
	WhenOther   // the load is from another engine than the claim

	// Loads.
	whenFresh       // there is no claim of it, or one with another engine
	whenVoid        // its claim is void
	whenEmpty       // it has no blocks; of peers: what was to be renewed has ended
	whenOutdated    // the transport failed with an agent that may be out of date
	whenArmed       // the transport expects it
	whenAccepted    // P has taken the load
	whenRefused     // P refuses the load
	whenAbsentAgain // nobody listens, and P had answered or was looked up once more
	whenHello       // P wants to be met anew
	whenHelloAgain  // likewise, and P was looked up once more
	whenUnanswered  // the peer has not answered the load, or the probe
	whenUnnamed     // P's engine has not named the transfer in time
	whenUnknown     // P does not know the transfer any more
	whenMissing     // P has sent it, and bytes are missing
	whenLate        // it has taken too long; of peers: they are asked no more
	whenHeld        // this agent's own memory has held it up for too long
	whenFirst       // P is gone, and was looked up but once

	// Loads, offers.
	whenMoment  // its moment has not passed
	whenReady   // all its blocks may be written, or read
	whenWhole   // D has all bytes
	whenRestart // P has taken its blocks back
	whenBroken  // the transport failed

	// Offers.
	whenNew         // no offer of it has come; of peers: P has not heard of a claim
	whenGrowing     // the engine has not offered all of it
	whenGrown       // further blocks may be read, and they fit the load
	whenFits        // all blocks may be read, and they fit the load
	whenMisfits     // the blocks, or the prompt, do not fit the load
	whenDivided     // its shares go on in its place
	whenOtherWay    // D is to load it by another transport
	whenNotExpected // D's transport does not expect it
	whenForgotten   // it gives way, and counts as if it had not come
	whenWanted      // a D claims or loads it
	whenUnwanted    // no D claims or loads it

	// The agents at the other ends.
	whenUnneeded // no half is with the agent any more
	whenMore     // further parts of the answer to a renewal follow
	whenLast     // the answer to a renewal has come, its last part too, or the renewal has failed
	whenAnswered // the agent lives
	whenGone     // nobody has listened as the agent for too long
)

func (g Guard) String() string {
	return [...]string{
		Always: "-", whenFound: "found", whenNotFound: "not-found", whenUnusable: "unusable", whenUnresolved: "unresolved", whenReplaced: "replaced",
		whenResolving: "resolving", whenRelocating: "relocating", whenDue: "due", whenNoSuccessor: "no-successor", whenKept: "kept", whenOver: "over",
		whenFailed: "failed", whenSilent: "silent", whenAbsent: "absent", whenRetried: "retried", whenExpired: "expired", whenTold: "told",
		whenSame: "same", WhenOther: "other", whenFresh: "fresh", whenVoid: "void", whenEmpty: "empty", whenOutdated: "outdated",
		whenArmed: "armed", whenAccepted: "accepted", whenRefused: "refused", whenAbsentAgain: "absent-again", whenHello: "hello", whenHelloAgain: "hello-again",
		whenUnanswered: "unanswered", whenUnnamed: "unnamed", whenUnknown: "unknown", whenMissing: "missing", whenLate: "late", whenHeld: "held",
		whenFirst: "first", whenMoment: "moment", whenReady: "ready", whenWhole: "whole", whenRestart: "restart", whenBroken: "broken",
		whenNew: "new", whenGrowing: "growing", whenGrown: "grown", whenFits: "fits", whenMisfits: "misfits", whenDivided: "divided",
		whenOtherWay: "other-way", whenNotExpected: "not-expected", whenForgotten: "forgotten", whenWanted: "wanted", whenUnwanted: "unwanted",
		whenUnneeded: "unneeded", whenMore: "more", whenLast: "last", whenAnswered: "answered", whenGone: "gone",
	}[g]
}
