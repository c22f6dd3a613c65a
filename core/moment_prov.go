package core

import "time"

type Moment uint64

func (m *Machine) MomentPassed(now time.Time, at Moment)            {}
func (m *Machine) MomentFailed(now time.Time, at Moment, err error) {}
