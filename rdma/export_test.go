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
