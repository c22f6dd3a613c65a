// If a device may not read or write a transfer's memory, one of the transfer's requests fails
// with that error, and the transfer ends. P makes the lane anew for other transfers.

package rdma

import (
	"fmt"
	"slices"
	"strings"

	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/rdma/internal/verbs"
)

// maxDenied is how often in a row a peer's device may refuse a stripe. The first time, the peer
// may have registered its memory anew since P got the key; the next lane has the
// present keys.
const maxDenied = 2

// denied finds the write whose request has failed. If no lane can carry the write, it
// returns a function that ends it. It is called once the lane has been broken.
func (cn *conn) denied(l *lane, c *verbs.Completion) (end func()) {
	j, ok := l.queue.owner(c.ID)
	if !ok {
		return func() {}
	}
	why := ""
	switch c.Status {
	case verbs.LocalProtection:
		why = "the device may not read " + j.regions(cn.t.layout)
	case verbs.RemoteAccess:
		if j.denied++; j.denied < maxDenied {
			return func() {}
		}
		why = fmt.Sprintf("decode agent %s does not let bytes into %s", cn.peer, j.regions(cn.t.layout))
	default:
		return func() {}
	}
	cause := l.failure(c)
	return func() { cn.fail(j.w, fmt.Errorf("rdma: transfer %q: %s: %w", j.w.op.ID.Name(), why, cause)) }
}

// mostNamed is how many regions an error names.
const mostNamed = 3

// regions names the regions that a stripe reads. The regions of the same names at the
// peer are its other end.
func (j *job) regions(layout *kv.Layout) string {
	var names []string
	for _, s := range j.cursor.ranges {
		left := s.length + s.skip
		for _, p := range s.pairs[s.first:] {
			if name := fmt.Sprintf("%q", layout.Regions[p.SrcRegion].Name); !slices.Contains(names, name) {
				names = append(names, name)
			}
			if left <= p.Length {
				break
			}
			left -= p.Length
		}
	}
	switch n := len(names); {
	case n == 0:
		return "its own memory"
	case n == 1:
		return "region " + names[0]
	case n > mostNamed:
		names = append(names[:mostNamed], fmt.Sprintf("%d more", n-mostNamed))
	}
	return "one of the regions " + strings.Join(names, ", ")
}
