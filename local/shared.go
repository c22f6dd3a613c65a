// P hands out its memory on GPUs, and looks each second whether what it has told D is still there.

package local

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"

	"github.com/kvconn/kvconn/cuda"
)

// D opens memory on P's devices by CUDA's handles. The handle of a cudaMalloc allocation is some bytes;
// that of memory which was mapped by handles is a descriptor. P's engine may give memory back, or map
// other memory in its place, and CUDA tells nobody. So P compares the memory each second, and before it
// says that it has kept a transfer. If P finds other memory, it ends the links to which it has told the old one.
const (
	memoryDevice     memoryKind = 2
	memoryDeviceFile memoryKind = 3
	// memoryLacking is memory that P cannot share. In the place of a handle it has the reason.
	memoryLacking memoryKind = 4
)

// The spaces of these kinds, which are few.
const (
	deviceSpace     uint32 = 2
	deviceFileSpace uint32 = 3
	lackingSpace    uint32 = 4
)

// handout describes P's device memory, as it was at one time, for the processes that may open it.
type handout struct {
	shared []*cuda.Shared
	list   []memory
}

// check returns an error that names a region whose memory is not what P has told any more; nil if there is none.
func (s *handout) check() error {
	if s == nil {
		return nil
	}
	for _, one := range s.shared {
		if err := one.Check(); err != nil {
			return err
		}
	}
	return nil
}

// handouts keep the newest handout, which is told to each D that comes.
type handouts struct {
	mu  sync.Mutex
	now *handout
}

// share gives what lies under the regions now; nil: they lie in host memory.
func (t *Transport) share() (*handout, error) {
	if !t.places.any() {
		return nil, nil
	}
	g := &t.handouts
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.now != nil && g.now.check() == nil {
		return g.now, nil
	}
	s := &handout{}
	for _, d := range t.places.devices {
		one, err := d.Share()
		if err != nil {
			return nil, err
		}
		s.shared = append(s.shared, one)
		for i, a := range one.Allocations {
			m := memory{space: deviceSpace, kind: memoryDevice, base: a.Addr, size: a.Bytes}
			if a.Handle == nil {
				m.space, m.kind = deviceFileSpace, memoryDeviceFile
				m.open = func() (*os.File, error) { return one.File(i) }
			}
			m.handle = appendAllocation(nil, &a)
			s.list = append(s.list, m)
		}
	}
	if len(s.list) > mostShared {
		return nil, fmt.Errorf("the regions lie in %d allocations, and at most %d are shared with other processes", len(s.list), mostShared)
	}
	g.now = s
	return s, nil
}

// openable are the memories of this process that others may open. If one cannot be shared, New has already said so.
func (t *Transport) openable() (spaces, error) {
	if !t.cfg.Listen || !t.places.any() {
		return spacesOf(t.memories)
	}
	s, err := t.share()
	if err != nil {
		return nil, fmt.Errorf("%w: take rdma or tcp", err)
	}
	return spacesOf(slices.Concat(t.memories, s.list))
}

// mostShared leaves room for memory files.
const mostShared = mostMemories / 2

// lacking is the entry of P's list for memory that P cannot share.
func lacking(why error) *memory {
	text := why.Error()
	return &memory{space: lackingSpace, kind: memoryLacking, base: 1, size: 1, handle: []byte(text[:min(len(text), mostHandle)])}
}

// mostName is how many bytes of a region's name, or of a device's, P tells D.
const mostName = 80

// appendAllocation makes the handle of a memory on a device: two ids, the device, the region, CUDA's handle.
func appendAllocation(b []byte, a *cuda.Allocation) []byte {
	b = binary.BigEndian.AppendUint64(b, a.ID)
	b = binary.BigEndian.AppendUint64(b, a.Block)
	for _, text := range []string{a.Device, a.Region} {
		text = text[:min(len(text), mostName)]
		b = append(append(b, byte(len(text))), text...)
	}
	return append(b, a.Handle...)
}

var errHandle = errors.New("its handle is none of this version's: run the same kvconn on both")

// parseAllocation reads what appendAllocation has made. CUDA judges the handle in it.
func parseAllocation(m *memory) (a cuda.Allocation, err error) {
	b := m.handle
	if len(b) < 16 {
		return a, errHandle
	}
	a = cuda.Allocation{ID: binary.BigEndian.Uint64(b), Block: binary.BigEndian.Uint64(b[8:]), Addr: m.base, Bytes: m.size}
	b = b[16:]
	for _, text := range []*string{&a.Device, &a.Region} {
		if len(b) == 0 || len(b)-1 < int(b[0]) {
			return a, errHandle
		}
		*text, b = strings.ToValidUTF8(string(b[1:1+b[0]]), ""), b[1+b[0]:]
	}
	if (m.kind == memoryDevice) != (len(b) > 0) {
		return a, errHandle
	}
	if len(b) > 0 {
		a.Handle = b
	}
	return a, nil
}

// lookOut looks at times whether what links were told of devices is there still.
func (s *sender) lookOut() {
	for s.t.pause(s.t.cfg.lookAfter) {
		s.outdated()
	}
}

// outdated ends the links to which P has told memory that is not there any more. Then D closes the old memory and meets this
// agent anew. Transfers that were under way fail, with the region's name in the reason.
func (s *sender) outdated() {
	s.mu.Lock()
	var told []*outLink
	for _, tk := range s.peers {
		if tk.link != nil && tk.link.shared != nil {
			told = append(told, tk.link)
		}
	}
	s.mu.Unlock()
	checked := map[*handout]error{}
	for _, ol := range told {
		err, known := checked[ol.shared]
		if !known {
			err = ol.shared.check()
			checked[ol.shared] = err
		}
		if err != nil {
			s.partAnew(ol, err)
		}
	}
}

// partAnew ends a link to which P has told memory that is not there any more. If D does not hear why, it meets this agent anew when
// it next has a transfer from this agent.
func (s *sender) partAnew(ol *outLink, err error) {
	s.mu.Lock()
	ol.old = true
	s.mu.Unlock()
	ol.say(word(frameAnew, random{}))
	ol.flush()
	s.part(ol, fmt.Errorf("local: %w", err))
}

// Forget is told that memory is not what was registered. Until the agent knows the new memory, no D can meet this agent anew. So the
// links stay until Renew, or until the look of each second finds them. Meanwhile P says of no transfer in the old memory that it has
// kept it.
func (t *Transport) Forget(error) {}

// Renew ends the links to which P has told the old memory. From now on the new memory counts as what was registered.
func (t *Transport) Renew() { t.sender.outdated() }

// Lacks says that there is nothing to register.
func (t *Transport) Lacks() (why error, again bool) { return nil, false }
