package natsbus

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvconn/kvconn/rig/leaktest"
)

// killedEnv tells a test binary to be a server with that token, which is killed. beforeEnv says what it does before.
const (
	killedEnv = "KVCONN_TEST_KILLED"
	beforeEnv = "KVCONN_TEST_BEFORE_KILLED"

	heir    = "heir"    // it starts a process that has its lock too, as a child has that it forks, and says its number
	further = "further" // its first thread ends before the others
)

func init() {
	if os.Getenv(beforeEnv) == further {
		runtime.LockOSThread() // TestMain runs on the first thread
	}
}

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
	switch os.Getenv(beforeEnv) {
	case heir:
		child := exec.Command("sleep", "60")
		child.ExtraFiles = []*os.File{s.store.lock}
		if err := child.Start(); err != nil {
			panic(err)
		}
		fmt.Println(child.Process.Pid)
	case further:
		_, _, _ = unix.Syscall(unix.SYS_EXIT, 0, 0, 0)
	}
	select {}
}

// killed is a process with a server.
type killed struct {
	*exec.Cmd
	said *bufio.Reader
	dir  string
}

// startKilled starts one. The test ends it, if it has not been waited for.
func startKilled(t *testing.T, token, before string) *killed {
	t.Helper()
	c := exec.Command("/proc/self/exe")
	c.Env, c.Stderr = append(os.Environ(), killedEnv+"="+token, beforeEnv+"="+before), os.Stderr
	c.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	out, err := c.StdoutPipe()
	if err == nil {
		err = c.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = c.Process.Kill()
		_ = c.Wait()
	})
	k := &killed{Cmd: c, said: bufio.NewReader(out)}
	k.dir = k.line(t)
	if tmp := os.Getenv("TMPDIR"); filepath.Dir(k.dir) != tmp {
		t.Fatalf("its folder is %q, and TMPDIR %q", k.dir, tmp)
	}
	return k
}

func (k *killed) line(t *testing.T) string {
	t.Helper()
	line, err := k.said.ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(line)
}

// temp gives the test a TMPDIR of its own, and says how many names are there.
func temp(t *testing.T) (names func() int) {
	t.Helper()
	tmp := t.TempDir()
	t.Setenv("TMPDIR", tmp)
	return func() int {
		t.Helper()
		all, err := os.ReadDir(tmp)
		if err != nil {
			t.Fatal(err)
		}
		return len(all)
	}
}

// until waits for what happens soon.
func until(t *testing.T, what string, is func() bool) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); !is(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("not within 20 s: %s", what)
		}
	}
}

// TestKilledLeavesNothing: a server that anybody may join has nothing in TMPDIR while it lives, so nothing is left when it is killed. The
// folder of another one goes also if no agent opens after that: one that lives removes it. It goes too while a child of the killed process
// has the lock, and while nobody has waited for the killed process.
func TestKilledLeavesNothing(t *testing.T) {
	for name, c := range map[string]struct {
		token, before string
		unwaited      bool
	}{
		"token ":                   {},
		"token sixteen characters": {token: "sixteen characters"},
		"heir":                     {token: "sixteen characters", before: heir},
		"heir of a zombie":         {token: "sixteen characters", before: heir, unwaited: true},
	} {
		passed := t.Run(name, func(t *testing.T) {
			leaktest.Check(t)
			left := temp(t)
			b, err := Open(Options{Identity: named("D"), sweep: time.Millisecond})
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = b.Close(t.Context()) }()
			k := startKilled(t, c.token, c.before)
			has := func() error { return nil }
			if c.before == heir {
				child := k.line(t)
				pid, _ := strconv.Atoi(child)
				defer func() { _ = syscall.Kill(pid, syscall.SIGKILL) }()
				has = func() error {
					to, err := os.Readlink("/proc/" + child + "/fd/3")
					if err == nil && !strings.Contains(to, storePrefix) {
						err = fmt.Errorf("it has %q open", to)
					}
					return err
				}
				until(t, "the child has the lock", func() bool { return has() == nil })
			}
			if living, want := left(), min(1, len(c.token)); living != want {
				t.Errorf("TMPDIR of a living server has %d folders, want %d", living, want)
			}
			_ = k.Process.Kill()
			if !c.unwaited {
				_ = k.Wait()
			}
			until(t, "the folder of the killed process is gone", func() bool { return left() == 0 })
			if err := has(); err != nil {
				t.Errorf("the child that had the lock: %v", err)
			}
		})
		if !passed {
			return // after a wait, which the others might have too
		}
	}
}

// TestRestartedLeavesNothing: what a server has left that was killed before the host was started anew cannot be told from what a server of
// another host has, which may live. It goes when the server has said nothing for long.
func TestRestartedLeavesNothing(t *testing.T) {
	leaktest.Check(t)
	left := temp(t)
	k := startKilled(t, "sixteen characters", "")
	lock := filepath.Join(k.dir, storeLock)
	o := thisOwner()
	o.Boot = "before"
	writeOwner(t, lock, o)
	_ = k.Process.Kill()
	_ = k.Wait()
	if n := sweepStores(t.Context(), os.Getenv("TMPDIR")); n != 0 || left() != 1 {
		t.Fatalf("%d folders are removed and %d are left: it might be another host's", n, left())
	}
	long := time.Now().Add(-silentFor - time.Hour)
	if err := os.Chtimes(lock, long, long); err != nil {
		t.Fatal(err)
	}
	b, err := Open(Options{Identity: named("D")})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = b.Close(t.Context()) }()
	until(t, "the folder is gone", func() bool { return left() == 0 })
}

// writeOwner has a lock's file name another owner.
func writeOwner(t *testing.T, lock string, o storeOwner) {
	t.Helper()
	text, err := json.Marshal(o)
	if err == nil {
		err = os.WriteFile(lock, text, 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// TestOwnerOfHeldLock: while a lock is held its folder goes only if its owner has ended for certain.
func TestOwnerOfHeldLock(t *testing.T) {
	leaktest.Check(t)
	temp(t)
	over := exec.Command("true")
	if err := over.Run(); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		change func(o *storeOwner)
		goes   bool
	}{
		"lives":                            {func(*storeOwner) {}, false},
		"another has its number":           {func(o *storeOwner) { o.Start++ }, true},
		"nobody has its number":            {func(o *storeOwner) { o.PID = over.Process.Pid }, true},
		"in another namespace":             {func(o *storeOwner) { o.PID, o.Namespaces = over.Process.Pid, o.Namespaces+"1" }, false},
		"in an unknown namespace":          {func(o *storeOwner) { o.PID, o.Namespaces = over.Process.Pid, "" }, false},
		"on another host":                  {func(o *storeOwner) { o.PID, o.Boot = over.Process.Pid, "another" }, false},
		"on a host without a boot id":      {func(o *storeOwner) { o.PID, o.Boot = over.Process.Pid, "" }, false},
		"without a number, which is a lie": {func(o *storeOwner) { o.PID = 0 }, false},
	} {
		t.Run(name, func(t *testing.T) {
			s, err := newStore("HELD")
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = s.remove() }()
			o := thisOwner()
			if o.Namespaces == "" || o.Start == 0 || o.Boot == "" {
				t.Fatalf("this process is not known: %+v", o)
			}
			c.change(&o)
			writeOwner(t, filepath.Join(s.dir, storeLock), o)
			if n := sweepStores(t.Context(), os.Getenv("TMPDIR")); (n == 1) != c.goes {
				t.Errorf("%d folders are removed", n)
			}
			if _, err := os.Stat(s.dir); (err != nil) != c.goes {
				t.Error(err)
			}
		})
	}
}

// TestOwnerWithoutFirstThread: a process whose first thread has ended looks like a zombie, and lives.
func TestOwnerWithoutFirstThread(t *testing.T) {
	leaktest.Check(t)
	left := temp(t)
	k := startKilled(t, "sixteen characters", further)
	stat := fmt.Sprintf("/proc/%d/stat", k.Process.Pid)
	until(t, "the first thread has ended", func() bool {
		text, err := os.ReadFile(stat)
		return err == nil && strings.Contains(string(text), ") Z ")
	})
	if n := sweepStores(t.Context(), os.Getenv("TMPDIR")); n != 0 || left() != 1 {
		t.Errorf("%d folders of living processes are removed", n)
	}
}

// TestOwnerTouches: a server that lives says so, by the times of all that it has in TMPDIR.
func TestOwnerTouches(t *testing.T) {
	leaktest.Check(t)
	temp(t)
	s, err := StartServer(ServerOptions{Token: "sixteen characters"})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = s.Close() }()
	b, err := Open(Options{Identity: s.opt.Identity, Server: s, Token: "sixteen characters", sweep: time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = b.Close(t.Context()) }()
	long := time.Now().Add(-silentFor)
	for _, path := range []string{s.store.dir, filepath.Join(s.store.dir, storeLock), filepath.Join(s.store.dir, storeJoin)} {
		if err := os.Chtimes(path, long, long); err != nil {
			t.Fatal(err)
		}
		until(t, path+" is touched", func() bool {
			st, err := os.Stat(path)
			return err == nil && st.ModTime().After(long.Add(silentFor/2))
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
