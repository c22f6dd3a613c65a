package local

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"strings"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/kv"
)

// idleEnv tells a test binary that it is a process of TestIdle or BenchmarkIdle, with so many links: the prefill agent ("p 256"), or the decode agent.
const idleEnv = "KVCONN_BENCH_IDLE"

// work is what the kernel counts of a process: its time on a processor, how often a thread of it has gone to sleep, its memory.
type work struct {
	ns, sleeps, rss uint64
}

func workOf(pid int) (w work) {
	tasks, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*", pid))
	for _, task := range tasks {
		var ns uint64
		stat, _ := os.ReadFile(task + "/schedstat") // a thread that has ended meanwhile counts as none
		fmt.Sscan(string(stat), &ns)
		w.ns += ns
		w.sleeps += statusOf(task, "voluntary_ctxt_switches:")
	}
	w.rss = statusOf(fmt.Sprintf("/proc/%d", pid), "VmRSS:") // KiB
	return w
}

func statusOf(dir, field string) (n uint64) {
	status, _ := os.ReadFile(dir + "/status")
	for line := range strings.Lines(string(status)) {
		if value, is := strings.CutPrefix(line, field); is {
			fmt.Sscan(value, &n)
		}
	}
	return n
}

func idleTransport(listen bool) (*Transport, *benchSink) {
	mem, err := unix.Mmap(-1, 0, whole, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	if err != nil {
		panic(err)
	}
	l, err := twoRegions(uint64(uintptr(unsafe.Pointer(&mem[0]))))
	if err != nil {
		panic(err)
	}
	sink := &benchSink{make(chan error, 1)}
	tr, err := New(Config{Listen: listen, ConnectTimeout: time.Minute}, l, sink) // all links meet at once
	if err != nil {
		panic(err)
	}
	return tr, sink
}

// idling is such a process. P's gives a ticket for each link. Then it does what it is told.
func idling() {
	var role string
	var n int
	if _, err := fmt.Sscan(os.Getenv(idleEnv), &role, &n); err != nil {
		return
	}
	tr, sink := idleTransport(role == "p")
	in := bufio.NewScanner(os.Stdin)
	if role == "p" {
		fmt.Println(tr.Endpoint())
		for i := range n {
			ticket, _ := tr.Admit(core.AgentID(fmt.Sprint("d", i)))
			fmt.Printf("%x\n", ticket)
		}
	}
	for in.Scan() {
		switch f := strings.Fields(in.Text()); f[0] {
		case "connect": // n peers, which are one process's
			in.Scan()
			endpoint := in.Text()
			for i := range n {
				var ticket []byte
				in.Scan()
				fmt.Sscanf(in.Text(), "%x", &ticket)
				if err := tr.Connect(core.AgentID(fmt.Sprint("p", i)), endpoint, ticket); err != nil {
					panic(err)
				}
			}
			for i := range n {
				if err := tr.Usable(context.Background(), core.AgentID(fmt.Sprint("p", i))); err != nil {
					panic(err)
				}
			}
		case "expect": // all blocks of the first peer
			grant, err := tr.Expect("t", "p0", []kv.Segment{{Region: 0, Length: whole / 2}, {Region: 1, Length: whole / 2}})
			if err != nil {
				panic(err)
			}
			fmt.Printf("%x\n", grant)
		case "write":
			var grant []byte
			fmt.Sscanf(f[1], "%x", &grant)
			tr.Write(core.WriteOp{ID: "t", Peer: "d0", Grant: grant, Pairs: []kv.Pair{{Length: whole}}})
		case "ended":
			if err := <-sink.came; err != nil {
				panic(err)
			}
		case "heap":
			var m runtime.MemStats
			runtime.GC()
			runtime.ReadMemStats(&m)
			fmt.Println(m.HeapAlloc + m.StackInuse)
		case "tidy":
			debug.FreeOSMemory()
		}
		fmt.Println("done")
	}
	os.Exit(0)
}

// idler is such a process, as the benchmark sees it.
type idler struct{ *child }

func startIdler(t testing.TB, role string, links int) idler {
	t.Helper()
	p := startChild(t, fmt.Sprint(idleEnv, "=", role, " ", links))
	t.Cleanup(p.quit)
	return idler{p}
}

func (p idler) does(what ...string) {
	p.told(what...)
	p.line()
}

// TestIdle: two processes with one link, over which a transfer has gone, have no processor time and wake no thread for three seconds.
// What Go's runtime does by itself (a collection each two minutes, and what follows) is seldom, and what this package would do is in
// each three seconds. So one quiet time of ten is enough, and a busy machine does not matter.
func TestIdle(t *testing.T) {
	p, d := startIdler(t, "p", 1), startIdler(t, "d", 1)
	d.does("connect", p.line(), p.line())
	d.told("expect")
	grant := d.line()
	d.line()
	p.does("write " + grant)
	p.does("ended")
	d.does("ended")
	var seen []string
	for range 10 {
		before := [2]work{workOf(p.pid), workOf(d.pid)}
		time.Sleep(3 * time.Second)
		busy := [2]work{workOf(p.pid), workOf(d.pid)}
		for i := range busy {
			busy[i].ns, busy[i].sleeps = busy[i].ns-before[i].ns, busy[i].sleeps-before[i].sleeps
		}
		if busy[0].ns+busy[0].sleeps+busy[1].ns+busy[1].sleeps == 0 {
			return
		}
		seen = append(seen, fmt.Sprintf("P %d µs, %d sleeps; D %d µs, %d sleeps", busy[0].ns/1000, busy[0].sleeps, busy[1].ns/1000, busy[1].sleeps))
	}
	t.Errorf("in each three seconds:\n%s", strings.Join(seen, "\n"))
}

// heap is the memory of Go's that the process has in use.
func (p idler) heap() (bytes uint64) {
	p.told("heap")
	fmt.Sscan(p.line(), &bytes)
	p.line()
	return bytes
}

// TestIdleMemory: a link that rests takes less than 64 KiB on either side.
func TestIdleMemory(t *testing.T) {
	const links, most = 256, 64 << 10
	all := [2]idler{startIdler(t, "p", links), startIdler(t, "d", links)}
	says := []string{"connect"}
	for range 1 + links {
		says = append(says, all[0].line())
	}
	none := [2]uint64{all[0].heap(), all[1].heap()}
	all[1].does(says...)
	for i, name := range []string{"P", "D"} {
		var each int64
		for end := time.Now().Add(30 * time.Second); ; time.Sleep(100 * time.Millisecond) { // what has met the others ends
			if each = (int64(all[i].heap()) - int64(none[i])) / links; each < most {
				break
			}
			if time.Now().After(end) {
				t.Fatalf("a link takes %d bytes on %s, want less than %d", each, name, most)
			}
		}
		t.Logf("a link takes %d bytes on %s", each, name)
	}
}

// BenchmarkIdle has two processes that do nothing, without a link and with many. Each operation is five seconds of that. What it says
// of P and of D: processor time, how often a thread went to sleep, and the memory of each link beyond that of none.
func BenchmarkIdle(b *testing.B) {
	for _, links := range []int{0, 1, 256} {
		b.Run(fmt.Sprint(links, " links"), func(b *testing.B) {
			all := [2]idler{startIdler(b, "p", links), startIdler(b, "d", links)}
			says := []string{"connect"}
			for range 1 + links {
				says = append(says, all[0].line())
			}
			both := func(tidy bool) (w [2]work) {
				for i, p := range all {
					if tidy {
						p.does("tidy")
					}
					w[i] = workOf(p.pid)
				}
				return w
			}
			none := both(true)
			all[1].does(says...)
			some := both(true)
			time.Sleep(3 * time.Second) // what the runtime has begun ends
			began, before := time.Now(), both(false)
			for b.Loop() {
				time.Sleep(5 * time.Second)
			}
			after, seconds := both(false), time.Since(began).Seconds()
			b.ReportMetric(0, "ns/op")
			for i, name := range []string{"P", "D"} {
				b.ReportMetric(float64(after[i].ns-before[i].ns)/seconds/1000, name+"-µs/s")
				b.ReportMetric(float64(after[i].sleeps-before[i].sleeps)/seconds, name+"-sleeps/s")
				if links > 1 {
					b.ReportMetric(float64(int64(some[i].rss)-int64(none[i].rss))/float64(links), name+"-KiB/link")
				}
			}
		})
	}
}
