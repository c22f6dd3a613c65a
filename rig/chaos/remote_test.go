package chaos

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/kvconn/kvconn/internal/freeport"
	"github.com/kvconn/kvconn/node"
	"github.com/kvconn/kvconn/rig/leaktest"
)

// TestRelay: an engine that is reached through a relay obeys, and both end with
// the relay's input.
func TestRelay(t *testing.T) {
	leaktest.Check(t)
	ports, err := freeport.Take(1)
	if err != nil {
		t.Fatal(err)
	}
	address := fmt.Sprint("127.0.0.1:", ports[0])
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	served, relayed := make(chan error, 1), make(chan error, 1)
	go func() { served <- ServeEngine(ctx, address) }()
	in, commands := io.Pipe()
	events, out := io.Pipe()
	go func() {
		relayed <- Relay(ctx, address, in, out)
		out.Close()
	}()
	open := opening{EngineID: "d0", Role: node.RoleDecode, Lease: leaseSeconds, EarlyLoad: earlySeconds, MaxTransfers: 16, Regions: 1, Blocks: 4, BlockBytes: 4096}
	if err := json.NewEncoder(commands).Encode(command{Op: opOpen, Seq: 7, Open: &open}); err != nil {
		t.Fatal(err)
	}
	sc := bufio.NewScanner(events)
	var ev event
	if !sc.Scan() || json.Unmarshal(sc.Bytes(), &ev) != nil || ev.Op != evOpened || ev.Seq != 7 || ev.Error != "" || ev.Agent == "" {
		t.Errorf("the engine says %q, want that it is open", sc.Text())
	}
	commands.Close()
	for sc.Scan() {
	}
	if err := <-relayed; err != nil {
		t.Errorf("relay: %v", err)
	}
	if err := <-served; err != nil {
		t.Errorf("engine: %v", err)
	}
}

// TestRelayAlone: nobody is there.
func TestRelayAlone(t *testing.T) {
	leaktest.Check(t)
	ctx, cancel := context.WithTimeout(context.Background(), 300*time.Millisecond)
	defer cancel()
	if err := Relay(ctx, "127.0.0.1:1", strings.NewReader(""), &bytes.Buffer{}); err == nil {
		t.Error("a relay to nowhere ends well")
	}
	if err := ServeEngine(ctx, "127.0.0.1:0"); err == nil {
		t.Error("an engine without a driver ends well")
	}
}

// TestRailCommand: the command's words are the error, and every path gets its turn.
func TestRailCommand(t *testing.T) {
	r := paths{2, "false"}
	if err := r.set(r.all(), pathIsOff); err == nil || !strings.Contains(err.Error(), "false 0 off") || !strings.Contains(err.Error(), "false 1 off") {
		t.Errorf("a command that fails: %v", err)
	}
	if err := (paths{2, "true"}).set([]int{0, 1}, pathIsOn); err != nil {
		t.Error(err)
	}
	if err := (paths{}).set(nil, pathIsOn); err != nil {
		t.Error(err)
	}
}
