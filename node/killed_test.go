package node

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/rig/leaktest"
)

// belongings are a process's open files, its mappings that have a name or are shared (others are the runtime's), and its unix
// sockets as /proc/net/unix has them.
func belongings(t *testing.T, pid int) (files, mappings, sockets []string) {
	t.Helper()
	proc := fmt.Sprintf("/proc/%d/", pid)
	all, err := os.ReadDir(proc + "fd")
	maps, err2 := os.ReadFile(proc + "maps")
	list, err3 := os.ReadFile("/proc/net/unix")
	if err != nil || err2 != nil || err3 != nil {
		t.Fatal(err, err2, err3)
	}
	for _, e := range all {
		to, err := os.Readlink(proc + "fd/" + e.Name())
		if err != nil || strings.HasPrefix(to, "/proc/") { // the list's own is gone
			continue
		}
		files = append(files, to)
		inode, socket := strings.CutPrefix(strings.TrimSuffix(to, "]"), "socket:[")
		for line := range strings.Lines(string(list)) {
			if f := strings.Fields(line); socket && len(f) > 6 && f[6] == inode {
				sockets = append(sockets, strings.Join(f[6:], " "))
			}
		}
	}
	for line := range strings.Lines(string(maps)) {
		if f := strings.Fields(line); len(f) > 5 && !strings.HasPrefix(f[5], "[") || strings.HasSuffix(f[1], "s") {
			mappings = append(mappings, strings.TrimSpace(line))
		}
	}
	return files, mappings, sockets
}

func sockets(files []string) int { return strings.Count(strings.Join(files, " "), "socket:[") }

// ours are the mappings of memory that kvconn has allocated.
func ours(mappings []string) int {
	n := 0
	for _, m := range mappings {
		n += strings.Count(m, "memfd:kvconn")
	}
	return n
}

// inFolder lists what has kvconn's name.
func inFolder(t *testing.T, dir string) (names []string) {
	t.Helper()
	all, err := os.ReadDir(dir)
	if err != nil && !os.IsNotExist(err) {
		t.Fatal(err)
	}
	for _, e := range all {
		if strings.Contains(e.Name(), "kvconn") {
			names = append(names, e.Name())
		}
	}
	return names
}

// survivor is what this process and the host have before the other process comes.
type survivor struct {
	t                     *testing.T
	files, mappings, shms []string
}

func survives(t *testing.T) *survivor {
	t.Helper()
	s := &survivor{t: t, shms: inFolder(t, "/dev/shm")}
	s.files, s.mappings, _ = belongings(t, os.Getpid())
	return s
}

// met checks that this process has a socket that it had not before.
func (s *survivor) met() {
	s.t.Helper()
	if files, _, _ := belongings(s.t, os.Getpid()); sockets(files) <= sockets(s.files) {
		s.t.Errorf("no socket is the pair's: %q", files)
	}
}

// kills kills a process that has sockets of local's, and checks that nothing is left of it.
func (s *survivor) kills(to signals) {
	t := s.t
	t.Helper()
	_, _, its := belongings(t, to.pid)
	if len(its) == 0 {
		t.Fatal("the process has no unix socket")
	}
	to.kill()
	b, err := os.ReadFile("/proc/net/unix")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(b)) {
		if f := strings.Fields(line); len(f) > 6 && slices.Contains(its, strings.Join(f[6:], " ")) {
			t.Errorf("its socket is left: %s", line)
		}
	}
	until(t, "this process has what it had", func() bool {
		files, mappings, _ := belongings(t, os.Getpid())
		return len(files) <= len(s.files) && len(mappings) <= len(s.mappings)
	})
	if shms := inFolder(t, "/dev/shm"); !slices.Equal(shms, s.shms) {
		t.Errorf("/dev/shm has %q, before %q", shms, s.shms)
	}
}

// stopped says whether no thread of a process runs.
func stopped(t *testing.T, pid int) bool {
	t.Helper()
	threads, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", pid))
	if err != nil || len(threads) == 0 {
		t.Fatal("no threads", err)
	}
	return !slices.ContainsFunc(threads, func(name string) bool {
		b, err := os.ReadFile(name)
		_, state, _ := strings.Cut(string(b), ") ")
		return err != nil || !strings.HasPrefix(state, "T")
	})
}

// cacheOf is over memory of kvconn's own, in this process and in its children, or over the engine's.
func cacheOf(t *testing.T, allocated bool) []byte {
	t.Helper()
	t.Setenv("KVCONN_TEST_TRANSPORT", viaLocal)
	t.Setenv("KVCONN_TEST_SHARED", map[bool]string{true: "1"}[allocated])
	if allocated {
		return shared(t)
	}
	return make([]byte, cacheBytes)
}

// openApart opens an agent by local, of a test that leaves no goroutine and has a TMPDIR of its own.
func openApart(t *testing.T, cfg Config, allocated bool) (agent *side, temp string) {
	t.Helper()
	leaktest.Check(t)
	temp = t.TempDir()
	t.Setenv("TMPDIR", temp)
	agent, _ = openOver(t, cfg, cacheOf(t, allocated))
	return agent, temp
}

var memories = map[string]bool{"memory of kvconn's own": true, "the engine's memory": false}

// TestPrefillKilledLeavesNothing: of a prefill process that is killed under a load by local the host has nothing, and the decode
// process has as many descriptors and mappings as before it came.
func TestPrefillKilledLeavesNothing(t *testing.T) {
	for name, allocated := range memories {
		t.Run(name, func(t *testing.T) {
			d, temp := openApart(t, forced(RoleDecode, viaLocal), allocated)
			s := survives(t)
			address, to := prefillProcess(t, 0, "")
			d.load("offered", address, 3, 4)
			if r := d.want("offered", core.OK); r.Transport != viaLocal || d.block(0, 4)[0] != 7 {
				t.Errorf("%+v", r)
			}
			s.met()
			_, mappings, _ := belongings(t, os.Getpid())
			if got, want := ours(mappings)-ours(s.mappings), map[bool]int{true: 1}[allocated]; got != want {
				t.Errorf("%d of the prefill process's memories are mapped, want %d: %q", got, want, mappings)
			}
			d.load("announced", address, 5)
			until(t, "the load waits", func() bool { return d.Stats().LoadsWaiting == 1 })
			s.kills(to)
			d.want("announced", core.PeerLost)
			if all, err := os.ReadDir(temp); err != nil || len(all) > 0 {
				t.Errorf("TMPDIR has %v, %v", all, err)
			}
		})
	}
}

// TestDecodeKilledLeavesNothing: the same of a decode process that is stopped under a load and killed, and the prefill process.
func TestDecodeKilledLeavesNothing(t *testing.T) {
	for name, allocated := range memories {
		t.Run(name, func(t *testing.T) {
			cfg := forced(RolePrefill, viaLocal)
			soon(&cfg)
			p, temp := openApart(t, cfg, allocated)
			s, before := survives(t), inFolder(t, temp)
			to := decodeProcess(t, p.BootstrapAddress())
			p.knows(2) // claimed and loaded: the two have met
			s.met()
			_, mappings, _ := belongings(t, to.pid)
			if got, want := ours(mappings), map[bool]int{true: 2}[allocated]; got != want {
				t.Errorf("the decode process has %d mappings of allocated memory, want %d: its own and the prefill process's", got, want)
			}
			to.stop()
			until(t, "all of its threads are stopped", func() bool { return stopped(t, to.pid) })
			p.offer("loaded", 3)
			until(t, "the write has begun", func() bool { s := p.Stats(); return len(s.Pairs) == 1 && s.Pairs[0].Transport == viaLocal })
			s.kills(to)
			p.want("loaded", core.PeerLost)
			if after := inFolder(t, temp); !slices.Equal(after, before) {
				t.Errorf("TMPDIR has %q, before %q", after, before)
			}
			p.offer("claimed", 1)
			p.want("claimed", core.PeerLost)
		})
	}
}

// TestKilledWithToken: where a deployment has a token, a prefill agent keeps the secret of local ranks in a folder of TMPDIR. If the agent's
// process is killed, the next agent that opens removes the folder.
func TestKilledWithToken(t *testing.T) {
	t.Setenv("KVCONN_TEST_TOKEN", theToken)
	cfg := forced(RoleDecode, viaLocal)
	cfg.NATSToken = theToken
	d, temp := openApart(t, cfg, false)
	s := survives(t)
	address, to := prefillProcess(t, 0, "")
	its := inFolder(t, temp)
	if len(its) != 1 {
		t.Fatalf("TMPDIR has %q, want a folder of the prefill agent", its)
	}
	d.load("offered", address, 3, 4)
	if r := d.want("offered", core.OK); r.Transport != viaLocal || d.block(0, 4)[0] != 7 {
		t.Errorf("%+v", r)
	}
	s.met()
	s.kills(to)
	cfg = forced(RolePrefill, viaLocal)
	cfg.NATSToken = theToken
	next := open(t, cfg)
	until(t, "the folder is gone", func() bool {
		return !slices.ContainsFunc(inFolder(t, temp), func(name string) bool { return strings.HasPrefix(name, its[0]) })
	})
	if err := next.Close(); err != nil {
		t.Error(err)
	}
	if all, err := os.ReadDir(temp); err != nil || len(all) > 0 {
		t.Errorf("TMPDIR has %v, %v", all, err)
	}
}
