// An engine's process: an agent and its memory, which performs the driver's commands and tells what came of them.

package chaos

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"sync"
	"time"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/internal/safe"
	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/node"
)

// The sabotages, each of which the driver must find.
const (
	sabotageByte   = "byte"   // the next load's bytes are changed before they are checked
	sabotageLate   = "late"   // a block that nobody has is written into
	sabotageForget = "forget" // a block is never given back
	sabotageMute   = "mute"   // the next report is kept
	sabotageTwice  = "twice"  // the next report is told twice
)

// engine is one P or D: an agent, its memory, and what it has under way.
type engine struct {
	outMu sync.Mutex
	out   *json.Encoder

	mu    sync.Mutex // the memory's, held's and sabotage's
	agent *node.Agent
	mem   *memory
	held  map[half]*held
	next  map[string]bool // sabotage to come
}

// half names one side of a transfer.
type half struct {
	side core.Side
	id   core.TransferID
}

// held are the blocks of an accepted half.
type held struct {
	blocks []kv.BlockID
	tag    uint64
	first  int
	called int64
}

// RunEngine is the main function of an engine's process. It runs the commands on in until
// they end, and tells the events on out.
func RunEngine(in io.Reader, out io.Writer) error {
	e := &engine{out: json.NewEncoder(out), held: map[half]*held{}, next: map[string]bool{}}
	safe.SetHandler(func(where string, cause any, stack []byte) {
		e.tell(event{Op: evWrong, Error: fmt.Sprintf("panic in %s: %v\n%s", where, cause, stack)})
	})
	quit := make(chan struct{})
	var wg sync.WaitGroup
	defer wg.Wait()
	defer close(quit)
	wg.Go(func() { e.watchClock(quit) })
	defer e.close()
	sc := bufio.NewScanner(in)
	sc.Buffer(nil, 16<<20)
	for sc.Scan() {
		var o command
		if err := json.Unmarshal(sc.Bytes(), &o); err != nil {
			return fmt.Errorf("command %.80q: %w", sc.Text(), err)
		}
		if o.Op == opOpen {
			err := e.open(o.Open)
			ev := event{Op: evOpened, Seq: o.Seq, At: now()}
			if err != nil {
				ev.Error = err.Error()
			} else {
				ev.Agent = e.agent.ID()
				wg.Go(func() { e.collect(quit) })
			}
			e.tell(ev)
			continue
		}
		if e.agent == nil {
			return fmt.Errorf("command %q before open", o.Op)
		}
		e.run(&o)
	}
	return sc.Err()
}

func (e *engine) tell(ev event) {
	e.outMu.Lock()
	defer e.outMu.Unlock()
	_ = e.out.Encode(ev) // the driver has gone: standard input ends too
}

func (e *engine) open(o *opening) error {
	cfg := node.DefaultConfig()
	cfg.EngineID, cfg.Role = o.EngineID, o.Role
	cfg.BootstrapHost, cfg.BootstrapPort, cfg.TCPListenHost, cfg.TCPPort = o.Host, o.BootstrapPort, o.Host, o.TCPPort
	if o.Streams > 0 {
		cfg.TCPStreams = o.Streams
	}
	cfg.Lease, cfg.EarlyLoad = seconds(o.Lease), seconds(o.EarlyLoad)
	cfg.MaxTransfers = o.MaxTransfers
	if o.PeerTimeout > 0 {
		cfg.PeerTimeout = seconds(o.PeerTimeout)
	}
	cfg.Transport = "tcp"
	if o.Transport != "" {
		cfg.Transport = o.Transport
	}
	log := zap.NewNop()
	if o.Log {
		enc := zap.NewDevelopmentEncoderConfig()
		log = zap.New(zapcore.NewCore(zapcore.NewConsoleEncoder(enc), zapcore.Lock(os.Stderr), zap.InfoLevel)).Named(o.EngineID)
	}
	var err error
	if e.mem, err = newMemory(o.Memory, o.Regions, o.Blocks, o.BlockBytes); err != nil {
		return err
	}
	if e.mem.gpu != nil {
		cfg.DeviceRing, cfg.DeviceSlot = gpuRing, gpuSlot
	}
	agent, err := node.Open(cfg, node.Options{Logger: log})
	if err != nil {
		return err
	}
	if err := agent.RegisterKVCaches(e.mem.layout()); err != nil {
		_ = agent.Close()
		return err
	}
	e.agent = agent
	return nil
}

func seconds(s float64) node.Seconds { return node.Seconds(s * float64(time.Second)) }

func (e *engine) close() {
	if e.agent != nil {
		_ = e.agent.Close()
	}
	if e.mem != nil {
		e.mem.unmap()
	}
}

// watchClock tells when the process has not run for a while: it was stopped, or
// the machine was busy.
func (e *engine) watchClock(quit <-chan struct{}) {
	const step, late = 20 * time.Millisecond, 100 * time.Millisecond
	t := time.NewTicker(step)
	defer t.Stop()
	last := now()
	for {
		select {
		case <-quit:
			return
		case <-t.C:
		}
		at := now()
		if time.Duration(at-last) > late {
			e.tell(event{Op: evLag, At: last, Until: at})
		}
		last = at
	}
}

func (e *engine) run(o *command) {
	switch o.Op {
	case opAnnounce:
		for _, it := range o.Items {
			_, err := e.agent.Announce([]core.TransferID{it.ID})
			e.refused(it.ID, err)
		}
	case opClaim:
		for _, it := range o.Items {
			_, err := e.agent.Claim([]core.ClaimRequest{{ID: it.ID, From: *it.From}})
			e.refused(it.ID, err)
		}
	case opOffer:
		for _, it := range o.Items {
			e.tell(e.offer(it))
		}
	case opLoad:
		// All go out at once: their reports come after.
		events := make([]event, len(o.Items))
		for i, it := range o.Items {
			events[i] = e.load(it)
		}
		for _, ev := range events {
			e.tell(ev)
		}
	case opCancel:
		ids := make([]core.TransferID, len(o.Items))
		for i, it := range o.Items {
			ids[i] = it.ID
		}
		start := now()
		_, err := e.agent.Cancel(ids, o.Reason)
		ev := event{Op: evDone, Seq: o.Seq, At: start, Took: now() - start}
		if err != nil {
			ev.Error = err.Error()
		}
		e.tell(ev)
	case opInspect:
		e.tell(event{Op: evInspect, Seq: o.Seq, Inspection: e.inspect(o.Paint)})
	case opSabotage:
		e.sabotage(o.What)
		e.tell(event{Op: evDone, Seq: o.Seq})
	}
}

// refused tells of a call that will have no report.
func (e *engine) refused(id core.TransferID, err error) {
	if err != nil {
		e.tell(event{Op: evDone, ID: id, Error: err.Error(), Overload: errors.Is(err, core.ErrOverload)})
	}
}

// take takes blocks for a half; e.mu is held.
func (e *engine) take(it item) []kv.BlockID {
	ids, wrong := e.mem.take(it.Blocks)
	if wrong != nil {
		e.tell(event{Op: evWrong, ID: it.ID, Error: wrong.Error(), At: now()})
	}
	return ids
}

func (e *engine) offer(it item) event {
	e.mu.Lock()
	defer e.mu.Unlock()
	ev := event{Op: evCall, ID: it.ID, Side: core.SideOffer}
	ids := e.take(it)
	if ids == nil { // the engine cannot do the request: it says so
		_, _ = e.agent.Cancel([]core.TransferID{it.ID}, "no free blocks")
		ev.Error, ev.Exhausted = "no free blocks", true
		return ev
	}
	ev = e.call(ev, half{core.SideOffer, it.ID}, &held{blocks: ids}, func() error {
		w, err := e.mem.gpu.begin(e.agent)
		if err != nil {
			return err
		}
		fill := func() {
			for i, id := range ids {
				e.mem.fill(id, it.Tag, i)
			}
		}
		if w.g == nil {
			fill()
		}
		_, err = e.agent.Offer([]core.OfferRequest{{ID: it.ID, Selection: kv.Selection{Blocks: [][]kv.BlockID{ids}}, After: w.moment}})
		w.runs(fill)
		return err
	})
	if ev.Overload { // an announced transfer must end all the same
		_, _ = e.agent.Cancel([]core.TransferID{it.ID}, ev.Error)
	}
	return ev
}

func (e *engine) load(it item) event {
	e.mu.Lock()
	defer e.mu.Unlock()
	ev := event{Op: evCall, ID: it.ID, Side: core.SideLoad}
	ids := e.take(it)
	ev.Exhausted = ids == nil // it lets go of the transfer by a load of nothing
	return e.call(ev, half{core.SideLoad, it.ID}, &held{blocks: ids, tag: it.Tag, first: it.First}, func() error {
		w, err := e.mem.gpu.begin(e.agent)
		if err != nil {
			return err
		}
		_, err = e.agent.StartLoad([]core.LoadRequest{{ID: it.ID, From: *it.From, After: w.moment,
			Selection: kv.Selection{First: []uint32{uint32(it.First)}, Blocks: [][]kv.BlockID{ids}}}})
		w.runs(func() { e.unwritten(it.ID, ids) })
		return err
	})
}

// call makes one of the agent's calls. e.mu is held, so that the report comes after the
// books know of the call.
func (e *engine) call(ev event, h half, what *held, f func() error) event {
	before := e.held[h]
	e.held[h] = what
	ev.At = now()
	what.called = ev.At
	err := f()
	ev.Took = now() - ev.At
	if err != nil {
		ev.Error, ev.Overload = err.Error(), errors.Is(err, core.ErrOverload)
		delete(e.held, h)
		if before != nil {
			e.held[h] = before
		}
		e.mem.give(what.blocks)
	}
	return ev
}

// collect takes the agent's reports until quit.
func (e *engine) collect(quit <-chan struct{}) {
	for {
		select {
		case <-quit:
			return
		case <-e.agent.Finished():
		}
		at := now()
		for _, r := range e.agent.GetFinished() {
			e.report(r, at)
		}
	}
}

func (e *engine) report(r core.Report, at int64) {
	e.mu.Lock()
	defer e.mu.Unlock()
	h := half{r.Side, r.ID}
	ev := event{Op: evReport, ID: r.ID, Side: r.Side, Code: r.Code, Reason: r.Reason, Agent: r.Peer, Transport: r.Transport, At: at}
	what := e.held[h]
	if what == nil {
		e.tell(event{Op: evWrong, ID: r.ID, Error: fmt.Sprintf("a report of a %s that is not under way: %s: %s", r.Side, r.Code, r.Reason), At: at})
		return
	}
	delete(e.held, h)
	ev.Called = what.called
	if r.Side == core.SideLoad && r.Code == core.OK {
		if len(what.blocks) > 0 && e.due(sabotageByte) {
			e.mem.words(0, what.blocks[0])[1] ^= 1 << 9
		}
		for i, id := range what.blocks {
			if err := e.mem.check(id, what.tag, what.first+i); err != nil {
				e.tell(event{Op: evWrong, ID: r.ID, Error: "a load that ended well: " + err.Error(), At: at})
				break
			}
		}
	}
	if len(what.blocks) > 0 && e.due(sabotageForget) {
		what.blocks = what.blocks[1:]
	}
	e.mem.give(what.blocks)
	if e.due(sabotageMute) {
		return
	}
	if e.due(sabotageTwice) {
		e.tell(ev)
	}
	e.tell(ev)
}

// due says whether a sabotage is to be done now, once; e.mu is held.
func (e *engine) due(what string) bool {
	yes := e.next[what]
	delete(e.next, what)
	return yes
}

func (e *engine) sabotage(what string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if what == sabotageLate && len(e.mem.free) > 0 {
		e.mem.words(0, e.mem.free[0])[0]++
		return
	}
	e.next[what] = true
}

func (e *engine) inspect(paint bool) *inspection {
	s := e.agent.Stats()
	e.mu.Lock()
	defer e.mu.Unlock()
	l := &inspection{Loads: s.LoadsUnderWay, Waiting: s.LoadsWaiting, Claims: s.LoadsClaimed, Offers: s.OffersUnderWay, Outstanding: s.Outstanding, Unread: s.Unread,
		Free: len(e.mem.free), Blocks: e.mem.blocks, Goroutines: runtime.NumGoroutine()}
	for h := range e.held {
		if len(l.Held) == 16 {
			break
		}
		l.Held = append(l.Held, h.id)
	}
	if paint {
		if err := e.mem.checkFree(); err != nil {
			e.tell(event{Op: evWrong, Error: err.Error(), At: now()})
		}
	}
	var ms runtime.MemStats
	runtime.ReadMemStats(&ms)
	l.HeapBytes = ms.HeapAlloc
	return l
}
