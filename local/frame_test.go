package local

import (
	"encoding/binary"
	"math"
	"testing"
)

func TestFrames(t *testing.T) {
	grant := newRandom()
	s := spoken{total: 300, validity: 77, proof: 78, piece: piece{position: 100, runs: []run{{4096, 50}, {8192, 150}}}}
	b := s.append(nil, grant)
	h := parseHeader(b)
	if err := h.check(); err != nil || h.kind != frameRuns || h.grant != grant || int(h.length) != len(b)-headerSize {
		t.Fatalf("%+v, %v", h, err)
	}
	got, err := parseSpoken(b[headerSize:])
	if err != nil || got.total != 300 || got.validity != 77 || got.proof != 78 || got.position != 100 || len(got.runs) != 2 || got.runs[1] != (run{8192, 150}) {
		t.Errorf("%+v, %v", got, err)
	}
	e := ending{cause: overUnreadable, address: 99, text: "why"}
	if got, err := parseEnding(e.bytes(grant)[headerSize:]); err != nil || got != e {
		t.Errorf("%+v, %v", got, err)
	}
	if n, err := parseCredit(credit(12)[headerSize:]); err != nil || n != 12 {
		t.Error(n, err)
	}
}

func TestBadFrames(t *testing.T) {
	for name, h := range map[string]header{
		"kind 0":       {kind: 0},
		"unknown":      {kind: frameAnew + 1},
		"long anew":    {kind: frameAnew, length: 1},
		"long runs":    {kind: frameRuns, length: runsSize + maxRuns*runSize + 1},
		"long credit":  {kind: frameCredit, length: 5},
		"long done":    {kind: frameDone, length: 1},
		"long text":    {kind: frameOver, length: overSize + maxText + 1},
		"endless over": {kind: frameOver, length: math.MaxUint32},
	} {
		if h.check() == nil {
			t.Errorf("%s is taken", name)
		}
	}
	good := func() []byte {
		s := spoken{total: 300, piece: piece{position: 100, runs: []run{{4096, 50}, {8192, 150}}}}
		return s.append(nil, random{})[headerSize:]
	}
	put := func(at int, v uint64) []byte {
		b := good()
		binary.BigEndian.PutUint64(b[at:], v)
		return b
	}
	for name, b := range map[string][]byte{
		"nothing":             nil,
		"cut":                 good()[:runsSize+runSize+3],
		"a run less":          good()[:runsSize+runSize],
		"beyond the total":    put(0, 299),
		"around the end":      put(8, math.MaxUint64-10),
		"an empty run":        put(runsSize+8, 0),
		"a run around":        put(runsSize, math.MaxUint64-10),
		"a sum around":        put(runsSize+8, math.MaxUint64-100),
		"more than there are": put(runsSize-8, 3),
	} {
		if s, err := parseSpoken(b); err == nil {
			t.Errorf("%s is taken: %+v", name, s)
		}
	}
	if _, err := parseEnding(make([]byte, overSize-1)); err == nil {
		t.Error("a short over is taken")
	}
	if _, err := parseCredit(nil); err == nil {
		t.Error("an empty credit is taken")
	}
}

// FuzzSpoken: whatever a peer says, what is taken lies within the transfer and the address space.
func FuzzSpoken(f *testing.F) {
	s := spoken{total: 300, validity: 77, proof: 78, piece: piece{position: 100, runs: []run{{4096, 50}, {8192, 150}}}}
	f.Add(s.append(nil, random{})[headerSize:])
	f.Fuzz(func(t *testing.T, b []byte) {
		s, err := parseSpoken(b)
		if err != nil {
			return
		}
		at := s.position
		for _, r := range s.runs {
			if r.len == 0 || r.base+r.len < r.base || at+r.len < at {
				t.Fatalf("%+v", s)
			}
			at += r.len
		}
		if at > s.total {
			t.Fatalf("%+v", s)
		}
		if got := s.append(nil, random{})[headerSize:]; string(got) != string(b) {
			t.Fatalf("%x, want %x", got, b)
		}
	})
}
