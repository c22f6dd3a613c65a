package chaos

import (
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/node"
	"github.com/kvconn/kvconn/rig/testdouble"
	double "github.com/kvconn/kvconn/rig/testdouble/engine"
)

// gpu is an engine's device, of the driver double: its memory is the process's own, at a second
// address that nobody but the double can read or write. The engine's work is queued on a stream.
type gpu struct {
	*double.Engine
	stream uintptr
}

// The ring is so small that transfers wait for slots.
const (
	gpuRing = 512 << 10
	gpuSlot = 32 << 10
)

// newGPU makes memory of so many bytes, as the process sees it and as the agent does.
func newGPU(size int) (g *gpu, mem []byte, base uint64, err error) {
	defer func() {
		if cause := recover(); cause != nil { // a Program has no other way to say it
			err = fmt.Errorf("the driver double: %v", cause)
		}
	}()
	fd, err := unix.MemfdCreate("kvconn-chaos", unix.MFD_CLOEXEC)
	if err != nil {
		return nil, nil, 0, err
	}
	file := os.NewFile(uintptr(fd), "memory")
	defer file.Close()
	if err := file.Truncate(int64(size)); err != nil {
		return nil, nil, 0, err
	}
	if mem, err = unix.Mmap(fd, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED); err != nil {
		return nil, nil, 0, err
	}
	g = &gpu{Engine: double.New(testdouble.Program{}, 0)}
	g.stream = g.Stream()
	return g, mem, uint64(g.Expose(file, size)), nil
}

// work is what the engine has queued on its device for a call: the call is made before it runs.
// With host memory all is done before the call.
type work struct {
	g      *gpu
	moment core.Moment
}

// begin queues work that ends with end.
func (g *gpu) begin(a *node.Agent) (w work, err error) {
	if g == nil {
		return w, nil
	}
	g.Hold(g.stream)
	if w.moment, err = a.Moment(0, g.stream); err != nil {
		g.Release(g.stream)
		return w, err
	}
	w.g = g
	return w, nil
}

// runs has the work run a moment later. During that time nothing may be read or written.
func (w work) runs(do func()) {
	if w.g == nil {
		return
	}
	long := 200 * time.Microsecond
	if w.moment%8 == 0 { // so long that a transfer could be over
		long = 20 * time.Millisecond
	}
	time.Sleep(long)
	do()
	w.g.Release(w.g.stream)
}

// unwritten checks blocks of a load while the engine still reads their old content.
func (e *engine) unwritten(id core.TransferID, ids []kv.BlockID) {
	for _, b := range ids {
		if err := e.mem.check(b, e.mem.paint[b], 0); err != nil {
			e.tell(event{Op: evWrong, ID: id, Error: "a block was written before its moment: " + err.Error(), At: now()})
			return
		}
	}
}
