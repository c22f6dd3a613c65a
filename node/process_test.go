package node

import (
	"bufio"
	"cmp"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/rig/nettest"
	"github.com/kvconn/kvconn/shmem"
)

// TestMain is also the agent in a process of its own that tests kill and stop.
func TestMain(m *testing.M) {
	role := os.Getenv("KVCONN_TEST_ROLE")
	if role == "" {
		os.Exit(nettest.Main(m))
	}
	line, err := runRole(role, os.Getenv("KVCONN_TEST_ADDRESS"))
	if err != nil {
		fmt.Println("error:", err)
		os.Exit(1)
	}
	fmt.Println(line)
	_, _ = io.Copy(io.Discard, os.Stdin)
	os.Exit(0)
}

// runRole opens an agent: a prefill agent at a port that has one transfer announced and
// one offered, a decode agent that claims one and loads one, or a rank of a prefill
// engine. It prints its address, or that it has begun.
func runRole(role, address string) (string, error) {
	switch role {
	case "rank":
		return runRank()
	case "restricted":
		return runRestricted(address)
	case "unseen":
		return runUnseen(address)
	}
	cfg := testConfig(role)
	cfg.NATSURL, cfg.AdvertiseHost = os.Getenv("KVCONN_TEST_NATS"), "127.0.0.1"
	cfg.Transport, cfg.NATSToken = cmp.Or(os.Getenv("KVCONN_TEST_TRANSPORT"), cfg.Transport), os.Getenv("KVCONN_TEST_TOKEN")
	if role == RolePrefill {
		fmt.Sscan(address, &cfg.BootstrapPort)
		fmt.Sscan(os.Getenv("KVCONN_TEST_TCP_PORT"), &cfg.TCPPort)
	}
	a, err := Open(cfg, Options{bus: busFor(cfg)})
	if err != nil {
		return "", err
	}
	cache, err := mapped()
	if os.Getenv("KVCONN_TEST_SHARED") != "" {
		var m *shmem.Memory
		if m, err = shmem.Alloc(layers * numBlocks * blockBytes); err == nil {
			cache = m.Bytes()
		}
	}
	if err != nil {
		return "", err
	}
	for i := range cache {
		cache[i] = 7
	}
	if err := a.RegisterKVCaches(regions(cache)); err != nil {
		return "", err
	}
	if os.Getenv("KVCONN_TEST_SPOIL") != "" { // block 1 of each layer
		for l := range layers {
			if err := unix.Mprotect(cache[(l*numBlocks+1)*blockBytes:][:blockBytes], unix.PROT_NONE); err != nil {
				return "", err
			}
		}
	}
	if role == RolePrefill {
		_, err := a.Announce([]core.TransferID{"announced"})
		_, err2 := a.Offer([]core.OfferRequest{{ID: "offered", Selection: kv.Selection{Blocks: [][]kv.BlockID{{1, 2}}}}})
		return a.BootstrapAddress(), errors.Join(err, err2)
	}
	from := core.Target{Bootstrap: address}
	_, err = a.Claim([]core.ClaimRequest{{ID: "claimed", From: from}})
	_, err2 := a.StartLoad([]core.LoadRequest{{ID: "loaded", From: from, Selection: kv.Selection{Blocks: [][]kv.BlockID{{1}}}}})
	return "begun", errors.Join(err, err2)
}

// signals are what tests do to a process.
type signals struct {
	kill, stop func()
	pid        int
}

// process starts an agent in a process of its own and returns what it says.
func process(t *testing.T, role, address, cluster string) (said string, to signals) {
	t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), "KVCONN_TEST_ROLE="+role, "KVCONN_TEST_ADDRESS="+address, "KVCONN_TEST_NATS="+cluster)
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
	to.kill = func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		in.Close()
	}
	to.pid = cmd.Process.Pid
	to.stop = func() { _ = cmd.Process.Signal(syscall.SIGSTOP) }
	t.Cleanup(to.kill)
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil || strings.HasPrefix(line, "error:") {
		t.Fatalf("the %s process said %q: %v", role, line, err)
	}
	return strings.TrimSpace(line), to
}

func prefillProcess(t *testing.T, port int, cluster string) (address string, to signals) {
	t.Helper()
	return process(t, RolePrefill, fmt.Sprint(port), cluster)
}

func decodeProcess(t *testing.T, address string) (to signals) {
	t.Helper()
	_, to = process(t, RoleDecode, address, "")
	return to
}
