package node

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/rig/leaktest"
)

// runUnseen is a decode agent that cannot see prefill's process, or may not read it. It loads what prefill has offered, and waits for what
// prefill has only announced. It says how each load has ended.
func runUnseen(address string) (string, error) {
	if err := filtered(); err != nil {
		return "", err
	}
	a, err := Open(testConfig(RoleDecode), Options{firstWait: bound})
	if err != nil {
		return "", err
	}
	defer a.Close()
	cache := make([]byte, cacheBytes)
	if err := a.RegisterKVCaches(regions(cache)); err != nil {
		return "", err
	}
	load := func(id core.TransferID) error {
		_, err := a.StartLoad([]core.LoadRequest{{ID: id, From: core.Target{Bootstrap: address}, Selection: kv.Selection{Blocks: [][]kv.BlockID{{3, 4}}}}})
		return err
	}
	ends := func() (string, error) {
		select {
		case <-a.Finished():
		case <-time.After(bound):
			return "", fmt.Errorf("no report: %+v", a.Stats())
		}
		s := a.Stats()
		v := loadResults{Pairs: s.Pairs, FallbacksBy: s.Transports[viaLocal].FallbacksBy}
		for _, r := range a.GetFinished() {
			v.Code, v.Transport, v.Reason = r.Code.String(), r.Transport, r.Reason
		}
		for l := range layers {
			v.Blocks = append(v.Blocks, cache[(l*numBlocks+3)*blockBytes:][:2*blockBytes]...)
		}
		line, err := json.Marshal(v)
		return string(line), err
	}
	if err := load("offered"); err != nil {
		return "", err
	}
	first, err := ends()
	if err != nil {
		return "", err
	}
	if err := load("announced"); err != nil {
		return "", err
	}
	for began := time.Now(); a.Stats().LoadsWaiting != 1; time.Sleep(time.Millisecond) {
		if time.Since(began) > bound {
			return "", fmt.Errorf("the load does not wait: %+v", a.Stats())
		}
	}
	fmt.Println(first)
	last, err := ends()
	fmt.Println(last) // before Close, which waits for a control plane that does not answer
	return "", err
}

// TestSharedOutOfSight: where decode does not see prefill's process, or may not read it, as in containers of one pod, memory that
// prefill hands out goes by local all the same. When prefill is killed, the kernel tells decode, though another process holds prefill's
// sockets open.
func TestSharedOutOfSight(t *testing.T) {
	for name, c := range map[string]struct {
		how    syscall.SysProcAttr
		filter string
		root   bool // only root can start such a process
	}{
		"another process namespace": {how: syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWPID}, root: true},
		"another user namespace":    {how: ownUsers()},
		"a filter of system calls":  {filter: "refuse"},
		"a filter that ends":        {filter: "kill"},
	} {
		t.Run(name, func(t *testing.T) {
			if c.root && os.Geteuid() != 0 {
				t.Skipf("NOT RUN: only root can start a process in %s", name)
			}
			leaktest.Check(t)
			t.Setenv("KVCONN_TEST_SHARED", "1")
			address, p := prefillProcess(t, freePort(t), "")
			ctx, cancel := context.WithTimeout(t.Context(), 4*bound)
			defer cancel()
			cmd := inContainer(ctx, "unseen", address, c.filter, c.how)
			var complains bytes.Buffer
			cmd.Stderr = &complains
			out, err := cmd.StdoutPipe()
			if err != nil {
				t.Fatal(err)
			}
			if err := cmd.Start(); err != nil && forbidden(err) {
				t.Skipf("NOT RUN: this machine lets nobody start a process in %s: %v", name, err)
			} else if err != nil {
				t.Fatal(err)
			}
			defer func() {
				cancel()
				_ = cmd.Wait()
			}()
			lines := bufio.NewReader(out)
			next := func() (v loadResults) {
				t.Helper()
				line, err := lines.ReadBytes('\n')
				if err == nil {
					err = json.Unmarshal(line, &v)
				}
				if err != nil {
					t.Fatalf("the decode process: %v\n%s%s", err, line, &complains)
				}
				return v
			}
			v := next()
			if v.Code != core.OK.String() || v.Transport != viaLocal || len(v.Pairs) != 1 || v.Pairs[0].How != "mapping" || len(v.FallbacksBy) != 0 {
				t.Errorf("decode says %+v", v)
			}
			if !bytes.Equal(v.Blocks, bytes.Repeat([]byte{7}, layers*2*blockBytes)) {
				t.Error("decode has other bytes than prefill's")
			}
			holdSockets(t, p.pid)
			p.kill()
			if v = next(); v.Code != core.PeerLost.String() || !strings.Contains(v.Reason, "the peer's process has ended") {
				t.Errorf("when prefill was killed decode says %+v", v)
			}
		})
	}
}

// holdSockets holds a process's sockets open until the test ends.
func holdSockets(t *testing.T, pid int) {
	t.Helper()
	process, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(process)
	files, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	if err != nil {
		t.Fatal(err)
	}
	held := 0
	for _, f := range files {
		n, err := strconv.Atoi(f.Name())
		if err != nil {
			t.Fatal(err)
		}
		fd, err := unix.PidfdGetfd(process, n, 0)
		if err == unix.EBADF { // it was closed meanwhile
			continue
		}
		if err == unix.EPERM || err == unix.ENOSYS {
			t.Skipf("NOT RUN: another process's files cannot be held here: %v", err)
		}
		if err != nil {
			t.Fatal(err)
		}
		if _, err := unix.Getsockname(fd); err != nil {
			_ = unix.Close(fd)
			continue
		}
		held++
		t.Cleanup(func() { _ = unix.Close(fd) })
	}
	if held < 4 { // it listens, and has met decode, by local and by the control plane
		t.Fatalf("process %d has %d sockets", pid, held)
	}
}
