// Package attack has attacks on real agents in processes of their own, over loopback. Each
// test says what the attack got before it was mended, and fails if it gets anything.
package attack

import (
	"bufio"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"runtime"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/node"
	"github.com/kvconn/kvconn/rig/nettest"
)

const (
	layers     = 2
	numBlocks  = 64
	blockBytes = 4096

	// bound ends a hang. A machine that is four times slower needs less.
	bound = time.Minute
	// connectTimeout and peerTimeout are honest agents'. The attacker uses this machine too, so a peer that is slow is not gone.
	connectTimeout, peerTimeout = 15, 10 // seconds
)

const (
	victimVariable = "KVCONN_ATTACK_VICTIM"
	orderVariable  = "KVCONN_ATTACK_ORDER"
	routerVariable = "KVCONN_ATTACK_ROUTER"
)

// The items of a block whose region says its order: the smallest that there are.
const (
	tokens = 16
	heads  = blockBytes / tokens / kv.RegionAlign
)

// manyRegions are of a layer whose order is "many".
const manyRegions = 512

// ordered gives a region's blocks tokens and heads, in an order: "NHD" or "HND". "heads" makes
// a region of each head, "many" very many regions of opaque blocks. "" leaves the blocks opaque.
func ordered(r kv.Region, order string) (list []kv.Region) {
	r.Tokens, r.Heads, r.TotalHeads = tokens, heads, heads
	switch order {
	case "NHD":
		r.TokenStride, r.HeadStride = heads*kv.RegionAlign, kv.RegionAlign
	case "HND":
		r.TokenStride, r.HeadStride = kv.RegionAlign, tokens*kv.RegionAlign
	case "heads":
		r.BlockBytes, r.BlockStride, r.Heads = blockBytes/heads, blockBytes/heads, 1
		r.TokenStride, r.HeadStride = kv.RegionAlign, kv.RegionAlign
		for h := range uint32(heads) {
			r.FirstHead = h
			list = append(list, r)
			r.Base += numBlocks * r.BlockStride
		}
		return list
	case "many":
		r.Tokens, r.Heads, r.TotalHeads = 0, 0, 0
		r.BlockBytes, r.BlockStride = blockBytes/manyRegions, blockBytes/manyRegions
		for i, name := 0, r.Name; i < manyRegions; i++ {
			r.Name = fmt.Sprint(name, ".", i)
			list = append(list, r)
			r.Base += numBlocks * r.BlockStride
		}
		return list
	default:
		r.Tokens, r.Heads, r.TotalHeads = 0, 0, 0
	}
	return []kv.Region{r}
}

func TestMain(m *testing.M) {
	if cfg := os.Getenv(victimVariable); cfg != "" {
		runtime.MemProfileRate = 0 // as the library does
		beVictim(cfg)
		return
	}
	if args := os.Getenv(routerVariable); args != "" {
		beRouter(strings.Fields(args))
		return
	}
	flag.Parse()
	code := nettest.Main(m)
	for _, v := range settling {
		v.end()
	}
	if err := writeTable(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}

// said is a line of a victim.
type said struct {
	at               time.Time // when it came
	Ready            bool
	Bootstrap, Agent string
	Report, Code     string
	Reason           string
	Call             string
	MS               float64
	Bytes            map[string]int
	Stats            *node.Stats
}

// beVictim is an agent that does what its standard input says.
func beVictim(text string) {
	die := func(err error) {
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	}
	cfg, err := node.ParseConfig([]byte(text))
	die(err)
	memory, err := unix.Mmap(-1, 0, layers*numBlocks*blockBytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	die(err)
	var regions []kv.Region
	for i := range layers {
		regions = append(regions, ordered(kv.Region{Name: fmt.Sprintf("layer.%d", i+layers*cfg.PPRank), Base: uint64(uintptr(unsafe.Pointer(&memory[i*numBlocks*blockBytes]))),
			BlockStride: blockBytes, BlockBytes: blockBytes, NumBlocks: numBlocks}, os.Getenv(orderVariable))...)
	}
	a, err := node.Open(cfg, node.Options{})
	die(err)
	die(a.RegisterKVCaches(regions))
	out := json.NewEncoder(os.Stdout)
	lines := make(chan said, 1024)
	go func() {
		for l := range lines {
			die(out.Encode(l))
		}
	}()
	lines <- said{Ready: true, Bootstrap: a.BootstrapAddress(), Agent: string(a.ID())}
	go func() {
		for range a.Finished() {
			for _, r := range a.GetFinished() {
				lines <- said{Report: string(r.ID), Code: r.Code.String(), Reason: r.Reason}
			}
		}
	}()
	blocks := func(from, n string) [][]kv.BlockID {
		first, _ := strconv.Atoi(from)
		count, _ := strconv.Atoi(n)
		list := make([]kv.BlockID, count)
		for i := range list {
			list[i] = kv.BlockID(first + i)
		}
		return [][]kv.BlockID{list}
	}
	in := bufio.NewScanner(os.Stdin)
	for in.Scan() {
		f := strings.Fields(in.Text())
		began := time.Now()
		switch f[0] {
		case "fill":
			b, _ := strconv.Atoi(f[1])
			for i := range memory {
				memory[i] = byte(b)
			}
		case "offer":
			_, err = a.Offer([]core.OfferRequest{{ID: core.TransferID(f[1]), Selection: kv.Selection{Blocks: blocks(f[2], f[3])}}})
		case "load": // of engine p0, or of another
			f = append(f, "p0")
			_, err = a.StartLoad([]core.LoadRequest{{ID: core.TransferID(f[1]), From: core.Target{Bootstrap: f[4], EngineID: f[5], DPRank: -1}, Selection: kv.Selection{Blocks: blocks(f[2], f[3])}}})
		case "cancel":
			_, err = a.Cancel([]core.TransferID{core.TransferID(f[1])}, "the engine's wish")
		case "bytes": // of all blocks, or of some
			f = append(f, "0", strconv.Itoa(numBlocks))
			first, _ := strconv.Atoi(f[1])
			n, _ := strconv.Atoi(f[2])
			count := map[string]int{}
			for layer := range layers {
				at := (layer*numBlocks + first) * blockBytes
				for _, b := range memory[at : at+n*blockBytes] {
					count[strconv.Itoa(int(b))]++
				}
			}
			lines <- said{Call: "bytes", Bytes: count}
			continue
		case "free":
			free()
		case "stats":
			now := a.Stats()
			lines <- said{Call: "stats", Stats: &now}
			continue
		}
		line := said{Call: f[0], MS: float64(time.Since(began).Microseconds()) / 1000}
		if err != nil {
			line.Reason = err.Error()
		}
		lines <- line
	}
	die(a.Close())
}

// free gives back what nothing refers to any more: what pools have is free after a second collection.
func free() {
	runtime.GC()
	debug.FreeOSMemory()
}

// victim is a process with an agent.
type victim struct {
	t     testing.TB
	cmd   *exec.Cmd
	in    io.Writer
	lines chan said
	kept  []said
	boot  string
	id    string
	names string // its engine_id

	slowest    float64   // of its start_loads, in ms
	calm, peak float64   // its memory before the attack, and at the most; in MiB
	attack     string    // the test of the attack that it lives on after; "": none
	over       time.Time // when the attack ended
	keeps      float64   // MiB that may stay with it, for a reason that its attack's test says
}

func start(t testing.TB, cfg map[string]any) *victim {
	t.Helper()
	return startOrdered(t, "", cfg)
}

// startOrdered starts a victim whose blocks have tokens and heads; see ordered.
func startOrdered(t testing.TB, order string, cfg map[string]any) *victim {
	t.Helper()
	return startAs(t, exec.Command(os.Args[0]), order, cfg)
}

// startAs starts a victim by a command.
func startAs(t testing.TB, cmd *exec.Cmd, order string, cfg map[string]any) *victim {
	t.Helper()
	full := map[string]any{"engine_id": "d0", "transport": "tcp", "connect_timeout_s": connectTimeout, "peer_timeout_s": peerTimeout}
	if cfg["role"] != "decode" {
		maps.Copy(full, map[string]any{"engine_id": "p0", "bootstrap_host": "127.0.0.1", "bootstrap_port": 0, "tcp_listen_host": "127.0.0.1"})
	}
	maps.Copy(full, cfg)
	text, err := json.Marshal(full)
	if err != nil {
		t.Fatal(err)
	}
	cmd.Env = append(os.Environ(), victimVariable+"="+string(text), orderVariable+"="+order)
	v := &victim{t: t, names: full["engine_id"].(string)}
	v.run(cmd)
	ready := v.until(func(l said) bool { return l.Ready })
	v.boot, v.id = ready.Bootstrap, ready.Agent
	return v
}

// run starts the victim's process.
func (v *victim) run(cmd *exec.Cmd) {
	v.t.Helper()
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		v.t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		v.t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		v.t.Fatal(err)
	}
	v.cmd, v.in, v.lines = cmd, in, make(chan said, 1024)
	go func() {
		defer close(v.lines)
		s := bufio.NewScanner(out)
		for s.Scan() {
			var l said
			if json.Unmarshal(s.Bytes(), &l) == nil {
				l.at = time.Now()
				v.lines <- l
			}
		}
	}()
	v.t.Cleanup(func() {
		if v.attack == "" {
			v.end()
		}
	})
}

func (v *victim) end() {
	_ = v.cmd.Process.Kill()
	_ = v.cmd.Wait()
}

// until waits for a line. Reports that nobody has waited for yet are kept.
func (v *victim) until(f func(said) bool) said {
	v.t.Helper()
	if i := slices.IndexFunc(v.kept, f); i >= 0 {
		l := v.kept[i]
		v.kept = slices.Delete(v.kept, i, i+1)
		return l
	}
	timeout := time.After(bound)
	for {
		select {
		case l, ok := <-v.lines:
			if !ok {
				v.t.Fatal("the victim's process has ended")
			}
			if f(l) {
				return l
			}
			if l.Report != "" {
				v.kept = append(v.kept, l)
			}
		case <-timeout:
			v.t.Fatalf("the victim has not said it within %v", bound)
		}
	}
}

// say calls the agent, and returns how long that took.
func (v *victim) say(format string, args ...any) said {
	v.t.Helper()
	line := fmt.Sprintf(format, args...)
	if _, err := fmt.Fprintln(v.in, line); err != nil {
		v.t.Fatal(err)
	}
	call, _, _ := strings.Cut(line, " ")
	l := v.until(func(l said) bool { return l.Call == call })
	if call == "load" {
		v.slowest = max(v.slowest, l.MS)
	}
	return l
}

func (v *victim) report(id string) said {
	v.t.Helper()
	return v.until(func(l said) bool { return l.Report == id })
}

// mib is a process's memory: VmRSS is what is resident, VmHWM what was at the most.
func (v *victim) mib(what string) float64 {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", v.cmd.Process.Pid))
	if err != nil {
		v.t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(text), what+":")
	kib, err := strconv.Atoi(strings.Fields(rest)[0])
	if err != nil {
		v.t.Fatal(err)
	}
	return float64(kib) / 1024
}

// watch notes how much memory it has now.
func (v *victim) watch() {
	v.peak = max(v.peak, v.mib("VmRSS"))
	if v.calm == 0 {
		v.calm = v.peak
	}
}

// transfer moves four blocks that p has filled with a byte to d.
func transfer(t testing.TB, p, d *victim, id string) said {
	t.Helper()
	p.say("offer %s 4 4", id)
	d.say("load %s 20 4 %s", id, p.from())
	return d.report(id)
}

// from is what a load from it names.
func (v *victim) from() string { return v.boot + " " + v.names }
