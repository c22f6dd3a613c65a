package main

// #include "slots.h"
import "C"

import (
	"math/bits"

	"github.com/kvconn/kvconn/core"
)

// An agent's slot has room for the regions that it may register.
var _ [C.KVCONN_MAX_REGIONS - core.MaxRegions]struct{}

// written is what kvconn_written has told of an agent's regions.
type written struct {
	handle C.kvconn_agent
	words  []C.uint64_t
}

func newWritten(h C.kvconn_agent) *written {
	return &written{h, make([]C.uint64_t, (C.slot_regions(h)+63)/64)}
}

// take gives each region once, in growing order.
func (w *written) take() (regions []uint32) {
	if len(w.words) == 0 || C.slot_take_written(w.handle, &w.words[0], C.size_t(len(w.words))) == 0 {
		return nil
	}
	for i, word := range w.words {
		for rest := uint64(word); rest != 0; rest &= rest - 1 {
			regions = append(regions, uint32(64*i+bits.TrailingZeros64(rest)))
		}
	}
	return regions
}
