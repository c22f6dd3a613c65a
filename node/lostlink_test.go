package node

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"testing"

	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"
	"golang.org/x/sys/unix"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/local"
	"github.com/kvconn/kvconn/rig/leaktest"
)

// socketsOfLocal are this process's sockets with a name of local's: prefill agents' listeners, or their ends of links.
func socketsOfLocal(t *testing.T, listening bool) (fds []int) {
	t.Helper()
	all, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range all {
		fd, _ := strconv.Atoi(e.Name())
		at, err := unix.Getsockname(fd)
		name, ok := at.(*unix.SockaddrUnix)
		if err != nil || !ok || !strings.HasPrefix(name.Name, "@kvconn-") {
			continue
		}
		if is, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ACCEPTCONN); err != nil {
			t.Fatal(err)
		} else if (is != 0) == listening {
			fds = append(fds, fd)
		}
	}
	return fds
}

// cutSockets ends what goes over them, under whoever has them.
func cutSockets(t *testing.T, fds []int) {
	t.Helper()
	if len(fds) != 1 {
		t.Fatalf("sockets %v, want one", fds)
	}
	if err := unix.Shutdown(fds[0], unix.SHUT_RDWR); err != nil {
		t.Fatal(err)
	}
}

// withLocal is an agent with local and tcp, and its local transport.
func withLocal(t *testing.T, role string) (*side, core.Settler, *observer.ObservedLogs) {
	t.Helper()
	var near core.Transport
	seen, logs := observer.New(zap.InfoLevel)
	a, err := Open(testConfig(role), Options{Logger: zap.New(seen), firstWait: bound,
		near: func(c local.Config, id core.AgentID, l *kv.Layout, s core.Sink, signal core.Signal) (tr core.Transport, err error) {
			tr, err = newLocal(c, id, l, s, signal)
			near = tr
			return tr, err
		}})
	if err != nil {
		t.Fatal(err)
	}
	s := &side{Agent: a, t: t, cache: make([]byte, cacheBytes), seen: map[core.TransferID]core.Report{}}
	t.Cleanup(func() { _ = a.Close() })
	if err := a.RegisterKVCaches(regions(s.cache)); err != nil {
		t.Fatal(err)
	}
	return s, near.(core.Settler), logs
}

// TestLinkLost: the socket of a living pair's local link ends under it. The load that waits on it fails. Later loads go by
// tcp, and bring the right bytes. The pair is back on local when the two have met anew, and stays with tcp if they cannot.
func TestLinkLost(t *testing.T) {
	for _, back := range []bool{true, false} {
		t.Run(map[bool]string{true: "for a moment", false: "for good"}[back], func(t *testing.T) {
			leaktest.Check(t)
			p, _, pLogs := withLocal(t, RolePrefill)
			d, near, dLogs := withLocal(t, RoleDecode)
			goes := func(id core.TransferID, by string) {
				t.Helper()
				clear(d.cache)
				transfer(t, p, d, id, p.BootstrapAddress())
				if r, w := d.seen[id], p.seen[id]; r.Transport != by || w.Transport != by {
					t.Fatalf("%q went by %q and %q, want %q; decode said %v", id, r.Transport, w.Transport, by, dLogs.All())
				}
			}
			goes("first", viaLocal)
			announce(t, p, "waits")
			d.load("waits", p.BootstrapAddress(), 9)
			until(t, "the load waits at prefill", func() bool { return d.Stats().LoadsWaiting == 1 })
			if !back {
				cutSockets(t, socketsOfLocal(t, true))
			}
			cutSockets(t, socketsOfLocal(t, false))
			lost := d.want("waits", core.PeerLost, "connection lost")
			if lost.Transport != viaLocal {
				t.Errorf("%+v", lost)
			}
			goes("second", viaTCP)
			s := d.Stats()
			if len(s.Pairs) != 1 || s.Pairs[0].Transport != viaTCP || s.Pairs[0].Fallbacks[shorten(s.Pairs[0].Reason)] != 1 || len(s.Transports[viaLocal].Fallbacks) != 1 || !strings.HasPrefix(s.Pairs[0].Reason, "local: ") || !strings.Contains(s.Pairs[0].Reason, "connection lost") {
				t.Errorf("decode counts %+v", s)
			}
			want := []string{"pair goes over local", "pair goes on over tcp: " + s.Pairs[0].Reason}
			if back {
				usable(t, near, p.ID())
				goes("third", viaLocal)
				want = append(want, "pair is back on local")
			} else {
				until(t, "the two have tried to meet again", func() bool {
					err := near.Usable(t.Context(), p.ID())
					if err == nil {
						t.Fatal("local is usable, and nobody listens")
					}
					return strings.Contains(err.Error(), "nobody listens at its socket") && core.WhyOf(err) == core.Lost
				})
				goes("third", viaTCP)
			}
			for _, id := range []core.TransferID{"fourth", "fifth"} {
				goes(id, p.seen["third"].Transport)
			}
			var said []string
			for _, e := range dLogs.All() {
				if strings.HasPrefix(e.Message, "pair ") {
					said = append(said, e.Message)
				}
			}
			if fmt.Sprint(said) != fmt.Sprint(want) {
				t.Errorf("decode said %q, want %q", said, want)
			}
			if n := pLogs.FilterMessage("pair goes on over tcp").Len(); n != 1 {
				t.Errorf("prefill said it %d times: %v", n, pLogs.All())
			}
		})
	}
}

// usable waits until a transport can be taken again.
func usable(t *testing.T, w core.Settler, peer core.AgentID) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), bound)
	defer cancel()
	var err error
	until(t, fmt.Sprintf("%s is met again", peer), func() bool {
		err = w.Usable(ctx, peer)
		return err == nil || errors.Is(err, context.DeadlineExceeded)
	})
	if err != nil {
		t.Fatal(err)
	}
}
