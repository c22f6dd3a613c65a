// The bare loop is what tcp is held against: blocking calls of writev and readv over the same
// blocks, on as many connections, with a thread for each end of each, and nothing else.

package synthetic

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"runtime"
	"sync"
	"syscall"
	"time"
	"unsafe"

	"github.com/kvconn/kvconn/kv"
)

// One call has at most so many blocks and bytes. More did not make it faster.
const (
	bareVector = 512
	bareBytes  = 2 << 20
)

// bareTimeout bounds the loop as a whole.
const bareTimeout = 60 * time.Second

// piece is one block of the loop, as the kernel's struct iovec.
type piece struct{ base, len uintptr }

// share is one connection's part of some blocks of all layers.
func (p *Pool) share(ids []kv.BlockID, stream, streams int) []piece {
	all := p.layers * len(ids)
	from, to := all*stream/streams, all*(stream+1)/streams
	out := make([]piece, 0, to-from)
	base, size := uintptr(unsafe.Pointer(&p.mem[0])), uintptr(p.block)
	for i := from; i < to; i++ {
		out = append(out, piece{base + uintptr(i/len(ids)*p.blocks+int(ids[i%len(ids)]))*size, size})
	}
	return out
}

// move is the loop of one end of one connection.
func move(trap uintptr, fd int, list []piece) error {
	if len(list) == 0 { // more connections than blocks
		return nil
	}
	per := max(1, min(bareVector, bareBytes/int(list[0].len)))
	for len(list) > 0 {
		v := list[:min(per, len(list))]
		list = list[len(v):]
		for len(v) > 0 {
			n, _, errno := syscall.Syscall(trap, uintptr(fd), uintptr(unsafe.Pointer(&v[0])), uintptr(len(v)))
			switch {
			case errno == syscall.EINTR:
				continue
			case errno != 0:
				return errno
			case n == 0:
				return io.ErrUnexpectedEOF
			}
			for len(v) > 0 && n >= v[0].len {
				n -= v[0].len
				v = v[1:]
			}
			if n > 0 {
				v[0].base, v[0].len = v[0].base+n, v[0].len-n
			}
		}
	}
	return nil
}

// blocking gives a connection's descriptor to do, whose calls block their thread. It closes the connection.
func blocking(c *net.TCPConn, do func(fd int) error) error {
	file, err := c.File()
	c.Close()
	if err != nil {
		return err
	}
	defer file.Close()
	fd := int(file.Fd())
	bound := syscall.NsecToTimeval(bareTimeout.Nanoseconds())
	err = errors.Join(syscall.SetNonblock(fd, false),
		syscall.SetsockoptTimeval(fd, syscall.SOL_SOCKET, syscall.SO_RCVTIMEO, &bound),
		syscall.SetsockoptTimeval(fd, syscall.SOL_SOCKET, syscall.SO_SNDTIMEO, &bound))
	if err != nil {
		return err
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	return do(fd)
}

// bare listens for the connections of a loop that sends blocks. It answers with the port.
func (p *prefill) bare(o Command) (Answer, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return Answer{}, err
	}
	pool, ids := p.pool, p.pool.Choose(o.Count, int64(o.Transfer), o.Adjacent)
	p.loops.Add(o.Streams)
	go func() {
		defer l.Close()
		_ = l.(*net.TCPListener).SetDeadline(time.Now().Add(bareTimeout))
		for left := o.Streams; left > 0; left-- {
			c, err := l.Accept()
			if err != nil {
				p.loops.Add(-left)
				return
			}
			go func() {
				defer p.loops.Done()
				_ = blocking(c.(*net.TCPConn), func(fd int) error {
					var number [8]byte
					if _, err := syscall.Read(fd, number[:]); err != nil {
						return err
					}
					return move(syscall.SYS_WRITEV, fd, pool.share(ids, int(binary.BigEndian.Uint64(number[:])), o.Streams))
				})
			}()
		}
	}()
	return Answer{Port: l.Addr().(*net.TCPAddr).Port}, nil
}

// ReceiveBare receives, by the bare loop, the blocks that the prefill side chose for a transfer.
// It tells that side to send them, and says how long the bytes took.
func (p *Pool) ReceiveBare(peer *Process, o Command, dst []kv.BlockID) (took time.Duration, err error) {
	o.Op = "bare"
	a, err := peer.Ask(o)
	if err != nil {
		return 0, err
	}
	errs := make([]error, o.Streams)
	var ready, ended sync.WaitGroup
	ready.Add(o.Streams)
	begin := make(chan struct{})
	for i := range o.Streams {
		ended.Go(func() {
			c, err := net.Dial("tcp", fmt.Sprint("127.0.0.1:", a.Port))
			if err != nil {
				ready.Done()
				errs[i] = err
				return
			}
			list := p.share(dst, i, o.Streams)
			errs[i] = blocking(c.(*net.TCPConn), func(fd int) error {
				ready.Done()
				<-begin
				if _, err := syscall.Write(fd, binary.BigEndian.AppendUint64(nil, uint64(i))); err != nil {
					return err
				}
				return move(syscall.SYS_READV, fd, list)
			})
		})
	}
	ready.Wait()
	began := time.Now()
	close(begin)
	ended.Wait()
	if err := errors.Join(errs...); err != nil {
		return 0, fmt.Errorf("the bare loop: %w", err)
	}
	return time.Since(began), nil
}

// ProcessorTime is what this process has used of processors.
func ProcessorTime() (time.Duration, error) {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		return 0, os.NewSyscallError("getrusage", err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano()), nil
}

// ProcessorTime is what the second process has used of processors.
func (p *Process) ProcessorTime() (time.Duration, error) {
	a, err := p.Ask(Command{Op: "processor"})
	return a.Processor, err
}
