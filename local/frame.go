package local

import (
	"encoding/binary"
	"fmt"
	"strings"
)

// After the meeting both sides send frames: a header, and length bytes.
//
//	P: runs    these bytes of a transfer lie here in P's memory
//	D: credit  D has done with so many runs, of any transfers
//	D: done    D has copied all of a transfer. Has P kept it? D asks only if it has no proof (validity_page.go)
//	P: kept    P has kept it, and will not call the transfer good before D has
//	D: taken   D has reported it
//	P: stop    D is to end its copy
//	P: anew    P's memory has changed: this link ends, and D is to meet P anew
//	D: over    D copies nothing of the transfer any more: it is not expected, has failed, or was stopped
type kind uint32

const (
	frameRuns   kind = 1
	frameCredit kind = 2
	frameDone   kind = 3
	frameKept   kind = 4
	frameTaken  kind = 5
	frameStop   kind = 6
	frameOver   kind = 7
	frameAnew   kind = 8
)

const (
	headerSize = 24
	runsSize   = 40 // before the runs of a frame
	runSize    = 16
	overSize   = 16 // before the text of an over

	// maxRuns bounds the runs of one frame. window bounds the runs that P has said and that D has not done
	// with. So both bound how much memory a peer makes D use.
	maxRuns = 1024
	window  = 8192

	maxText = 512 // of a reason
)

// header begins a frame.
type header struct {
	kind   kind
	length uint32
	grant  random
}

func (h *header) append(b []byte) []byte {
	b = binary.BigEndian.AppendUint32(b, uint32(h.kind))
	b = binary.BigEndian.AppendUint32(b, h.length)
	return append(b, h.grant[:]...)
}

func parseHeader(b []byte) header {
	return header{kind(binary.BigEndian.Uint32(b)), binary.BigEndian.Uint32(b[4:]), random(b[8:24])}
}

// most is the longest frame of a kind; false if there is no such kind.
func (k kind) most() (n uint32, known bool) {
	switch k {
	case frameRuns:
		return runsSize + maxRuns*runSize, true
	case frameCredit:
		return 4, true
	case frameOver:
		return overSize + maxText, true
	case frameDone, frameKept, frameTaken, frameStop, frameAnew:
		return 0, true
	}
	return 0, false
}

// check refuses a header before its bytes are read.
func (h *header) check() error {
	most, known := h.kind.most()
	switch {
	case !known:
		return fmt.Errorf("a frame of kind %d, which this version does not know", h.kind)
	case h.length > most:
		return fmt.Errorf("a frame of kind %d with %d bytes, at most %d are read", h.kind, h.length, most)
	}
	return nil
}

// word is a frame without bytes.
func word(k kind, grant random) []byte {
	return (&header{kind: k, grant: grant}).append(make([]byte, 0, headerSize))
}

// spoken is the content of a frame of runs.
type spoken struct {
	total    uint64 // bytes of the whole transfer
	validity uint64 // address of the validity page
	proof    uint64 // what the page's word is while P keeps the blocks; 0: D is to ask
	piece
}

// processMemory is the space of what D reads out of P's process; memories that D has opened have others.
const processMemory uint32 = 0

func (s *spoken) append(b []byte, grant random) []byte {
	b = (&header{frameRuns, uint32(runsSize + len(s.runs)*runSize), grant}).append(b)
	b = binary.BigEndian.AppendUint64(b, s.total)
	b = binary.BigEndian.AppendUint64(b, s.position)
	b = binary.BigEndian.AppendUint64(b, s.validity)
	b = binary.BigEndian.AppendUint64(b, s.proof)
	b = binary.BigEndian.AppendUint32(b, s.space)
	b = binary.BigEndian.AppendUint32(b, uint32(len(s.runs)))
	for i := range s.runs {
		b = binary.BigEndian.AppendUint64(b, s.runs[i].base)
		b = binary.BigEndian.AppendUint64(b, s.runs[i].len)
	}
	return b
}

// parseSpoken reads the content of a frame. A peer may say anything. So parseSpoken refuses an empty run,
// a run that goes around the end of the address space, and runs whose sum overflows.
func parseSpoken(b []byte) (s spoken, err error) {
	if len(b) < runsSize {
		return s, fmt.Errorf("a frame of runs with %d bytes", len(b))
	}
	s.total, s.position, s.validity = binary.BigEndian.Uint64(b), binary.BigEndian.Uint64(b[8:]), binary.BigEndian.Uint64(b[16:])
	s.proof, s.space = binary.BigEndian.Uint64(b[24:]), binary.BigEndian.Uint32(b[32:])
	n := binary.BigEndian.Uint32(b[36:])
	if b = b[runsSize:]; uint64(n)*runSize != uint64(len(b)) {
		return s, fmt.Errorf("a frame of %d runs in %d bytes", n, len(b))
	}
	s.runs = make([]run, n)
	end := s.position
	for i := range s.runs {
		r := run{binary.BigEndian.Uint64(b), binary.BigEndian.Uint64(b[8:])}
		if r.len == 0 || r.base+r.len < r.base || end+r.len < end {
			return s, fmt.Errorf("a run of %d bytes at %#x, position %d", r.len, r.base, end)
		}
		end += r.len
		s.runs[i], b = r, b[runSize:]
	}
	if end > s.total {
		return s, fmt.Errorf("runs up to byte %d of a transfer of %d", end, s.total)
	}
	return s, nil
}

// credit gives back so many runs of the window.
func credit(runs uint32) []byte {
	b := (&header{kind: frameCredit, length: 4}).append(make([]byte, 0, headerSize+4))
	return binary.BigEndian.AppendUint32(b, runs)
}

func parseCredit(b []byte) (uint32, error) {
	if len(b) != 4 {
		return 0, fmt.Errorf("a credit of %d bytes", len(b))
	}
	return binary.BigEndian.Uint32(b), nil
}

// cause is why D copies nothing of a transfer any more.
type cause uint32

const (
	overUnexpected cause = 1
	overFailed     cause = 2 // the text says why
	overUnreadable cause = 3 // the kernel does not read P's memory at the address
	overStopped    cause = 4 // as P asked
)

// ending is the content of a frame of kind over.
type ending struct {
	cause   cause
	address uint64
	text    string
}

func (e *ending) bytes(grant random) []byte {
	text := e.text[:min(len(e.text), maxText)]
	b := (&header{frameOver, uint32(overSize + len(text)), grant}).append(make([]byte, 0, headerSize+overSize+len(text)))
	b = binary.BigEndian.AppendUint32(b, uint32(e.cause))
	b = binary.BigEndian.AppendUint32(b, 0)
	b = binary.BigEndian.AppendUint64(b, e.address)
	return append(b, text...)
}

func parseEnding(b []byte) (e ending, err error) {
	if len(b) < overSize {
		return e, fmt.Errorf("an over of %d bytes", len(b))
	}
	return ending{cause(binary.BigEndian.Uint32(b)), binary.BigEndian.Uint64(b[8:]), strings.ToValidUTF8(string(b[overSize:]), "")}, nil
}
