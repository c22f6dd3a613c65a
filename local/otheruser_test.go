package local

import (
	"encoding/hex"
	"fmt"
	"net"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"unsafe"

	"github.com/kvconn/kvconn/rig/leaktest"
)

// thiefEnv tells a test binary to be a thief: the name of P's socket, P's ticket, which has leaked, P's
// process and an address in it.
const thiefEnv = "KVCONN_TEST_THIEF"

func init() {
	if words := strings.Fields(os.Getenv(thiefEnv)); len(words) == 4 {
		thief(words)
	}
}

// thief meets P as a decode agent would, and reads P's memory by itself.
func thief(words []string) {
	var pid int
	var address uint64
	ticket, _ := hex.DecodeString(words[1])
	fmt.Sscan(words[2], &pid)
	fmt.Sscan(words[3], &address)
	c, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: "@" + words[0], Net: "unix"})
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	h := hello{random(ticket).name(), newRandom()}
	_, err = c.Write(h.bytes())
	b, err2 := read(c, challengeSize)
	if err != nil || err2 != nil {
		fmt.Println(err, err2)
		os.Exit(1)
	}
	w, err := parseChallenge(b)
	_, errno := readRandom(linux{}, pid, address)
	fmt.Println(os.Getuid(), uint32(w.refused), w.address, w.proof == random{}, err, int(errno))
	os.Exit(0)
}

// TestThiefOfAnotherUser: a process of another user that has the pair's ticket is told no address and no
// proof, and the kernel lets it read nothing. Another user's process can be started by root only.
func TestThiefOfAnotherUser(t *testing.T) {
	leaktest.Check(t)
	p := start(t, "p", Config{}, nil)
	ticket := p.ticket("d")
	c := exec.Command("/proc/self/exe") // whose folder the other user may not enter
	c.Env = append(os.Environ(), fmt.Sprintf("%s=%s %x %d %d", thiefEnv, p.tr.here.name, ticket, os.Getpid(), uint64(uintptr(unsafe.Pointer(&p.mem[0])))))
	if os.Geteuid() != 0 {
		return // TestOtherUser poses as one
	}
	const nobody = 65534
	c.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}}
	want := fmt.Sprintln(nobody, uint32(refusedUser), 0, true, nil, int(syscall.EPERM))
	if out, err := c.CombinedOutput(); err != nil || string(out) != want {
		t.Errorf("%v: the thief says %q, want %q", err, out, want)
	}
}
