package tcp

import (
	"errors"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"
	"golang.org/x/sys/unix"

	"github.com/kvconn/kvconn/core"
)

const descriptorsEnv = "KVCONN_TEST_DESCRIPTORS"

// TestOutOfDescriptors runs in a process of its own, which has few descriptors.
func TestOutOfDescriptors(t *testing.T) {
	if os.Getenv(descriptorsEnv) != "" {
		t.Run("accept", outOfDescriptorsAtAccept)
		t.Run("dial", outOfDescriptorsAtDial)
		return
	}
	cmd := exec.Command(os.Args[0], "-test.run=^TestOutOfDescriptors$", "-test.v")
	cmd.Env = append(os.Environ(), descriptorsEnv+"=1")
	out, err := cmd.CombinedOutput()
	if err != nil || !strings.Contains(string(out), "--- PASS: TestOutOfDescriptors/dial") {
		t.Fatalf("%v\n%s", err, out)
	}
}

// exhaust takes all descriptors that this process may have, until release.
func exhaust(t *testing.T) (release func()) {
	t.Helper()
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		t.Fatal(err)
	}
	limit.Cur = 128
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		t.Fatal(err)
	}
	var taken []int
	for {
		fd, err := unix.Open("/dev/null", unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if errors.Is(err, syscall.EMFILE) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		taken = append(taken, fd)
	}
	t.Cleanup(func() { closeAll(taken) })
	return func() {
		closeAll(taken)
		taken = nil
	}
}

func closeAll(fds []int) {
	for _, fd := range fds {
		unix.Close(fd)
	}
}

// outOfDescriptorsAtAccept: a stream that comes while P has no descriptor is served later.
func outOfDescriptorsAtAccept(t *testing.T) {
	log, lines := observer.New(zap.WarnLevel)
	p := newAgent(t, Config{Logger: zap.New(log)})
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	release := exhaust(t)
	if err := unix.Connect(fd, &unix.SockaddrInet4{Port: p.port, Addr: [4]byte{127, 0, 0, 1}}); err != nil {
		t.Fatal(err)
	}
	hello := p.hello(t, "early", 0, 1, 0)
	if _, err := unix.Write(fd, hello); err != nil {
		t.Fatal(err)
	}
	until(t, "the accept fails", func() bool {
		return lines.FilterMessage("accept").Len() > 0
	})
	release()
	grant := newRandom()
	p.Write(core.WriteOp{ID: "t", Peer: "early", Grant: grant[:], Pairs: p.pairs(t, allBlocks(1))})
	tv := unix.NsecToTimeval(bound.Nanoseconds())
	if err := unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &tv); err != nil {
		t.Fatal(err)
	}
	var b [headerSize]byte
	if n, err := unix.Read(fd, b[:]); err != nil || n != headerSize {
		t.Fatalf("%d bytes, %v", n, err)
	}
	var h header
	if err := h.decode(&b); err != nil || h.kind != frameData || h.key != grant {
		t.Fatalf("%+v, %v", h, err)
	}
	d := newAgent(t, Config{})
	move(t, p, d, "after")
}

// outOfDescriptorsAtDial: the cause is told, and the next Connect may succeed.
func outOfDescriptorsAtDial(t *testing.T) {
	p, d := newAgent(t, Config{}), newAgent(t, Config{})
	ticket := p.admit(t, "d")
	release := exhaust(t)
	if err := d.Connect("p", p.Endpoint(), ticket); err != nil {
		t.Fatal(err)
	}
	until(t, "the failure is told", func() bool { return len(d.sink.All("down", "")) == 1 })
	if err := d.sink.All("down", "")[0].Err; !errors.Is(err, syscall.EMFILE) || errors.Is(err, core.ErrConnectionLost) {
		t.Errorf("told %v, want what the kernel said", err)
	}
	release()
	move(t, p, d, "after")
}
