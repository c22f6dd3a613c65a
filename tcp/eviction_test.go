package tcp

import (
	"fmt"
	"testing"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/rig/leaktest"
)

// TestStreamsOfPeersWithMany: a decode agent that holds all places for streams, and uses none,
// makes room for an agent that has fewer.
func TestStreamsOfPeersWithMany(t *testing.T) {
	leaktest.Check(t)
	p, d := newAgent(t, Config{MaxStreams: 8, MaxUnauthenticated: 16}), newAgent(t, Config{})
	for i := range 8 {
		dial(t, p).say(p.hello(t, "many", i, uint64(1+i), ^uint64(0)))
	}
	until(t, "all places are taken", func() bool { return p.streams() == 8 })
	move(t, p, d, "beside")
	if n := p.streams(); n > 8 {
		t.Errorf("%d streams are open", n)
	}
}

// TestStreamsOfManyAgents: identities cost nothing, so a host may have as many decode agents as there are places for streams, each
// with one. An agent of another address gets a place of that address, and one that has a stream there keeps it.
func TestStreamsOfManyAgents(t *testing.T) {
	leaktest.Check(t)
	p := newAgent(t, Config{MaxStreams: 4, MaxUnauthenticated: 16})
	honest := dial(t, p)
	honest.say(p.hello(t, "honest", 0, 1, 0))
	agents := []*rawConn{}
	for i := range 3 {
		agents = append(agents, dialFrom(t, p, "127.0.0.2"))
		agents[i].say(p.hello(t, core.AgentID(fmt.Sprint("agent", i)), 0, 1, 0))
	}
	until(t, "all places are taken", func() bool { return p.streams() == 4 })
	late := dial(t, p)
	late.say(p.hello(t, "late", 0, 1, 0))
	grant := newRandom()
	for _, d := range []struct {
		of   core.AgentID
		conn *rawConn
	}{{"honest", honest}, {"late", late}} {
		p.Write(core.WriteOp{ID: core.TransferID(d.of), Peer: d.of, Grant: grant[:], Pairs: p.pairs(t, allBlocks(testBlocks))})
		if h := d.conn.next(); h.kind != frameData {
			t.Errorf("%s is told %+v", d.of, h)
		}
	}
	more := dialFrom(t, p, "127.0.0.2")
	more.say(p.hello(t, "more", 0, 1, 0))
	if h := more.next(); h.kind != frameLeave {
		t.Errorf("one more agent is told %+v", h)
	}
	p.sender.mu.Lock()
	defer p.sender.mu.Unlock()
	if n := p.sender.streams; n != 4 || len(p.sender.from) != 2 {
		t.Errorf("%d streams, %v", n, p.sender.from)
	}
}

// TestStreamsInUseStay: the streams that carry a transfer make no room, and neither do those of
// an agent that has as few as the one that comes.
func TestStreamsInUseStay(t *testing.T) {
	leaktest.Check(t)
	p := newAgent(t, Config{First: 3, MaxStreams: 4, MaxUnauthenticated: 16})
	var used []*rawConn
	for i := range 3 {
		used = append(used, dial(t, p))
		used[i].say(p.hello(t, "busy", i, uint64(1+i), 0))
	}
	single := dial(t, p)
	single.say(p.hello(t, "single", 0, 1, 0))
	until(t, "all places are taken", func() bool { return p.streams() == 4 })
	grant := newRandom()
	p.Write(core.WriteOp{ID: "t", Peer: "busy", Grant: grant[:], Pairs: p.pairs(t, allBlocks(testBlocks))})
	for _, c := range used { // each has a frame, and the rest waits
		c.next()
	}
	late := dial(t, p)
	late.say(p.hello(t, "late", 0, 1, 0))
	if h := late.next(); h.kind != frameLeave {
		t.Errorf("a stream in use made room: %+v", h)
	}
	late.ends()
	if n := p.streams(); n != 4 {
		t.Errorf("%d streams are open", n)
	}
}

// TestIdleStreamsAreEvicted: of an agent's streams without frames of a transfer one that P has shut makes room first, and then the
// last ones, since the first ones are in use.
func TestIdleStreamsAreEvicted(t *testing.T) {
	leaktest.Check(t)
	p := newAgent(t, Config{First: 1, MaxStreams: 4, MaxUnauthenticated: 16})
	for i := range 4 {
		dial(t, p).say(p.hello(t, "many", i, uint64(1+i), 0))
	}
	until(t, "all places are taken", func() bool { return p.streams() == 4 })
	comes := func(name core.AgentID, want string) {
		t.Helper()
		dial(t, p).say(p.hello(t, name, 0, 1, 0))
		until(t, "it has a place", func() bool {
			p.sender.mu.Lock()
			defer p.sender.mu.Unlock()
			return p.sender.peers[name].open == 1
		})
		p.sender.mu.Lock()
		defer p.sender.mu.Unlock()
		var left []int
		for i := range p.sender.peers["many"].slots {
			if st := p.sender.peers["many"].slots[i].stream; st != nil {
				left = append(left, st.number)
				st.shut = i == 1
			}
		}
		if fmt.Sprint(left) != want {
			t.Errorf("%s has come, and the streams %v are left, want %s", name, left, want)
		}
	}
	comes("late", "[0 1 2]")
	comes("later", "[0 2]")
}
