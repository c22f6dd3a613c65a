package half

// Guard names the case that the code takes where a state and an event do not decide alone: a column of the tables in doc.go.
type Guard uint8

const (
	Always          Guard = iota // the state and the event decide
	whenFound                    // P's agent is found
	whenNotFound                 // no agent is found
	whenRefused                  // the look-up says that no agent will do
	whenReplaced                 // the agent that is found cannot know the request
	whenResolving                // the half, or the claim that the load continues, was resolving
	whenRelocating               // the half, or the claim that the load continues, was relocating
	whenKept                     // P says that it keeps the transfer
	whenOver                     // P says that the transfer has ended
	whenFailed                   // P says that its half has failed
	whenSilent                   // P may live, and does not answer
	whenAbsent                   // nobody listens as P's agent
	whenRetried                  // the engine does not want to hear of lost claims, so D looks P up again
	whenDue                      // it is time to look P up again
	whenNoSuccessor              // no agent was found in P's place in time
	whenExpired                  // no load has followed in time
	whenTold                     // likewise, and the engine wants to hear of it
	whenSame                     // the load is from the claim's engine
	WhenOther                    // the load is from another engine than the claim
	whenFresh                    // there is no claim of it, or one with another engine
	whenVoid                     // its claim is void
	whenEmpty                    // it has no blocks
	whenMoment                   // its moment has not passed
	whenReady                    // its blocks may be written
	whenOutdated                 // the transport failed with an agent that may be out of date
	whenBroken                   // the transport failed
	whenArmed                    // the transport expects it
	whenAccepted                 // P has taken the load
	whenAbsentAgain              // nobody listens, and P had answered or was looked up once more
	whenHello                    // P wants to be met anew
	whenHelloAgain               // likewise, and P was looked up once more
	whenUnanswered               // P has not answered the load
	whenRestart                  // P has taken its blocks back
	whenWhole                    // all bytes are here
	whenUnnamed                  // P's engine has not named the transfer in time
	whenUnknown                  // P does not know the transfer any more
	whenMissing                  // P has sent it, and bytes are missing
	whenLate                     // it has taken too long
	whenHeld                     // this agent's own memory has held it up for too long
	whenFirst                    // P is gone, and was looked up but once
)

func (g Guard) String() string {
	return [...]string{"-", "found", "not-found", "refused", "replaced", "resolving", "relocating", "kept", "over", "failed", "silent", "absent", "retried",
		"due", "no-successor", "expired", "told", "same", "other",
		"fresh", "void", "empty", "moment", "ready", "outdated", "broken", "armed", "accepted", "absent-again", "hello", "hello-again", "unanswered", "restart", "whole", "unnamed", "unknown", "missing", "late", "held", "first"}[g]
}
