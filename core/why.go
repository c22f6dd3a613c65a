package core

import (
	"context"
	"errors"
)

// Why is a word of a closed set that says why a transport cannot be used with a peer. Metrics have it as a label. The text of the
// error that is marked with it says more.
type Why string

// The words.
const (
	Elsewhere    Why = "elsewhere"     // the peer is where this agent does not get to: on another host, or in other namespaces of this one
	NotPermitted Why = "not_permitted" // a user id, the kernel, a filter of system calls or a setting forbids it
	NotShared    Why = "not_shared"    // memory of the peer cannot be opened
	Lost         Why = "lost"          // the connection broke, or the peer has ended
	Lacking      Why = "lacking"       // one of the two has no such transport, or only one of another version
	Setup        Why = "setup"         // the setup with the peer has not ended, or failed
	OtherWhy     Why = "other"
)

// Whys are all of them.
func Whys() []Why { return []Why{Elsewhere, NotPermitted, NotShared, Lost, Lacking, Setup, OtherWhy} }

type marked struct {
	error
	why Why
}

func (m marked) Unwrap() error { return m.error }

// Mark gives an error the word. The error's text stays as it is.
func (w Why) Mark(err error) error {
	if err == nil {
		return nil
	}
	return marked{err, w}
}

// WhyOf is the word of an error: the outermost that it is marked with, or else what its sentinels say.
func WhyOf(err error) Why {
	var m marked
	switch {
	case errors.As(err, &m):
		return m.why
	case errors.Is(err, ErrElsewhere):
		return Elsewhere
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, context.Canceled):
		return Setup
	case errors.Is(err, ErrConnectionLost):
		return Lost
	}
	return OtherWhy
}
