package tcp

// doneList keeps the last transfers that ended well. If the stream that brought an
// acknowledgement broke, P asks again.
type doneList struct {
	list []doneTransfer
	next int
}

type doneTransfer struct {
	grant token
	total uint64
}

const maxDone = 1024

func (d *doneList) add(grant token, total uint64) {
	if len(d.list) < maxDone {
		d.list = append(d.list, doneTransfer{grant, total})
		return
	}
	d.list[d.next] = doneTransfer{grant, total}
	d.next = (d.next + 1) % maxDone
}

func (d *doneList) find(grant token) (total uint64, found bool) {
	for i := range d.list {
		if d.list[i].grant == grant {
			return d.list[i].total, true
		}
	}
	return 0, false
}
