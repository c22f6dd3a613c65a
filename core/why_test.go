package core

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
)

func TestWhy(t *testing.T) {
	plain := errors.New("a reason")
	for name, c := range map[string]struct {
		err  error
		want Why
	}{
		"none":                {plain, OtherWhy},
		"marked":              {NotShared.Mark(plain), NotShared},
		"wrapped":             {fmt.Errorf("local: %w: %w", ErrConnectionLost, NotPermitted.Mark(plain)), NotPermitted},
		"joined":              {errors.Join(plain, Lacking.Mark(plain)), Lacking},
		"the outermost":       {Setup.Mark(fmt.Errorf("meeting: %w", Lost.Mark(plain))), Setup},
		"lost":                {fmt.Errorf("tcp: %w", ErrConnectionLost), Lost},
		"late":                {fmt.Errorf("%w: %w", ErrConnectionLost, context.DeadlineExceeded), Setup},
		"cancelled":           {context.Canceled, Setup},
		"on another host":     {fmt.Errorf("local: %w", ErrElsewhere), Elsewhere},
		"nothing, if it's ok": {Lost.Mark(nil), OtherWhy},
	} {
		if got := WhyOf(c.err); got != c.want || !slices.Contains(Whys(), got) {
			t.Errorf("%s: %v is %q, want %q", name, c.err, got, c.want)
		}
	}
	if err := Lost.Mark(plain); err.Error() != plain.Error() || !errors.Is(err, plain) || Lost.Mark(nil) != nil {
		t.Errorf("marked it is %v", err)
	}
}
