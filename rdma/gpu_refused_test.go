package rdma_test

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/kvconn/kvconn/rdma"
)

// refused opens an agent, which must not be.
func refused(t *testing.T, addr uintptr, bytes int, says ...string) {
	t.Helper()
	_, err := newGPUSide(t, newSignalBus(), "refused", "layer 3", addr, bytes, true, nil)
	for _, want := range says {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
}

// TestGPURefused: if a card takes no dma-buf, the error has the region, the card, why, and what to do.
func TestGPURefused(t *testing.T) {
	e := needsGPU(t)
	setVerbs(t, "nodmabuf")
	refused(t, e.Alloc(1<<20), 1<<20, `region "layer 3" in memory of `, "on RDMA device rxe", "registers no dma-buf", "modprobe nvidia-peermem")
	e.Bare("kvgpu_attribute", 0, 124, 0) // DMA_BUF_SUPPORTED
	t.Cleanup(func() { e.Bare("kvgpu_attribute", 0, 124, 1) })
	refused(t, e.Alloc(1<<20), 1<<20, `"layer 3"`, "open kernel modules", "modprobe nvidia-peermem")
}

// TestGPUInspect: Inspect says of each card what an agent finds when it registers its memory.
func TestGPUInspect(t *testing.T) {
	needsGPU(t)
	ask := func(registers bool) {
		t.Helper()
		r := rdma.Inspect(rdma.DefaultConfig())
		for _, d := range r.Devices {
			if d.DMABuf != registers || strings.Contains(d.NoDMABuf, "registers no dma-buf") == registers {
				t.Errorf("%s: %v, %q", d.Name, d.DMABuf, d.NoDMABuf)
			}
		}
		if len(r.Devices) == 0 {
			t.Error(r.Problem)
		}
	}
	ask(os.Getenv("KVCONN_LIBIBVERBS") != "") // the kernel's own answer, else the wrapper's
	setVerbs(t, "nodmabuf")
	ask(false)
}

// TestGPUUnflushable: a device whose memory cards must not write.
func TestGPUUnflushable(t *testing.T) {
	e := needsGPU(t)
	e.Bare("kvgpu_attribute", 0, 117, 0)
	e.Bare("kvgpu_attribute", 0, 118, 0)
	t.Cleanup(func() {
		e.Bare("kvgpu_attribute", 0, 117, 1)
	})
	addr := e.Alloc(1 << 20)
	refused(t, addr, 1<<20, "neither orders the writes of network cards")
	if _, err := newGPUSide(t, newSignalBus(), "prefill", "cache", addr, 1<<20, true, func(c *rdma.Config) { c.SendsOnly = true }); err != nil {
		t.Errorf("an agent that only sends: %v", err)
	}
}

func setVerbs(t *testing.T, words string) {
	t.Setenv("KVGPU_VERBS", words)
}

// TestGPUPeermem: without dma-bufs the memory is registered by its address, if the module is there.
func TestGPUPeermem(t *testing.T) {
	e := needsGPU(t)
	setVerbs(t, "nodmabuf,peermem")
	folder := t.TempDir()
	if err := os.Mkdir(filepath.Join(folder, "nvidia_peermem"), 0o777); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(rdma.Modules(folder))
	const bytes = 1 << 20
	from, to := e.Alloc(bytes), e.Alloc(bytes)
	p, d := gpuPair(t, bytes, from, to)
	e.Fill(from, bytes, 7)
	if err := move(p, d, "a"); err != nil || e.Wrong(to, bytes, 7) != 0 {
		t.Errorf("%d bytes were wrong: %v", e.Wrong(to, bytes, 7), err)
	}
	setVerbs(t, "nodmabuf") // the module is there, and the card's driver does not know it
	refused(t, to, bytes, `"layer 3"`, "by nvidia-peermem: ")
}

// garbled gives other bytes than the cards have written.
type garbled struct{ rdma.GPUs }

func (g garbled) Scratch(gpu int, bytes uint64) (rdma.GPUScratch, error) {
	s, err := g.GPUs.Scratch(gpu, bytes)
	return garbledScratch{s}, err
}

type garbledScratch struct{ rdma.GPUScratch }

func (g garbledScratch) Get(ctx context.Context, offset uint64, b []byte) error {
	err := g.GPUScratch.Get(ctx, offset, b)
	b[len(b)-1]++
	return err
}

// TestGPUTrial: a lane whose bytes do not come into the GPU's memory is not used.
func TestGPUTrial(t *testing.T) {
	e := needsGPU(t)
	b := newSignalBus()
	const bytes = 1 << 20
	p, err := newGPUSide(t, b, "prefill", "cache", e.Alloc(bytes), bytes, true, nil)
	if err != nil {
		t.Fatal(err)
	}
	d, err := newGPUSide(t, b, "decode", "cache", e.Alloc(bytes), bytes, true, func(c *rdma.Config) { c.GPUs = garbled{c.GPUs} })
	if err != nil {
		t.Fatal(err)
	}
	ticket, err := p.tr.Admit(d.id)
	if err == nil {
		err = d.tr.Connect(p.id, p.tr.Endpoint(), ticket)
	}
	if err != nil {
		t.Fatal(err)
	}
	const says = "1 of 1024 bytes that were written to memory of "
	if err := d.usable(p.agent); err == nil || !strings.Contains(err.Error(), says) {
		t.Errorf("%v, want %q", err, says)
	}
}

// gpuDefects are places of internal/fault in this room, each with the test that finds it.
var gpuDefects = []struct{ name, test, says string }{
	{"rdma-mr-offset", "TestGPUParts", "bytes were wrong"},
	{"rdma-flush", "TestGPUFlush", "bytes were wrong when D was told"},
	{"rdma-flush-revoked", "TestGPURevoke", "bytes appeared after the revoke"},
	{"rdma-flush", "TestGPUThatHalts", "was reported before its bytes were copied"},
	{"rdma-revoke-untold", "TestGPUThatHalts", "Revoke returned while bytes are copied"},
	{"rdma-flush-revoked", "TestGPURevokeWaits", "Revoke returned before the flush"},
	{"offer-at-once", "TestGPUMoments", "was read before its moment"},
	{"written-before-its-moment", "TestGPUMoments", "was written before its moment"},
	{"rdma-end-unchecked", "TestGPULookBeforeTheEnd", "the load ended with <nil>"},
	{"rdma-unverified", "TestGPUTrial", "want \"1 of 1024 bytes"},
	{"rdma-keeps-memory", "TestGPURenewed", ""},
	{"rdma-old-keys", "TestForgetKeys", "with keys of before"},
	{"rdma-plan-skip", "TestPlanStripes", ""},
	{"rdma-window-kept", "TestDealRandom", ""},
	{"rdma-lists-plans", "TestWritesOfManyPieces", "P holds"},
	{"rdma-unguarded-port", "TestGuardAtP", ""},
	{"rdma-unguarded-offer", "TestGuardAtD", ""},
	{"gpu-flush", "TestGPUFlush", ""},
	{"gpu-buffer-id", "TestGPURenewed", "want \"region cache"},
}

// TestGPUDefects: each defect is found by its test.
func TestGPUDefects(t *testing.T) {
	needsGPU(t)
	program := os.Getenv("KVCONN_DEFECTS")
	if program == "" {
		t.Skip("make rdma-test STAGES=gpu runs this")
	}
	for _, d := range gpuDefects {
		c := exec.Command(program, "-test.run", "^"+d.test+"$", "-test.timeout", "100s")
		c.Env = append(os.Environ(), "KVCONN_FAULT="+d.name)
		out, err := c.CombinedOutput()
		if err == nil || !strings.Contains(string(out), d.says) || !strings.Contains(string(out), "--- FAIL: "+d.test) {
			t.Errorf("%s does not find %s: %v\n%s", d.test, d.name, err, out)
		}
	}
}

// TestGPUDefectsList: the list has the places in the source, and each place is in the list.
func TestGPUDefectsList(t *testing.T) {
	files, err := filepath.Glob("*.go")
	if err != nil {
		t.Fatal(err)
	}
	place := regexp.MustCompile(`defect\.(?:On|Pick)\("([^"]+)"`)
	found := map[string]bool{}
	for _, f := range files {
		text, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		if strings.HasSuffix(f, "_test.go") {
			continue
		}
		for _, m := range place.FindAllSubmatch(text, -1) {
			found[string(m[1])] = true
		}
	}
	listed := map[string]bool{}
	for _, d := range gpuDefects {
		if strings.HasPrefix(d.name, "rdma-") && !found[d.name] {
			t.Errorf("there is no place for %s", d.name)
		}
		listed[d.name] = true
	}
	for name := range found {
		if !listed[name] {
			t.Errorf("no test finds %s", name)
		}
	}
}
