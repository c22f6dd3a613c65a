package local

import (
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"strings"

	"go.uber.org/zap"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/internal/fault"
	"github.com/kvconn/kvconn/kv"
)

// memoryAccess is how D gets at one space of a P's memories. It belongs to one link.
type memoryAccess interface {
	// open opens one memory more of the space. The caller closes the file, if there is one.
	open(m *memory, file *os.File) error
	// copy copies a batch whose runs lie in memories that are open, and says how many bytes it did
	// before an error. Several workers copy at once.
	copy(c *copier, b *batch) (done uint64, err error)
	// close gives all back, when no copy is under way and none begins any more.
	close()
}

// prefill is what the kernel says of P, and where P says that it is.
type prefill struct {
	id   core.AgentID
	pid  int
	pids string // its process namespace
}

// accessOf makes the access to a space whose memories are of a kind.
func (t *Transport) accessOf(kind memoryKind, of prefill) (memoryAccess, error) {
	switch kind {
	case memoryFile:
		return &views{t: t}, nil
	case memoryDevice, memoryDeviceFile:
		return t.opens(of)
	case memoryLacking:
		return lacks{}, nil
	}
	return nil, fmt.Errorf("it is of kind %d, which this version does not know: run the same kvconn on both", kind)
}

// peerAccess is what a D has opened of a P.
type peerAccess struct {
	spaces  spaces
	bySpace map[uint32]memoryAccess
	process bool // D may read P's process too
	of      prefill
}

// to is the access to a space; nil: P's process is read.
func (r *peerAccess) to(space uint32) memoryAccess { return r.bySpace[space] }

// close gives all back.
func (r *peerAccess) close() {
	for _, access := range r.bySpace {
		if !fault.On("local-kept-open") {
			access.close()
		}
	}
	r.bySpace, r.spaces = nil, nil
}

// check refuses runs that leave the space that they are said to lie in.
func (r *peerAccess) check(f *spoken) error {
	if f.space == processMemory {
		if !r.process {
			return errors.New("runs of the prefill agent's process, which this one does not read")
		}
		return nil
	}
	for _, one := range f.runs {
		if space, end := r.spaces.at(one.base); (space != f.space || one.len > end-one.base) && !fault.On("local-anywhere") {
			return fmt.Errorf("a run of %d bytes at %#x, which leaves the memory of space %d", one.len, one.base, f.space)
		}
	}
	return nil
}

// open reads P's list of memories, opens those that it can, and answers which it could not. Then P decides whether to go on.
func (r *peerAccess) open(t *Transport, conn *net.UnixConn) error {
	kinds, reasons := map[uint32]memoryKind{}, []string{}
	var opened []memory
	var refused error
	r.bySpace = map[uint32]memoryAccess{}
	err := hearMemories(conn, func(m *memory, file *os.File) error {
		if k, known := kinds[m.space]; known && k != m.kind {
			return fmt.Errorf("%v is of kind %d, others of its space are of kind %d", m, m.kind, k)
		}
		kinds[m.space] = m.kind
		why, err := "", r.add(t, m, file)
		if err == nil {
			opened = append(opened, *m)
		} else if why = err.Error(); refused == nil {
			refused = fmt.Errorf("%v: %w", m, err)
		}
		reasons = append(reasons, why)
		return nil
	})
	if err != nil {
		return fmt.Errorf("the list of its memories: %w", clearer(err))
	}
	if r.spaces, err = spacesOf(opened); err != nil {
		return fmt.Errorf("the list of its memories: %w", err)
	}
	if err := sayAnswer(conn, reasons); err != nil {
		return clearer(err)
	}
	b, err := read(conn, verdictSize)
	if err != nil {
		return errors.Join(refused, clearer(err))
	}
	if v, _ := parseVerdict(b); v != verdictReady {
		if refused == nil {
			refused = errors.New("it says that its list has not all of its memory")
		} else {
			refused = core.NotShared.Mark(refused)
		}
		return fmt.Errorf("memory of the prefill agent cannot be opened: %w", refused)
	}
	if refused != nil {
		t.cfg.Logger.Info("memory of the prefill agent is read out of its process, which is slower", zap.Error(refused))
	}
	return nil
}

func (r *peerAccess) add(t *Transport, m *memory, file *os.File) error {
	access := r.bySpace[m.space]
	if access == nil {
		var err error
		if access, err = t.accessOf(m.kind, r.of); err != nil {
			return err
		}
		r.bySpace[m.space] = access
	}
	if m.kind.described() != (file != nil) {
		return errors.New("a descriptor must come with a file, and with nothing else")
	}
	return access.open(m, file)
}

// offerMemories lists P's memories to D, and finds out whether those that D opens will do.
func (s *sender) offerMemories(ol *outLink, process bool) error {
	conn, list := ol.conn, s.t.memories
	shared, err := s.t.share()
	switch {
	case err != nil:
		list = slices.Concat(list, []memory{*lacking(err)})
	case shared != nil:
		list = slices.Concat(list, shared.list)
	}
	if err := sayMemories(conn, list); err != nil {
		return fmt.Errorf("process %d has not taken the list of memories: %w", ol.pid, clearer(err))
	}
	reasons, err := hearAnswer(conn, len(list))
	if err != nil {
		return fmt.Errorf("process %d has not answered the list of memories: %w", ol.pid, clearer(err))
	}
	var used []memory
	var refused error
	for i, why := range reasons {
		if why == "" {
			used = append(used, list[i])
		} else if refused == nil {
			refused = fmt.Errorf("%v: %s", &list[i], strings.ToValidUTF8(why, ""))
		}
	}
	if ol.spaces, err = spacesOf(used); err != nil {
		return err
	}
	if beyond := ol.spaces.lacks(s.t.layout, process); beyond != nil {
		_, _ = conn.Write(verdictBarred.bytes(0)) // if this fails, D hears of it by the end of the socket
		return fmt.Errorf("decode agent %s cannot reach %v: %w", ol.taker.id, beyond, refused)
	}
	ol.shared = shared
	if refused != nil {
		s.t.cfg.Logger.Info("a decode agent reads memory out of this process, which is slower", zap.String("peer", string(ol.taker.id)), zap.Error(refused))
	}
	methods := s.t.methodsTo(ol.spaces)
	s.mu.Lock()
	ol.taker.methods = methods // before D hears that it may begin
	s.mu.Unlock()
	_, err = conn.Write(verdictReady.bytes(0))
	return err
}

// lacks is a region that a D does not reach which has opened these memories.
func (all spaces) lacks(l *kv.Layout, process bool) *kv.Region {
	for i := range l.Regions {
		r := &l.Regions[i]
		if r.Memory == kv.HostMemory && process {
			continue
		}
		for at := r.Base; at < r.Base+r.Extent(); {
			space, end := all.at(at)
			if space == processMemory {
				return r
			}
			at = end
		}
	}
	return nil
}
