package callprobe

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvconn/kvconn/rig/callfilter"
)

// actionEnv tells a test binary to live under a filter with this action.
const actionEnv = "KVCONN_TEST_ACTION"

var calls = map[string]uintptr{"process_vm_readv": unix.SYS_PROCESS_VM_READV, "pidfd_open": unix.SYS_PIDFD_OPEN, "memfd_create": unix.SYS_MEMFD_CREATE}

func TestMain(m *testing.M) {
	if name := os.Getenv(actionEnv); name != "" {
		if err := filtered(callfilter.Actions[name]); err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// filtered asks before and under a filter of one call after the other, and as on an old kernel too.
func filtered(action uint32) error {
	var core unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_CORE, &core); err != nil {
		return err
	}
	core.Cur = core.Max // a child that leaves one is to be seen
	if err := unix.Setrlimit(unix.RLIMIT_CORE, &core); err != nil {
		return err
	}
	ends := action != callfilter.Refuse
	judge := func(name string, err error, want bool) error {
		if errors.Is(err, ErrEnds) != want || err != nil && !want {
			return fmt.Errorf("%s, whose call ends a process: %v: %v", name, want, err)
		}
		return nil
	}
	barred := map[string]bool{}
	for _, name := range []string{"process_vm_readv", "pidfd_open", "memfd_create"} {
		for range 2 { // the second answer is a known one
			if err := judge(name, Check(calls[name]), false); err != nil {
				return err
			}
		}
		if err := callfilter.Install(action, uint32(calls[name])); err != nil {
			return err
		}
		barred[name] = ends
		for name, call := range calls {
			if err := judge(name, Check(call), barred[name]); err != nil {
				return err
			}
			if err := judge(name, Check(call), barred[name]); err != nil {
				return err
			}
			if err := judge(name, ask(call, true), barred[name]); err != nil {
				return fmt.Errorf("as on an old kernel: %w", err)
			}
			if shown, err := unix.PrctlRetInt(unix.PR_GET_DUMPABLE, 0, 0, 0, 0); shown != 1 || err != nil {
				return fmt.Errorf("the process is dumpable: %d (%v), want 1", shown, err)
			}
		}
	}
	return nil
}

// TestFilters: each action is told from the others by a real filter, the process lives, and no child and no core of its is left.
func TestFilters(t *testing.T) {
	for name := range callfilter.Actions {
		t.Run(name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second) // a process that has lost a thread may stand
			defer cancel()
			c := exec.CommandContext(ctx, "/proc/self/exe")
			c.Dir = t.TempDir()
			c.Env = append(os.Environ(), actionEnv+"="+name)
			if out, err := c.CombinedOutput(); err != nil {
				t.Errorf("%v\n%s", err, out)
			}
			if files, err := os.ReadDir(c.Dir); err != nil || len(files) > 0 {
				t.Errorf("it has left %v (%v)", files, err)
			}
		})
	}
}

// TestUnfiltered: without a filter nothing is tried, and the host sees no child.
func TestUnfiltered(t *testing.T) {
	if text := filters(); text != "" {
		t.Skipf("NOT RUN: this machine has its tests live under a filter: %s", text)
	}
	for name, call := range calls {
		if err := Check(call); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	if err := ask(calls["pidfd_open"], false); err != nil {
		t.Error(err)
	}
	if pid, err := unix.Wait4(-1, nil, unix.WALL|unix.WNOHANG, nil); err != unix.ECHILD {
		t.Errorf("a child is left: %d, %v", pid, err)
	}
}
