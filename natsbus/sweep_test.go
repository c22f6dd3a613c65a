package natsbus

import (
	"bufio"
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/kvconn/kvconn/rig/leaktest"
)

// killedEnv tells a test binary to be a server with that token, which is killed.
const killedEnv = "KVCONN_TEST_KILLED"

func serveUntilKilled() {
	token, is := os.LookupEnv(killedEnv)
	if !is {
		return
	}
	s, err := StartServer(ServerOptions{Token: token})
	if err != nil {
		panic(err)
	}
	fmt.Println(s.store.dir)
	select {}
}

// TestKilledLeavesNothing: a server that anybody may join has nothing in TMPDIR while it lives, so nothing is left when it is killed. The
// folder of another one goes also if no agent opens after that: one that lives removes it.
func TestKilledLeavesNothing(t *testing.T) {
	for _, token := range []string{"", "sixteen characters"} {
		t.Run("token "+token, func(t *testing.T) {
			leaktest.Check(t)
			tmp := t.TempDir()
			t.Setenv("TMPDIR", tmp)
			left := func() int {
				all, err := os.ReadDir(tmp)
				if err != nil {
					t.Fatal(err)
				}
				return len(all)
			}
			b, err := Open(Options{Identity: named("D"), sweep: time.Millisecond})
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = b.Close(t.Context()) }()
			c := exec.Command("/proc/self/exe")
			c.Env, c.Stderr = append(os.Environ(), killedEnv+"="+token), os.Stderr
			c.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
			out, err := c.StdoutPipe()
			if err == nil {
				err = c.Start()
			}
			if err != nil {
				t.Fatal(err)
			}
			said, err := bufio.NewReader(out).ReadString('\n')
			living := left()
			_ = c.Process.Kill()
			_ = c.Wait()
			if err != nil || filepath.Dir(said) != tmp {
				t.Fatalf("%q, %v", said, err)
			}
			if want := min(1, len(token)); living != want {
				t.Errorf("TMPDIR of a living server has %d folders, want %d", living, want)
			}
			for end := time.Now().Add(20 * time.Second); left() > 0; time.Sleep(time.Millisecond) {
				if time.Now().After(end) {
					t.Fatal("the folder of the killed process is left")
				}
			}
		})
	}
}

// TestLockGoesLast: whoever is killed while it removes a folder leaves one that the next one removes.
func TestLockGoesLast(t *testing.T) {
	t.Setenv("TMPDIR", t.TempDir())
	s, err := newStore("KILLED")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.secret(); err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(filepath.Join(s.dir, "zeroth", "of", "the", "server's"), 0o700); err != nil {
		t.Fatal(err)
	}
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	if _, err := unix.InotifyAddWatch(fd, s.dir, unix.IN_DELETE); err != nil {
		t.Fatal(err)
	}
	if err := s.remove(); err != nil {
		t.Fatal(err)
	}
	b := make([]byte, 4096)
	n, err := unix.Read(fd, b)
	if err != nil {
		t.Fatal(err)
	}
	var gone []string
	for b = b[:n]; len(b) >= unix.SizeofInotifyEvent; {
		e := (*unix.InotifyEvent)(unsafe.Pointer(&b[0]))
		name := b[unix.SizeofInotifyEvent:][:e.Len]
		if e.Mask&unix.IN_DELETE != 0 {
			gone = append(gone, string(bytes.TrimRight(name, "\x00")))
		}
		b = b[unix.SizeofInotifyEvent+int(e.Len):]
	}
	if want := []string{storeJoin, "zeroth", storeLock}; !slices.Equal(gone, want) {
		t.Errorf("it removes %q, want %q", gone, want)
	}
	if _, err := os.Stat(s.dir); !os.IsNotExist(err) {
		t.Errorf("the folder is left: %v", err)
	}
}
