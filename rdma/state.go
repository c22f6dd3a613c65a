package rdma

import (
	"fmt"

	"github.com/kvconn/kvconn/internal/invariants"
)

// state is how far P has come with one D.
type state uint8

const (
	stateNew     state = iota + 1 // D was admitted; it has sent no hello, and told nothing
	stateProbing                  // D has told its ports and keys; no lane has carried a byte
	stateUp                       // at least one lane is open
	stateNoLanes                  // no lane is open, since the lanes rest or the last lane broke; D's keys are still good
	stateDown                     // D's keys are void and no lane is open
	stateEnded                    // D was dismissed, or the transport is closed
)

func (s state) String() string {
	return [...]string{"none", "new", "probing", "up", "noLanes", "down", "ended"}[s]
}

// event moves a connection from one state to another.
type event uint8

const (
	eventHello   event = iota // D asks for lanes
	eventPorts                // D has told its ports and keys
	eventLane                 // a lane has carried its probe
	eventNoLanes              // the last lane is gone
	eventLost                 // D cannot be reached, has begun anew or has ended the connection
	eventEnd                  // D is dismissed, or the transport closes
	events
)

// transitions is the whole table; 0 stands for what cannot happen.
//
//	         hello    ports    lane  noLanes lost  end
//	new      down     probing  -     -     new   ended
//	probing  probing  probing  up    -     down  ended
//	up       up       up       up    noLanes -   ended
//	noLanes  noLanes  noLanes  up    -     down  ended    lost: the sink is told that D cannot be reached
//	down     down     probing  -     -     down  ended
//	ended    ended    ended    -     ended ended ended
//
// A connection that is lost closes its lanes first, so it passes through noLanes.
var transitions = [...][events]state{
	stateNew:     {stateDown, stateProbing, 0, 0, stateNew, stateEnded},
	stateProbing: {stateProbing, stateProbing, stateUp, 0, stateDown, stateEnded},
	stateUp:      {stateUp, stateUp, stateUp, stateNoLanes, 0, stateEnded},
	stateNoLanes: {stateNoLanes, stateNoLanes, stateUp, 0, stateDown, stateEnded},
	stateDown:    {stateDown, stateProbing, 0, 0, stateDown, stateEnded},
	stateEnded:   {stateEnded, stateEnded, 0, stateEnded, stateEnded, stateEnded},
}

// on takes an event and returns the state before the event; cn.mu is held.
func (cn *conn) on(e event) (before state) {
	before = cn.state
	after := transitions[before][e]
	if after == 0 && invariants.Enabled {
		panic(fmt.Sprintf("rdma: event %d in state %v", e, before))
	}
	if after != 0 {
		cn.state = after
	}
	return before
}

// check compares the state with the fields that follow from it, if invariants are enabled.
func (cn *conn) check() {
	told := cn.state == stateProbing || cn.state == stateUp || cn.state == stateNoLanes
	if told != (cn.remote != nil) || (cn.state == stateUp) != (len(cn.lanes) > 0) || (cn.state == stateEnded) != (cn.ended != nil) {
		panic(fmt.Sprintf("rdma: a connection is %v with %d lanes, D's keys: %v, ended: %v", cn.state, len(cn.lanes), cn.remote != nil, cn.ended))
	}
}

// tasks are set for the goroutine of reconnectLoop. Lost lanes and waiting writes need no task.
type tasks uint8

const (
	makeLanes tasks = 1 << iota // D, or a port that is active again, asks for lanes
	askGrants                   // D must say which grants are alive: too many dead ones are remembered
	restLanes                   // nothing was written for long: close the lanes
)

// step is what the goroutine of reconnectLoop does next.
type step uint8

const (
	stepNone    step = iota
	stepAsk          // ask D what arrived by lanes that broke, and which grants are alive
	stepRest         // close the lanes
	stepConnect      // make lanes
)

// next is the first step for which there is work; cn.mu is held.
func (cn *conn) next() step {
	switch {
	case cn.state == stateEnded:
	case len(cn.lost) > 0 || cn.tasks&askGrants != 0:
		return stepAsk
	case cn.tasks&restLanes != 0:
		return stepRest
	case cn.tasks&makeLanes != 0, len(cn.writes) > 0 && (len(cn.lanes) == 0 || cn.retryDue()):
		return stepConnect
	}
	return stepNone
}
