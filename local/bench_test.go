package local

import (
	"bufio"
	"cmp"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/tcp"
)

// benchEnv tells a test binary that it is the prefill agent of a benchmark.
const benchEnv = "KVCONN_BENCH_LOCAL"

const benchMemory = 512 << 20 // of each agent; a transfer moves the half

// BenchmarkBeside moves scattered blocks out of another process: by a plain loop of
// process_vm_readv, 64 blocks or 4 MiB a call, by memcpy out of a shared mapping with one thread and with two, by
// this transport with one worker and with two, each out of P's process and out of a mapping, and by tcp. An operation is one round of all.
// Two threads' memcpy is what two of the machine's processors get out of its memory, and so the limit of two workers.
// The metrics are medians of the rounds; the ratios are medians of each round's.
func BenchmarkBeside(b *testing.B) {
	for _, block := range []uint64{4 << 10, 16 << 10, 64 << 10, 1 << 20} {
		b.Run(fmt.Sprint(block>>10, " KiB"), func(b *testing.B) {
			p := startBench(b, block)
			n := int(benchMemory / 2 / block)
			src, dst := shuffledBlocks(1, n, 2*n), shuffledBlocks(2, n, 2*n)
			p.scatter(src, dst)
			took := map[string][]float64{}
			for b.Loop() {
				for _, name := range []string{"loop", "memcpy1", "memcpy2", "local1", "local2", "mapped1", "mapped2", "tcp"} {
					began := time.Now()
					switch name {
					case "loop":
						p.loop(src, dst)
					case "memcpy1":
						p.memcpy(src, dst)
					case "memcpy2":
						var other sync.WaitGroup
						other.Go(func() { p.memcpy(src[:n/2], dst[:n/2]) })
						p.memcpy(src[n/2:], dst[n/2:])
						other.Wait()
					default:
						p.move(name)
					}
					took[name] = append(took[name], float64(benchMemory/2)/float64(time.Since(began).Nanoseconds()))
				}
			}
			for name, speeds := range took {
				b.ReportMetric(median(speeds), name+"-GB/s")
			}
			over := func(a, c string) (r []float64) {
				for i := range took[a] {
					r = append(r, took[a][i]/took[c][i])
				}
				return r
			}
			b.ReportMetric(median(over("local1", "loop")), "local1/loop")
			b.ReportMetric(median(over("local2", "loop")), "local2/loop")
			b.ReportMetric(median(over("local2", "tcp")), "local2/tcp")
			b.ReportMetric(median(over("mapped1", "memcpy1")), "mapped1/memcpy1")
			b.ReportMetric(median(over("mapped2", "memcpy1")), "mapped2/memcpy1")
			for _, name := range []string{"memcpy1", "local2", "mapped2"} {
				b.ReportMetric(median(over(name, "memcpy2")), name+"/memcpy2")
			}
		})
	}
}

// BenchmarkFirst is the time from P's offer of one small block to D's report of it, by each transport in turn, one round an operation. The
// metrics are medians and 99th percentiles of the rounds; the ratios to tcp are medians of each round's.
func BenchmarkFirst(b *testing.B) {
	p := startBench(b, 4<<10)
	p.scatter([]uint64{1}, []uint64{2})
	names := []string{"local2", "mapped2", "tcp"}
	took := map[string][]float64{}
	for b.Loop() {
		for _, name := range names {
			p.move(name)
			took[name] = append(took[name], float64(p.came.UnixNano()-p.offered())/1000)
		}
	}
	for _, name := range names {
		b.ReportMetric(median(took[name]), name+"-µs-median")
		b.ReportMetric(slices.Sorted(slices.Values(took[name]))[len(took[name])*99/100], name+"-µs-p99")
		if name == "tcp" {
			continue
		}
		var over []float64
		for i, us := range took[name] {
			over = append(over, us/took["tcp"][i])
		}
		b.ReportMetric(median(over), name+"/tcp")
	}
}

func median(list []float64) float64 { return slices.Sorted(slices.Values(list))[len(list)/2] }

func shuffledBlocks(seed uint64, n, limit int) []uint64 {
	out := make([]uint64, n)
	for i, p := range rand.New(rand.NewPCG(seed, 0)).Perm(limit)[:n] {
		out[i] = uint64(p)
	}
	return out
}

// benchPeer is D's side of a benchmark, and its pipes to P's process.
type benchPeer struct {
	*child
	b          *testing.B
	block      uint64
	say        *bufio.Writer
	own        []byte // D's memory
	peerMemory []byte // P's
	base       uint64 // of peerMemory in P's process
	transports map[string]core.Transport
	sink       *benchSink
	n          int
	dst        []kv.Segment
	came       time.Time
}

type benchSink struct{ came chan error }

func (s *benchSink) Received(_ core.TransferID, _ core.TransferStats, err error) { s.came <- err }
func (s *benchSink) Written(_ core.TransferID, _ core.TransferStats, err error)  { s.came <- err }
func (s *benchSink) PeerDown(core.AgentID, error)                                {}

func benchMap(fd int) []byte {
	mem, err := unix.Mmap(fd, 0, benchMemory, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_POPULATE)
	if err != nil {
		panic(err)
	}
	return mem
}

func benchLayout(mem []byte, block uint64) *kv.Layout {
	l, err := kv.NewLayout([]kv.Region{{Name: "k", Base: uint64(uintptr(unsafe.Pointer(&mem[0]))), BlockStride: block, BlockBytes: block, NumBlocks: uint32(benchMemory / block)}})
	if err != nil {
		panic(err)
	}
	return l
}

// benchTransports has P list its memory for the transports that map, if it has a file.
func benchTransports(l *kv.Layout, sink core.Sink, file *os.File) map[string]core.Transport {
	all := map[string]core.Transport{}
	for _, name := range benchNames[:4] {
		tr, err := New(Config{Listen: true, Workers: int(name[len(name)-1] - '0')}, l, sink)
		if err != nil {
			panic(err)
		}
		if file != nil && strings.HasPrefix(name, "mapped") {
			tr.memories = []memory{{space: fileSpace, kind: memoryFile, base: l.Regions[0].Base, size: benchMemory, handle: make([]byte, 8), open: func() (*os.File, error) {
				return os.Open(fmt.Sprintf("/proc/self/fd/%d", file.Fd()))
			}}}
		}
		all[name] = tr
	}
	net, err := tcp.New(tcp.Config{Listen: true, ListenHost: "127.0.0.1", AdvertiseHost: "127.0.0.1"}, l, sink)
	if err != nil {
		panic(err)
	}
	all["tcp"] = net
	return all
}

var benchNames = []string{"local1", "local2", "mapped1", "mapped2", "tcp"}

func startBench(b *testing.B, block uint64) *benchPeer {
	fd, err := unix.MemfdCreate("kvconn-bench", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		b.Fatal(err)
	}
	file := os.NewFile(uintptr(fd), "memory")
	if err := file.Truncate(benchMemory); err != nil {
		b.Fatal(err)
	}
	if _, err := unix.FcntlInt(file.Fd(), unix.F_ADD_SEALS, seals); err != nil {
		b.Fatal(err)
	}
	own, err := unix.Mmap(-1, 0, benchMemory, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON|unix.MAP_POPULATE)
	if err != nil {
		b.Fatal(err)
	}
	p := &benchPeer{b: b, block: block, own: own, peerMemory: benchMap(fd), sink: &benchSink{make(chan error, 16)}}
	p.child = startChild(b, fmt.Sprint(benchEnv, "=", block), func(c *exec.Cmd) { c.ExtraFiles = []*os.File{file} })
	p.say = bufio.NewWriter(p.in)
	p.transports = benchTransports(benchLayout(own, block), p.sink, nil)
	fmt.Sscan(p.line(), &p.base)
	for _, name := range benchNames {
		endpoint, ticket := p.met()
		if err := p.transports[name].Connect("p", endpoint, ticket); err != nil {
			b.Fatal(err)
		}
		if tr, near := p.transports[name].(*Transport); near {
			if err := tr.Usable(b.Context(), "p"); err != nil {
				b.Fatal(err)
			}
			if how := map[bool]string{false: "process_vm_readv", true: "mapping"}[strings.HasPrefix(name, "mapped")]; tr.How("p") != how {
				b.Fatalf("%s goes by %s", name, tr.How("p"))
			}
		}
	}
	b.Cleanup(func() {
		for _, w := range p.transports {
			_ = w.Close()
		}
		p.quit()
		_ = unix.Munmap(own)
		_ = unix.Munmap(p.peerMemory)
		file.Close()
	})
	return p
}

// scatter says which blocks move from now on.
func (p *benchPeer) scatter(src, dst []uint64) {
	p.dst = p.dst[:0]
	for i := range dst {
		p.dst = append(p.dst, kv.Segment{Offset: dst[i] * p.block, Length: p.block})
	}
	fmt.Fprintln(p.say, "scatter", len(src))
	for _, s := range src {
		fmt.Fprintln(p.say, s)
	}
	p.say.Flush()
	p.line()
}

func (p *benchPeer) move(name string) {
	p.n++
	id := core.TransferID(fmt.Sprint(p.n))
	grant, err := p.transports[name].Expect(id, "p", p.dst)
	if err != nil {
		p.b.Fatal(err)
	}
	fmt.Fprintf(p.say, "write %s %s %x\n", name, id, grant)
	p.say.Flush()
	err = <-p.sink.came
	p.came = time.Now()
	if err != nil {
		p.b.Fatal(err)
	}
}

// offered is when P's last write began. P's clock is this process's.
func (p *benchPeer) offered() (at int64) {
	fmt.Fprintln(p.say, "offered")
	p.say.Flush()
	fmt.Sscan(p.line(), &at)
	return at
}

// memcpy copies blocks out of the mapping by the thread that calls it.
func (p *benchPeer) memcpy(src, dst []uint64) {
	for i := range src {
		copy(p.own[dst[i]*p.block:][:p.block], p.peerMemory[src[i]*p.block:][:p.block])
	}
}

// loop is what the transport is held against: system calls with vectors, and nothing else.
func (p *benchPeer) loop(src, dst []uint64) {
	per := int(min(64, (4<<20)/p.block))
	var into, from [64]iovec
	own := uintptr(unsafe.Pointer(&p.own[0]))
	for len(src) > 0 {
		k := min(per, len(src))
		for i := range k {
			into[i] = iovec{own + uintptr(dst[i]*p.block), uintptr(p.block)}
			from[i] = iovec{uintptr(p.base + src[i]*p.block), uintptr(p.block)}
		}
		n, _, errno := syscall.Syscall6(unix.SYS_PROCESS_VM_READV, uintptr(p.pid), uintptr(unsafe.Pointer(&into)), uintptr(k), uintptr(unsafe.Pointer(&from)), uintptr(k), 0)
		if errno != 0 || uint64(n) != uint64(k)*p.block {
			p.b.Fatal(n, errno)
		}
		src, dst = src[k:], dst[k:]
	}
}

// serveBench is P's process.
func serveBench() {
	var block uint64
	if n, _ := fmt.Sscan(os.Getenv(benchEnv), &block); n == 0 {
		return
	}
	mem := benchMap(3)
	for i := 0; i < len(mem); i += 4096 {
		mem[i] = byte(i)
	}
	sink := &benchSink{make(chan error, 1<<16)}
	transports := benchTransports(benchLayout(mem, block), sink, os.NewFile(3, "memory"))
	fmt.Println(uint64(uintptr(unsafe.Pointer(&mem[0]))))
	for _, name := range benchNames {
		ticket, _ := transports[name].Admit("d")
		fmt.Printf("%s\n%x\n", transports[name].Endpoint(), ticket)
	}
	var pairs []kv.Pair
	var last int64
	in := bufio.NewReader(os.Stdin)
	for {
		line, err := in.ReadString('\n')
		if err != nil {
			os.Exit(0)
		}
		f := strings.Fields(line)
		switch cmp.Or(f[0], "") {
		case "scatter":
			var n int
			fmt.Sscan(f[1], &n)
			pairs = make([]kv.Pair, n)
			for i := range pairs {
				s, _ := in.ReadString('\n')
				fmt.Sscan(s, &pairs[i].SrcOffset)
				pairs[i].SrcOffset *= block
				pairs[i].Length = block
			}
			fmt.Println("ok")
		case "write":
			var grant []byte
			fmt.Sscanf(f[3], "%x", &grant)
			last = time.Now().UnixNano()
			transports[f[1]].Write(core.WriteOp{ID: core.TransferID(f[2]), Peer: "d", Grant: grant, Pairs: pairs})
			<-sink.came
		case "offered":
			fmt.Println(last)
		}
	}
}
