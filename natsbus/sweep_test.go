package natsbus

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"

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

// TestRemovedInItsPlace: who removes its folder removes what it has made. What another user has put in the folder's place, as where the temporary
// folder is a group's, stays; and a folder that a cleaner has removed is no error.
func TestRemovedInItsPlace(t *testing.T) {
	tmp, others := t.TempDir(), t.TempDir()
	t.Setenv("TMPDIR", tmp)
	if err := os.WriteFile(filepath.Join(others, "kept"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for name, put := range map[string]func(dir string) error{
		"nothing":       os.RemoveAll,
		"a link":        func(dir string) error { return errors.Join(os.RemoveAll(dir), os.Symlink(others, dir)) },
		"what was made": func(dir string) error { return os.MkdirAll(filepath.Join(dir, "of", "the", "server's"), 0o700) },
	} {
		t.Run(name, func(t *testing.T) {
			s, err := newStore("OWN")
			if err != nil {
				t.Fatal(err)
			}
			if _, err := s.secret(); err != nil {
				t.Fatal(err)
			}
			if err := put(s.dir); err != nil {
				t.Fatal(err)
			}
			if err := errors.Join(s.remove(), s.remove()); err != nil {
				t.Error(err)
			}
			if all, err := os.ReadDir(tmp); err != nil || len(all) > 0 {
				t.Errorf("it leaves %v, %v", all, err)
			}
			if _, err := os.Stat(filepath.Join(others, "kept")); err != nil {
				t.Error(err)
			}
		})
	}
}
