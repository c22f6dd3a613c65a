package local

import (
	"encoding/hex"
	"fmt"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/internal/hostenv"
)

// place is where an agent listens, as its endpoint tells it.
type place struct {
	name string // of the abstract socket, without the leading zero byte
	boot string // the kernel's boot id: one host, and one start of it
	net  string // network namespace, in which abstract names live
	pids string // process namespace
	uid  int
}

// namePrefix begins each socket's name, so that somebody who looks at /proc/net/unix knows it.
const namePrefix = "kvconn-"

// newName is random, so that nobody is there before.
func newName() string {
	k := newRandom()
	return namePrefix + hex.EncodeToString(k[:])
}

// Host is the boot id of this host, which is another one after each start of it; "" if it is not known.
func Host() string {
	boot, _ := hostenv.BootID()
	return boot
}

// here is the place of this process, without a name.
func here(k kernel) (p place, err error) {
	if p.boot, err = hostenv.BootID(); err != nil {
		return p, err
	}
	p.uid = k.user()
	if p.net, err = namespace("net"); err == nil {
		p.pids, err = namespace("pid")
	}
	return p, err
}

// namespace is the kernel's number of a namespace of this process.
func namespace(kind string) (string, error) {
	var st unix.Stat_t
	if err := unix.Stat("/proc/self/ns/"+kind, &st); err != nil {
		return "", fmt.Errorf("this process's %s namespace is not known: %w", kind, err)
	}
	return fmt.Sprint(st.Ino), nil
}

func (p place) String() string {
	return fmt.Sprintf("local%d %s boot=%s net=%s pid=%s uid=%d", version, p.name, p.boot, p.net, p.pids, p.uid)
}

// parsePlace reads an endpoint.
func parsePlace(s string) (p place, err error) {
	var rest string
	var v int
	if n, _ := fmt.Sscanf(s, "local%d %s boot=%s net=%s pid=%s uid=%d%s", &v, &p.name, &p.boot, &p.net, &p.pids, &p.uid, &rest); n != 6 || p.String() != s {
		return p, core.Lacking.Mark(fmt.Errorf("the endpoint %.200q is none of this version's: run the same kvconn on both", s))
	}
	if !strings.HasPrefix(p.name, namePrefix) || len(p.name) > 64 {
		return p, fmt.Errorf("the endpoint %.200q has a name that no agent listens at", s)
	}
	return p, nil
}

// reachable says why this process cannot be on one host with a place, or cannot get to it.
func (p place) reachable(from place) error {
	switch {
	case p.boot != from.boot:
		return fmt.Errorf("%w: its boot id is %s, this agent's is %s", core.ErrElsewhere, p.boot, from.boot)
	case p.net != from.net:
		return core.Elsewhere.Mark(fmt.Errorf("it is on this host in another network namespace (%s, this agent's is %s): run both containers in one network namespace, as one pod or with --network host", p.net, from.net))
	case p.uid != from.uid:
		return core.NotPermitted.Mark(fmt.Errorf("its process has user id %d, this one has %d: run both as one user", p.uid, from.uid))
	}
	return nil
}
