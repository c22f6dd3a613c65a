// How P makes lanes.

package rdma

import (
	"errors"
	"fmt"

	"go.uber.org/zap"

	"github.com/kvconn/kvconn/core"
	defect "github.com/kvconn/kvconn/internal/fault"
	"github.com/kvconn/kvconn/rdma/internal/verbs"
)

var errNoPath = errors.New("no port here reaches a port there")

// connect asks D for its ports and makes lanes to them, until each port has some or no
// path is left to try.
func (cn *conn) connect() error {
	if err := cn.t.registered(cn.t.cfg.ConnectTimeout / 3); err != nil {
		return cn.absent(err)
	}
	cn.mu.Lock()
	due := cn.due()
	cn.mu.Unlock()
	rep, err := cn.t.ask(cn.peer, &signal{Kind: signalPorts, Ticket: cn.ticket, Tries: true}, cn.t.cfg.ConnectTimeout/3)
	if err != nil {
		return err
	}
	cn.mu.Lock()
	cn.tasks &^= makeLanes
	cn.mu.Unlock()
	remote, why := cn.t.cfg.newRemoteInfo(rep)
	if why == nil {
		if why, err = cn.connectTo(remote, due); err != nil {
			cn.mu.Lock()
			defer cn.mu.Unlock()
			cn.tasks |= makeLanes // this is still to be done
			return err
		}
	}
	if cn.asksFirst() {
		return nil
	}
	return cn.sayConnected(rep.Secret, why)
}

// asksFirst says that all lanes broke while lanes were being made: P asks D what has arrived, and names what it has begun to write, before it
// tells D that there is no path. Then it connects once more.
func (cn *conn) asksFirst() bool {
	cn.mu.Lock()
	defer cn.mu.Unlock()
	if len(cn.lanes) > 0 || len(cn.lost) == 0 || cn.state == stateEnded {
		return false
	}
	cn.tasks |= makeLanes
	return true
}

// sayConnected tells D which lanes P keeps, made with the keys that D has told with this secret. If there are none, the
// error says why.
func (cn *conn) sayConnected(secret []byte, why error) error {
	s := &signal{Kind: signalConnected, Ticket: cn.ticket, Secret: secret}
	cn.mu.Lock()
	s.Last = cn.lastID
	for _, l := range cn.lanes {
		s.Lanes = append(s.Lanes, l.id)
	}
	cn.mu.Unlock()
	if len(s.Lanes) == 0 {
		for _, p := range cn.t.ports {
			if !p.usable() {
				why = allOf(why, fmt.Errorf("port %s is down", p.name))
			}
		}
		if why == nil {
			why = errors.New("all lanes broke right after they were made")
		}
		why = fmt.Errorf("%w: %w", errNoPath, why)
		s.Reason = shorten(why.Error())
	} else {
		why = nil
	}
	if _, err := cn.t.ask(cn.peer, s, cn.t.cfg.ConnectTimeout/3); err != nil && why == nil {
		cn.t.log.Debug("rdma: a peer does not hear which lanes it has; it will ask", zap.String("peer", string(cn.peer)), zap.Error(err))
	}
	return why
}

// connectTo makes lanes to ports of D, a round for each set of paths that have no
// port in common: plan names the paths, make opens P's ends, exchange has D open its
// ends, and probe takes the lanes that carry bytes into use. why says why other lanes
// could not be made; err says that D could not be asked.
func (cn *conn) connectTo(remote *remoteInfo, due map[pathKey]bool) (why, err error) {
	cn.update(func(cn *conn) {
		if cn.remote != nil && string(cn.remote.secret) != string(remote.secret) {
			cn.disconnect(fmt.Errorf("rdma: decode agent %s has opened anew: %w", cn.peer, core.ErrConnectionLost))
		}
		if cn.remote == nil {
			cn.grants = grants{dead: map[uint64]bool{}}
		}
		if cn.on(eventPorts) != stateEnded {
			cn.remote = remote
		}
	})
	tried := map[pathKey]bool{}
	var causes []error
	for round := 0; ; round++ {
		plan, unreachable := cn.plan(remote, tried, due)
		causes = append(causes, unreachable...)
		if len(plan) == 0 {
			return allOf(causes...), nil
		}
		if round > 0 && cn.hasLanes() { // D can use these now; the other paths may take long
			_ = cn.sayConnected(remote.secret, nil)
		}
		made, unmade := cn.make(remote, plan)
		if err := cn.exchange(remote, made); err != nil {
			return nil, err
		}
		cn.probe(remote, made)
		causes = append(append(causes, unmade...), cn.judge(plan, made)...)
		if cn.t.ctx.Err() != nil {
			return nil, errClosed
		}
	}
}

func (cn *conn) hasLanes() bool {
	cn.mu.Lock()
	defer cn.mu.Unlock()
	return len(cn.lanes) > 0
}

// remoteInfo holds the ports and keys that D has told P. Nobody changes it once it is made.
type remoteInfo struct {
	secret  []byte
	ports   map[int]*portInfo
	tables  map[int]*keyTable // by D's port, like scratch
	scratch map[int]keyInfo
	areas   map[int][]keyInfo
	refused map[int]error // why a GID of a port is not in it
	gpus    int
}

// epoch says, in P's messages about lanes, which keys of D's are meant. It is D's secret: D has a new secret when it has new keys.
func (f *remoteInfo) epoch() []byte {
	if f == nil {
		return nil
	}
	return f.secret
}

// newRemoteInfo checks the ports and keys that D tells. It leaves out addresses that this agent may not
// send to.
func (c *Config) newRemoteInfo(rep *reply) (*remoteInfo, error) {
	if len(rep.Secret) != secretSize {
		return nil, fmt.Errorf("a secret of %d bytes, want %d", len(rep.Secret), secretSize)
	}
	f := &remoteInfo{secret: rep.Secret, ports: map[int]*portInfo{}, tables: map[int]*keyTable{}, scratch: map[int]keyInfo{}, areas: map[int][]keyInfo{}, refused: map[int]error{}, gpus: rep.GPUs}
	regions := make([]memRange, len(rep.Regions))
	for i, r := range rep.Regions {
		regions[i] = memRange(r)
	}
	tables := make([]*keyTable, len(rep.Devices))
	for i, d := range rep.Devices {
		keys := make([]keyRange, len(d.Keys))
		for k, key := range d.Keys {
			keys[k] = keyRange{memRange{key.Base, key.Length}, key.Key}
		}
		if d.Scratch.Length < scratchBytes {
			return nil, fmt.Errorf("device %d of the peer has %d bytes for probes, want %d", i, d.Scratch.Length, scratchBytes)
		}
		for k, a := range d.Areas {
			if a.Length < areaBytes {
				return nil, fmt.Errorf("device %d of the peer has %d bytes for trials in area %d, want %d", i, a.Length, k, areaBytes)
			}
		}
		var err error
		if tables[i], err = newKeyTable("at the peer", regions, keys); err != nil {
			return nil, err
		}
	}
	for i := range rep.Ports {
		p := &rep.Ports[i]
		if p.Device < 0 || p.Device >= len(tables) || f.ports[p.Index] != nil {
			return nil, fmt.Errorf("port %q is of device %d of %d, or listed twice", p.Name, p.Device, len(tables))
		}
		f.ports[p.Index], f.tables[p.Index], f.scratch[p.Index] = p, tables[p.Device], rep.Devices[p.Device].Scratch
		f.areas[p.Index] = rep.Devices[p.Device].Areas
		if verbs.LinkLayer(p.Link) == verbs.LinkEthernet {
			p.GIDs, f.refused[p.Index] = c.guarded(p.GIDs)
		}
	}
	if len(f.ports) == 0 && rep.Lacks != "" {
		return nil, errors.New(rep.Lacks)
	}
	if len(f.ports) == 0 {
		return nil, errors.New("no port of the peer is active")
	}
	return f, nil
}

// guarded is the GIDs of a port that this agent may send to. If some are left out, the error says
// why the first one is.
func (c *Config) guarded(list []gidInfo) (kept []gidInfo, refused error) {
	for _, g := range list {
		if err := c.guard(&gid{Raw: g.Raw}); err == nil || defect.On("rdma-unguarded-port") {
			kept = append(kept, g)
		} else if refused == nil {
			refused = err
		}
	}
	return kept, refused
}
