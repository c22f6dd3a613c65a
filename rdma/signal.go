// What the two ends of the transport say to each other, by way of the control plane.

package rdma

import (
	"fmt"

	"github.com/kvconn/kvconn/core"
)

//go:generate go tool msgp -unexported -o signal_gen.go -tests=false -io=false

//msgp:limit arrays:65536 maps:16
//msgp:ignore grant mark

// signalKind says what a signal asks. P writes and D receives. Only P makes lanes, so both
// sides may ask for them at the same time.
type signalKind uint8

const (
	signalHello     signalKind = 1 // D → P: I have your ticket; connect, and these lanes broke here
	signalPorts     signalKind = 2 // P → D: which ports, keys and grants do you have?
	signalConnect   signalKind = 3 // P → D: make your ends of these lanes
	signalConnected signalKind = 4 // P → D: I keep these lanes; if none, why
	signalLost      signalKind = 5 // P → D: these lanes broke; which stripes of these transfers have arrived?
	signalDrain     signalKind = 6 // D → P: these grants are dead; tell when no byte of them is on its way
	signalDrained   signalKind = 7 // P → D: no byte of these is on its way

	signalBye       signalKind = 8 // D → P: this agent is closed, or wants nothing of P any more
	signalDismissed signalKind = 9 // P → D: this agent is closed, or has dismissed D

	signalProbed signalKind = 10 // P → D: these lanes have written their trials; are the bytes right?
)

// signal is a message between two transports. Each signal has the ticket that P has given D,
// so that a transport answers only agents that have met its own.
type signal struct {
	Kind   signalKind  `msg:"k"`
	Ticket []byte      `msg:"t,limit=64"`
	Lanes  []uint32    `msg:"l,omitempty,limit=1024"`
	Seqs   []uint64    `msg:"s,omitempty,limit=65536"`
	Below  uint64      `msg:"b,omitempty"` // grants below it are dead
	Offers []laneOffer `msg:"o,omitempty,limit=256"`
	Last   uint32      `msg:"z,omitempty"`          // of signalConnected: it speaks of the lanes up to this one
	Secret []byte      `msg:"x,omitempty,limit=64"` // D's secret: which D has ended (signalBye), or which keys P means
	Reason string      `msg:"r,omitempty,limit=1024"`
	Up     []int       `msg:"u,omitempty,limit=64"` // of signalHello: ports of D that have become active
	Tries  bool        `msg:"y,omitempty"`          // of signalPorts: P puts lanes on trial where a side has GPUs
	Seed   uint64      `msg:"e,omitempty"`          // of signalProbed: of the bytes
}

// laneOffer is P's end of a lane, and the port of D that it is for.
type laneOffer struct {
	Lane  uint32   `msg:"l"`
	Port  int      `msg:"p"` // portInfo.Index
	QPN   uint32   `msg:"q"`
	PSN   uint32   `msg:"s"`
	MTU   int      `msg:"m"` // bytes
	GRH   bool     `msg:"h"`
	GID   [16]byte `msg:"g"` // P's, with GRH
	Index int      `msg:"i"` // the index in D's GID table of the address that P's packets go to
	LID   uint16   `msg:"d"` // P's
	Trial bool     `msg:"t,omitempty"`
}

// laneAnswer is D's end; Error says why there is none.
type laneAnswer struct {
	QPN   uint32 `msg:"q"`
	PSN   uint32 `msg:"s"`
	Place int    `msg:"p,omitempty"` // of a lane on trial, from 1 on
	Error string `msg:"e,omitempty,limit=512"`
}

// portInfo is what P must know of a port of D.
type portInfo struct {
	Index  int       `msg:"i"` // in D's list
	Device int       `msg:"d"` // index into the keys: ports of one device share them
	Name   string    `msg:"n,limit=80"`
	Link   uint8     `msg:"k"` // verbs.LinkLayer
	LID    uint16    `msg:"l"`
	GRH    bool      `msg:"h"`
	MTU    int       `msg:"m"` // bytes
	Speed  uint64    `msg:"s"` // bytes a second
	Forced int       `msg:"f"` // index of the GID that is to be used; below 0: any
	GIDs   []gidInfo `msg:"a,limit=256"`
}

// gidInfo is an entry of a port's GID table.
//
//msgp:tuple gidInfo
type gidInfo struct {
	Index int
	Raw   [16]byte
	Type  uint8 // verbs.GIDType
}

// keyInfo is memory that D has registered on a device.
//
//msgp:tuple keyInfo
type keyInfo struct {
	Base, Length uint64
	Key          uint32
}

// span is where a region lies in D's process.
//
//msgp:tuple span
type span struct{ Base, Length uint64 }

// deviceKeys are the keys of one device of D.
type deviceKeys struct {
	Keys    []keyInfo `msg:"k,limit=65536"`
	Scratch keyInfo   `msg:"s"`                    // where probes may write
	Areas   []keyInfo `msg:"a,omitempty,limit=64"` // where trials may write: all are tried
}

// reply answers a signal.
type reply struct {
	Refused string `msg:"r,omitempty,limit=1024"` // the reason; no other field is set

	// of signalPorts
	Ports   []portInfo   `msg:"p,omitempty,limit=64"`
	Devices []deviceKeys `msg:"d,omitempty,limit=64"`
	Regions []span       `msg:"g,omitempty,limit=65536"`
	Secret  []byte       `msg:"x,omitempty,limit=64"`   // signs D's grants for this P; new with each D
	GPUs    int          `msg:"u,omitempty"`            // on which regions of D lie
	Lacks   string       `msg:"k,omitempty,limit=1024"` // if there are no Ports: why
	// of signalConnect and signalLost: a grant is dead if it is below Next and not live
	Next uint64   `msg:"n,omitempty"`
	Live []uint64 `msg:"v,omitempty,limit=65536"`

	Lanes   []laneAnswer `msg:"l,omitempty,limit=256"`   // of signalConnect
	Arrived []uint64     `msg:"a,omitempty,limit=65536"` // of signalLost, per Seq: bit i = stripe i is here
	Busy    bool         `msg:"b,omitempty"`             // of signalLost: ask again, the lanes still end
	Pending []uint64     `msg:"w,omitempty,limit=65536"` // of signalDrain: for these grants P will send signalDrained
}

func decodeSignal(b []byte) (*signal, error) {
	s := &signal{}
	if rest, err := s.UnmarshalMsg(b); err != nil {
		return nil, fmt.Errorf("malformed signal: %w", err)
	} else if len(rest) > 0 {
		return nil, fmt.Errorf("malformed signal: %d bytes too many", len(rest))
	}
	return s, nil
}

func decodeReply(peer core.AgentID, b []byte) (*reply, error) {
	r := &reply{}
	if _, err := r.UnmarshalMsg(b); err != nil {
		return nil, fmt.Errorf("agent %s gives a malformed answer: %w", peer, err)
	}
	return r, nil
}
