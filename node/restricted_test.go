package node

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"
	"golang.org/x/sys/unix"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/rig/callfilter"
	"github.com/kvconn/kvconn/rig/leaktest"
)

// loadResults is what a decode agent that local does not serve says of its loads.
type loadResults struct {
	Code, Transport, Reason string // of the last load
	Blocks                  []byte // the first block of each layer, then the second
	Pairs                   []PairStats
	Fallbacks               map[string]uint64 // of local
	FallbacksBy             map[core.Why]uint64
	Said                    []string // of the pair
}

// runRestricted is that agent, in a process of its own. It loads two transfers, one after the other, and ends.
func runRestricted(address string) (string, error) {
	if err := filtered(); err != nil {
		return "", err
	}
	seen, logs := observer.New(zap.InfoLevel)
	a, err := Open(testConfig(RoleDecode), Options{Logger: zap.New(seen), firstWait: bound})
	if err != nil {
		return "", err
	}
	defer a.Close()
	cache := make([]byte, cacheBytes)
	if err := a.RegisterKVCaches(regions(cache)); err != nil {
		return "", err
	}
	var v loadResults
	for _, id := range []core.TransferID{"first", "second"} {
		clear(cache)
		if _, err := a.StartLoad([]core.LoadRequest{{ID: id, From: core.Target{Bootstrap: address}, Selection: kv.Selection{Blocks: [][]kv.BlockID{{3, 4}}}}}); err != nil {
			return "", err
		}
		over := time.After(bound)
		for done := false; !done; {
			select {
			case <-a.Finished():
			case <-over:
				return "", fmt.Errorf("no report of %q: %+v", id, a.Stats())
			}
			for _, r := range a.GetFinished() {
				v.Code, v.Transport, v.Reason, done = r.Code.String(), r.Transport, r.Reason, true
			}
		}
		if id == "first" { // before local tries anew
			s := a.Stats()
			v.Pairs, v.Fallbacks, v.FallbacksBy = s.Pairs, s.Transports[viaLocal].Fallbacks, s.Transports[viaLocal].FallbacksBy
		}
	}
	for l := range layers {
		v.Blocks = append(v.Blocks, cache[(l*numBlocks+3)*blockBytes:][:2*blockBytes]...)
	}
	for _, e := range logs.All() {
		if strings.HasPrefix(e.Message, "pair ") {
			v.Said = append(v.Said, e.Message)
		}
	}
	line, err := json.Marshal(v)
	return string(line), err
}

// TestRestrictedContainers: the host really keeps D from P's memory, by each of the restrictions that containers bring. Two agents with "auto" then
// exchange caches by tcp, every byte right, and D's log and statistics have local's reason with its remedy.
func TestRestrictedContainers(t *testing.T) {
	const nobody = 65534
	for name, c := range map[string]struct {
		how    syscall.SysProcAttr
		filter string
		root   bool // only root can start such a process
		apart  bool // it has a network of its own
		why    core.Why
		says   []string
	}{
		"a filter of system calls":  {filter: "refuse", why: core.NotPermitted, says: []string{"operation not permitted", "a filter of system calls forbids it"}},
		"a filter that traps":       {filter: "trap", why: core.NotPermitted, says: []string{"SIGSYS", "a filter of system calls forbids it"}},
		"a filter that ends":        {filter: "kill", why: core.NotPermitted, says: []string{"SIGSYS", "a filter of system calls forbids it"}},
		"another user":              {how: syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}}, root: true, why: core.NotPermitted, says: []string{"user id 0", "65534", "run both as one user"}},
		"another network namespace": {apart: true, root: true, why: core.Elsewhere, says: []string{"it is on this host in another network namespace", "--network host"}},
		"another process namespace": {how: syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWPID}, root: true, why: core.Elsewhere, says: []string{"in a process namespace that this one does not see", "--pid host"}},
		"another user namespace":    {how: ownUsers(), why: core.NotPermitted, says: []string{"operation not permitted", "user namespace"}},
	} {
		t.Run(name, func(t *testing.T) {
			if c.root && os.Geteuid() != 0 {
				t.Skipf("NOT RUN: only root can start a process in %s", name)
			}
			leaktest.Check(t)
			cfg, starts := testConfig(RolePrefill), func(f func()) { f() }
			if c.apart {
				n := newNetwork(t)
				starts = n.do
				cfg.BootstrapHost, cfg.TCPListenHost = n.Near, n.Near
			}
			p, logs := openLogged(t, cfg)
			p.fill(5, 1, 2)
			for _, id := range []core.TransferID{"first", "second"} {
				p.offer(id, 1, 2)
			}
			ctx, cancel := context.WithTimeout(context.Background(), 4*bound)
			defer cancel()
			cmd := inContainer(ctx, "restricted", p.BootstrapAddress(), c.filter, c.how)
			var complains bytes.Buffer
			cmd.Stderr = &complains
			var out []byte
			var err error
			starts(func() { out, err = cmd.Output() })
			if err != nil && cmd.Process == nil && forbidden(err) {
				t.Skipf("NOT RUN: this machine lets nobody start a process in %s: %v", name, err)
			}
			var v loadResults
			if err == nil {
				err = json.Unmarshal(out, &v)
			}
			if err != nil {
				t.Fatalf("the decode process: %v\n%s%s", err, out, &complains)
			}
			if v.Code != core.OK.String() || v.Transport != viaTCP {
				t.Fatalf("the second load ended %s (%s) by %s", v.Code, v.Reason, v.Transport)
			}
			for l := range layers {
				if want := append(bytes.Clone(p.block(l, 1)), p.block(l, 2)...); !bytes.Equal(v.Blocks[l*2*blockBytes:][:2*blockBytes], want) {
					t.Errorf("layer %d: other bytes than prefill's", l)
				}
			}
			for _, id := range []core.TransferID{"first", "second"} {
				if r := p.want(id, core.OK); r.Transport != viaTCP {
					t.Errorf("prefill's report is %+v", r)
				}
			}
			if len(v.Pairs) != 1 || v.Pairs[0].Transport != viaTCP || v.Pairs[0].Transfers[viaTCP] != 1 {
				t.Fatalf("decode counts %+v", v.Pairs)
			}
			pair := v.Pairs[0]
			if pair.Fallbacks[shorten(pair.Reason)] != 1 || len(pair.Fallbacks) != 1 || len(v.Fallbacks) != 1 || !maps.Equal(v.FallbacksBy, map[core.Why]uint64{c.why: 1}) {
				t.Errorf("decode counts %+v, and of local %v, %v", pair, v.Fallbacks, v.FallbacksBy)
			}
			if want := "pair goes over tcp: " + pair.Reason; len(v.Said) != 1 || v.Said[0] != want {
				t.Errorf("decode said %q, want %q once", v.Said, want)
			}
			for _, part := range append(c.says, "local: ") {
				if !strings.Contains(pair.Reason, part) {
					t.Errorf("the reason is %q, want %q in it", pair.Reason, part)
				}
			}
			if s := p.Stats(); len(s.Pairs) != 1 || s.Pairs[0].Transport != viaTCP || s.Pairs[0].Transfers[viaTCP] != 2 || logs.FilterMessage("pair goes over tcp").Len() != 1 {
				t.Errorf("prefill counts %+v and said %v", s.Pairs, logs.All())
			}
		})
	}
}

// forbidden says whether the machine, not the test, kept a process from its start.
func forbidden(err error) bool {
	return os.IsPermission(err) || strings.Contains(err.Error(), syscall.ENOSPC.Error()) || strings.Contains(err.Error(), syscall.EINVAL.Error())
}

// inContainer is a decode agent in a process of its own, with the restrictions of a container.
func inContainer(ctx context.Context, role, address, filter string, how syscall.SysProcAttr) *exec.Cmd {
	cmd := exec.CommandContext(ctx, "/proc/self/exe") // whose folder another user may not enter
	cmd.SysProcAttr, cmd.Dir = &how, "/"
	cmd.SysProcAttr.Pdeathsig = syscall.SIGKILL
	cmd.Env = append(os.Environ(), "KVCONN_TEST_ROLE="+role, "KVCONN_TEST_ADDRESS="+address, "KVCONN_TEST_FILTER="+filter,
		"GORACE="+os.Getenv("GORACE")+" atexit_sleep_ms=0") // else the race detector waits a second for late reports
	return cmd
}

// ownUsers is a user namespace of its own in which this user is the only one.
func ownUsers() syscall.SysProcAttr {
	one := func(id int) []syscall.SysProcIDMap {
		return []syscall.SysProcIDMap{{ContainerID: id, HostID: id, Size: 1}}
	}
	return syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWUSER, UidMappings: one(os.Geteuid()), GidMappings: one(os.Getegid())}
}

// filtered puts this process under a filter of system calls, if it is told to.
func filtered() error {
	action := os.Getenv("KVCONN_TEST_FILTER")
	if action == "" {
		return nil
	}
	return callfilter.Install(callfilter.Actions[action], unix.SYS_PROCESS_VM_READV)
}
