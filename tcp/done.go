package tcp

// doneList keeps the last transfers that ended well, or that failed because D could not write its
// memory. If the stream that brought an acknowledgement broke, P asks again. P may also ask while
// it has not heard of the failure.
type doneList struct {
	list []doneTransfer
	next int
}

type doneTransfer struct {
	grant random
	total uint64
	fault string // why the transfer has failed; "": it has not
}

const maxDone = 1024

func (d *doneList) add(t doneTransfer) {
	if len(d.list) < maxDone {
		d.list = append(d.list, t)
		return
	}
	d.list[d.next] = t
	d.next = (d.next + 1) % maxDone
}

// answer is D's answer to a frame whose grant it does not expect, or does not expect any more.
func (d *doneList) answer(grant random) (h header, fault string) {
	h = header{kind: frameNack, key: grant}
	for i := range d.list {
		if t := &d.list[i]; t.grant == grant {
			if h.kind, h.length = frameAck, t.total; t.fault != "" {
				h.kind, h.length = frameFault, uint64(len(t.fault))
			}
			return h, t.fault
		}
	}
	return h, ""
}
