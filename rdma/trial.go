// Trials: if a side's regions lie on GPUs, P tries each lane before it uses the lane. The lane writes out of
// and into memory of each GPU, and D looks at the bytes. A card may register memory that it cannot reach, since
// ACS or an IOMMU may stand between the card and a GPU. No trial touches a region, whose blocks may be in use.

package rdma

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"

	"unsafe"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	defect "github.com/kvconn/kvconn/internal/fault"
)

const (
	trialBytes  = 1024                     // bytes that a lane writes to each GPU
	trialPlaces = 128                      // lanes that may be on trial at a time
	trialWords  = 2048                     // P reads a lane's bytes in a stream of so many words
	trialStream = trialPlaces * trialBytes // where the stream lies in an area
	areaBytes   = trialStream + trialWords*8
)

// area is memory for trials: on a GPU or, if the agent has none, the host's.
type area struct {
	memRange
	gpu     int // -1: host
	host    []byte
	scratch GPUScratch
}

func newHostArea() (*area, error) {
	mem, err := unix.Mmap(-1, 0, areaBytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		return nil, fmt.Errorf("%d bytes for probes: %w", areaBytes, err)
	}
	return &area{memRange{uint64(uintptr(unsafe.Pointer(&mem[0]))), areaBytes}, -1, mem, nil}, nil
}

func newGPUArea(gpus GPUs, gpu int) (*area, error) {
	s, err := gpus.Scratch(gpu, areaBytes)
	if err != nil {
		return nil, fmt.Errorf("%d bytes for probes on %s: %w", areaBytes, gpus.Name(gpu), err)
	}
	return &area{memRange{s.Addr(), areaBytes}, gpu, nil, s}, nil
}

func (a *area) put(ctx context.Context, offset uint64, b []byte) error {
	if a.scratch != nil {
		return a.scratch.Put(ctx, offset, b)
	}
	copy(a.host[offset:], b)
	return nil
}

// get copies what a card has written. The race detector does not see what a card writes.
func (a *area) get(ctx context.Context, offset uint64, b []byte) error {
	if a.scratch != nil {
		return a.scratch.Get(ctx, offset, b)
	}
	copy(b, a.host[offset:])
	return nil
}

func (a *area) close() error {
	if a.scratch != nil {
		return a.scratch.Close()
	}
	return unix.Munmap(a.host)
}

// where names the area's memory in errors.
func (t *Transport) where(a *area) string {
	if a.gpu < 0 {
		return "host memory"
	}
	return "memory of " + t.cfg.GPUs.Name(a.gpu)
}

// stream has the bytes that P's lanes write. Each lane begins at another word of it, so that D does not
// take the bytes of an earlier lane for those of a later one.
func stream(seed uint64) []byte {
	b := make([]byte, trialWords*8)
	r := rand.NewPCG(seed, 0)
	for i := 0; i < len(b); i += 8 {
		binary.LittleEndian.PutUint64(b[i:], r.Uint64())
	}
	return b
}

// streamAt is where a lane's bytes begin in the stream.
func streamAt(lane uint32) uint64 { return uint64(lane) % (trialWords - trialBytes/8) * 8 }

// areaSlots are the places in D's areas. Each lane that is on trial has one.
type areaSlots struct {
	mu   sync.Mutex
	used [trialPlaces]bool
}

// take takes a free place and returns its number. The numbers begin at 1.
func (p *areaSlots) take() (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for i, used := range p.used {
		if !used {
			p.used[i] = true
			return i + 1, nil
		}
	}
	return 0, fmt.Errorf("%d lanes are on trial already", trialPlaces)
}

// drop gives a lane's place back.
func (p *areaSlots) drop(l *lane) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if l.place > 0 {
		p.used[l.place-1] = false
		l.place = 0
	}
}

func (p *areaSlots) of(l *lane) int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return l.place
}

// openAreas makes the areas, and P's stream in each.
func (t *Transport) openAreas() error {
	ctx, cancel := context.WithTimeout(t.ctx, max(t.cfg.StallTimeout, t.cfg.ConnectTimeout))
	defer cancel()
	r := &t.memory
	if t.cfg.GPUs == nil {
		a, err := newHostArea()
		if err != nil {
			return err
		}
		r.areas = append(r.areas, a)
	} else {
		for gpu := range t.cfg.GPUs.Count() {
			a, err := newGPUArea(t.cfg.GPUs, gpu)
			if err != nil {
				return err
			}
			r.areas = append(r.areas, a)
		}
	}
	r.seed = rand.Uint64()
	for _, a := range r.areas {
		if err := a.put(ctx, trialStream, stream(r.seed)); err != nil {
			return fmt.Errorf("bytes for probes in %s: %w", t.where(a), err)
		}
	}
	return nil
}

// tries says whether the lanes to a D are put on trial.
func (cn *conn) tries(remote *remoteInfo) bool { return cn.t.cfg.GPUs != nil || remote.gpus > 0 }

// verify has D look at what lanes have written, and takes those into use whose bytes are right.
func (cn *conn) verify(remote *remoteInfo, written []*trial) {
	if len(written) == 0 {
		return
	}
	s := &signal{Kind: signalProbed, Ticket: cn.ticket, Seed: cn.t.memory.seed}
	for _, tr := range written {
		s.Lanes = append(s.Lanes, tr.lane.id)
	}
	rep, err := cn.t.ask(cn.peer, s, 2*cn.t.cfg.ConnectTimeout/3)
	if err == nil && len(rep.Lanes) != len(written) {
		err = fmt.Errorf("agent %s answers for %d lanes, it was asked for %d", cn.peer, len(rep.Lanes), len(written))
	}
	for i, tr := range written {
		switch {
		case err != nil:
			cn.failed(tr, fmt.Errorf("the peer has not verified what was written to it: %w", err))
		case rep.Lanes[i].Error != "":
			cn.failed(tr, fmt.Errorf("at the peer: %s", rep.Lanes[i].Error))
		default:
			cn.update(func(cn *conn) { cn.use(tr, remote) })
		}
	}
}

// probed answers P, which has written to the places of these lanes. A lane is looked at once.
func (src *source) probed(s *signal) (*reply, error) {
	t := src.r.t
	if !t.enter() {
		return nil, errClosed
	}
	defer t.wg.Done()
	src.verifying.Lock()
	defer src.verifying.Unlock()
	src.mu.Lock()
	err := src.knows(s)
	lanes := make([]*lane, len(s.Lanes))
	for i, id := range s.Lanes {
		lanes[i] = src.lanes[id]
	}
	src.mu.Unlock()
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(t.ctx, t.cfg.ConnectTimeout/2)
	defer cancel()
	wants, flushed := stream(s.Seed), t.flushWithin(ctx, 1<<t.gpuCount()-1)
	rep := &reply{Lanes: make([]laneAnswer, len(lanes))}
	for i, l := range lanes {
		switch {
		case l == nil:
			err = fmt.Errorf("lane %d is not open", s.Lanes[i])
		case l.verified:
			err = l.verdict
		case flushed != nil:
			err = flushed
		default:
			err = t.examine(ctx, l, wants[streamAt(l.id):][:trialBytes])
			l.verified, l.verdict = true, err
			t.memory.places.drop(l)
		}
		if err != nil {
			rep.Lanes[i].Error = shorten(err.Error())
			t.log.Warn("rdma lane does not carry bytes into memory", zap.String("peer", string(src.peer)), zap.Uint32("lane", s.Lanes[i]), zap.Error(err))
		}
	}
	return rep, nil
}

func (t *Transport) gpuCount() int {
	if t.cfg.GPUs == nil {
		return 0
	}
	return t.cfg.GPUs.Count()
}

// examine compares a lane's place in each area with what P has written there.
func (t *Transport) examine(ctx context.Context, l *lane, want []byte) error {
	place := t.memory.places.of(l)
	if place == 0 {
		return fmt.Errorf("lane %d is not on trial", l.id)
	}
	got := make([]byte, trialBytes)
	for _, a := range t.memory.areas {
		err := a.get(ctx, uint64(place-1)*trialBytes, got)
		if errors.Is(err, context.DeadlineExceeded) {
			err = errors.New("the GPU has not copied it in time")
		}
		if err != nil {
			return fmt.Errorf("what was written to %s cannot be read: %w", t.where(a), err)
		}
		if wrong := differing(got, want); wrong > 0 && !defect.On("rdma-unverified") {
			return fmt.Errorf("%d of %d bytes that were written to %s by %s are wrong: do ACS, an IOMMU or a virtual machine keep the cards of both sides from the GPUs? "+
				"(kvconn doctor says more; with transport tcp it works)", wrong, trialBytes, t.where(a), l.port.name)
		}
	}
	return nil
}

func differing(a, b []byte) (n int) {
	if bytes.Equal(a, b) {
		return 0
	}
	for i := range a {
		if a[i] != b[i] {
			n++
		}
	}
	return n
}
