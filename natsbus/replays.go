package natsbus

// replays remembers which numbers of a session's requests have come. As in RFC 6479 it is a ring of
// words, whose oldest word is used anew. A request's number is taken when the request is unsealed. A
// request that waits for a place until then is overtaken by far fewer requests than the window has
// numbers. A request that may wait longer (see longQueue) is unsealed before it waits.
type replays struct {
	top  uint64 // the newest number's word
	seen [replayWords]uint64
}

const replayWords = 1 + 1024/64 // of the oldest word only a part may be within the last 1024

// arrival is what a request's number says of it.
type arrival int

const (
	arrivalNew arrival = iota
	arrivalSeen
	arrivalOld // older than all numbers that are remembered: it may have been seen
)

func (r *replays) look(number uint64) arrival {
	word := number / 64
	switch {
	case word > r.top:
		return arrivalNew
	case r.top-word >= replayWords:
		return arrivalOld
	case r.seen[word%replayWords]&(1<<(number%64)) != 0:
		return arrivalSeen
	}
	return arrivalNew
}

// take is look, and remembers the number.
func (r *replays) take(number uint64) arrival {
	a := r.look(number)
	if a != arrivalNew {
		return a
	}
	word := number / 64
	for n := r.top + 1; n <= word && n <= r.top+replayWords; n++ {
		r.seen[n%replayWords] = 0
	}
	r.top = max(r.top, word)
	r.seen[word%replayWords] |= 1 << (number % 64)
	return arrivalNew
}
