package rdma

// BreakSending puts the queue pairs by which t writes into error, as a device may
// at any time, at most n of them, and says how many.
func (t *Transport) BreakSending(n int) (broken int, err error) {
	s := &t.sender
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, cn := range s.conns {
		cn.mu.Lock()
		for _, l := range cn.lanes {
			if broken < n && err == nil {
				err = l.qp.ToError()
				broken++
			}
		}
		cn.mu.Unlock()
	}
	return broken, err
}

// Sending are the lanes by which t writes, each as its pointer.
func (t *Transport) Sending() (lanes []any) {
	for _, cn := range t.sender.all() {
		cn.mu.Lock()
		for _, l := range cn.lanes {
			lanes = append(lanes, l)
		}
		cn.mu.Unlock()
	}
	return lanes
}

// BreakReceiving does the same to the queue pairs by which t is written to.
func (t *Transport) BreakReceiving(n int) (broken int, err error) {
	r := &t.receiver
	r.mu.Lock()
	var all []*source
	for _, src := range r.sources {
		all = append(all, src)
	}
	r.mu.Unlock()
	for _, src := range all {
		src.mu.Lock()
		for _, l := range src.lanes {
			if broken < n && err == nil {
				err = l.qp.ToError()
				broken++
			}
		}
		src.mu.Unlock()
	}
	return broken, err
}

// LimitMR has devices take at most so many bytes in one registration, until the function that it
// returns is called.
func LimitMR(bytes uint64) (restore func()) {
	was := mrLimit
	mrLimit = bytes
	return func() { mrLimit = was }
}

// Modules names a folder in place of /sys/module.
func Modules(folder string) (restore func()) {
	was := modulesFolder
	modulesFolder = folder
	return func() { modulesFolder = was }
}

// Registrations counts those of all devices.
func (t *Transport) Registrations() (n int) {
	for _, d := range t.devices {
		n += d.verbs.Counts().MRs
	}
	return n
}
