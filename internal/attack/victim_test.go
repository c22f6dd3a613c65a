// Package attack has attacks on real agents in processes of their own, over loopback. Each
// test says what the attack got before it was mended, and fails if it gets anything.
package attack

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/node"
)

const (
	layers     = 2
	numBlocks  = 64
	blockBytes = 4096

	bound = 15 * time.Second
)

const victimVariable = "KVCONN_ATTACK_VICTIM"

func TestMain(m *testing.M) {
	if cfg := os.Getenv(victimVariable); cfg != "" {
		beVictim(cfg)
		return
	}
	os.Exit(m.Run())
}

// said is a line of a victim.
type said struct {
	Ready            bool
	Bootstrap, Agent string
	Report, Code     string
	Reason           string
	Call             string
	MS               float64
	Bytes            map[string]int
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
	var regions []core.Region
	for i := range layers {
		regions = append(regions, core.Region{Name: fmt.Sprintf("layer.%d", i+layers*cfg.PPRank), Base: uint64(uintptr(unsafe.Pointer(&memory[i*numBlocks*blockBytes]))),
			BlockStride: blockBytes, BlockBytes: blockBytes, NumBlocks: numBlocks})
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
	blocks := func(from, n string) [][]core.BlockID {
		first, _ := strconv.Atoi(from)
		count, _ := strconv.Atoi(n)
		list := make([]core.BlockID, count)
		for i := range list {
			list[i] = core.BlockID(first + i)
		}
		return [][]core.BlockID{list}
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
			_, err = a.Offer([]core.OfferRequest{{ID: core.TransferID(f[1]), Selection: core.Selection{Blocks: blocks(f[2], f[3])}}})
		case "load":
			_, err = a.StartLoad([]core.LoadRequest{{ID: core.TransferID(f[1]), From: core.Target{Bootstrap: f[4], EngineID: "p0", DPRank: -1}, Selection: core.Selection{Blocks: blocks(f[2], f[3])}}})
		case "bytes":
			count := map[string]int{}
			for _, b := range memory {
				count[strconv.Itoa(int(b))]++
			}
			lines <- said{Call: "bytes", Bytes: count}
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

// victim is a process with an agent.
type victim struct {
	t     testing.TB
	cmd   *exec.Cmd
	in    io.Writer
	lines chan said
	boot  string
	id    string
}

func start(t testing.TB, cfg map[string]any) *victim {
	t.Helper()
	full := map[string]any{"engine_id": "p0", "transport": "tcp", "bootstrap_host": "127.0.0.1", "bootstrap_port": 0, "tcp_listen_host": "127.0.0.1"}
	if cfg["role"] == "decode" {
		full = map[string]any{"engine_id": "d0", "transport": "tcp"}
	}
	for k, v := range cfg {
		full[k] = v
	}
	text, err := json.Marshal(full)
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), victimVariable+"="+string(text))
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	v := &victim{t: t, cmd: cmd, in: in, lines: make(chan said, 1024)}
	go func() {
		defer close(v.lines)
		s := bufio.NewScanner(out)
		for s.Scan() {
			var l said
			if json.Unmarshal(s.Bytes(), &l) == nil {
				v.lines <- l
			}
		}
	}()
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	ready := v.until(func(l said) bool { return l.Ready })
	v.boot, v.id = ready.Bootstrap, ready.Agent
	return v
}

// until waits for a line.
func (v *victim) until(f func(said) bool) said {
	v.t.Helper()
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
	return v.until(func(l said) bool { return l.Call == call })
}

func (v *victim) report(id string) said {
	v.t.Helper()
	return v.until(func(l said) bool { return l.Report == id })
}

// mib is a process's resident memory.
func (v *victim) mib() float64 {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", v.cmd.Process.Pid))
	if err != nil {
		v.t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(text), "VmRSS:")
	kib, err := strconv.Atoi(strings.Fields(rest)[0])
	if err != nil {
		v.t.Fatal(err)
	}
	return float64(kib) / 1024
}

// transfer moves four blocks that p has filled with a byte to d.
func transfer(t testing.TB, p, d *victim, id string) said {
	t.Helper()
	p.say("offer %s 4 4", id)
	d.say("load %s 20 4 %s", id, p.boot)
	return d.report(id)
}
