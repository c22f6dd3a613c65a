// What local is held against: the same blocks read or copied in a loop, and nothing else.

package synthetic

import (
	"fmt"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/kvconn/kvconn/internal/callprobe"
	"github.com/kvconn/kvconn/kv"
)

// NewLike is a pool of the same shape, filled, in ordinary memory or in such as other processes can map.
func (p *Pool) NewLike(shared bool) (*Pool, error) {
	q, err := New(shared, p.layers, p.blocks, p.block)
	if err == nil {
		q.Clear()
	}
	return q, err
}

// loopVector and loopBytes bound one call of ReadLoop. More did not make it faster.
const (
	loopVector = 64
	loopBytes  = 4 << 20
)

// ReadLoop copies blocks of all layers out of another process's pool of the same shape, whose memory
// begins at base: by system calls, one after the other, and nothing else.
func (p *Pool) ReadLoop(pid int, base uint64, src, dst []kv.BlockID) (bytes int, err error) {
	type vector struct{ base, len uintptr }
	per := max(1, min(loopVector, loopBytes/p.block))
	var into, from [loopVector]vector
	if err := callprobe.Check(unix.SYS_PROCESS_VM_READV); err != nil {
		return 0, fmt.Errorf("process_vm_readv: %w", err)
	}
	own, size := uintptr(unsafe.Pointer(&p.mem[0])), uintptr(p.block)
	for l := range p.layers {
		for at := 0; at < len(src); at += per {
			k := min(per, len(src)-at)
			for i := range k {
				into[i] = vector{own + uintptr(l*p.blocks+int(dst[at+i]))*size, size}
				from[i] = vector{uintptr(base) + uintptr(l*p.blocks+int(src[at+i]))*size, size}
			}
			n, _, errno := syscall.Syscall6(unix.SYS_PROCESS_VM_READV, uintptr(pid), uintptr(unsafe.Pointer(&into)), uintptr(k), uintptr(unsafe.Pointer(&from)), uintptr(k), 0)
			if errno != 0 || int(n) != k*p.block {
				return bytes, fmt.Errorf("process_vm_readv of process %d: %d bytes of %d (%w)", pid, int(n), k*p.block, errno)
			}
			bytes += int(n)
		}
	}
	return bytes, nil
}

// CopyFrom copies blocks of all layers out of another pool of this process.
func (p *Pool) CopyFrom(source *Pool, src, dst []kv.BlockID) {
	for l := range p.layers {
		for i := range src {
			copy(p.mem[(l*p.blocks+int(dst[i]))*p.block:][:p.block], source.mem[(l*p.blocks+int(src[i]))*p.block:][:p.block])
		}
	}
}
