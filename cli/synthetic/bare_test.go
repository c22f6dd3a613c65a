package synthetic

import (
	"bufio"
	"io"
	"testing"

	"go.uber.org/zap"

	"github.com/kvconn/kvconn/rig/leaktest"
)

// TestBareLoop: the loop brings each byte of the blocks to its place, and no other; else a rate of it would mean nothing.
func TestBareLoop(t *testing.T) {
	leaktest.Check(t)
	in, commands := io.Pipe()
	answers, out := io.Pipe()
	served := make(chan error, 1)
	go func() { served <- Serve(t.Context(), in, out, zap.NewNop()) }()
	peer := &Process{in: commands, lines: make(chan []byte, 1)}
	go func() {
		for sc := bufio.NewScanner(answers); sc.Scan(); {
			peer.lines <- append([]byte(nil), sc.Bytes()...)
		}
	}()
	const layers, blocks, block, count = 3, 14, 4096, 7
	if _, err := peer.Ask(Command{Op: "open", Layers: layers, Blocks: blocks, Block: block, Transport: "tcp"}); err != nil {
		t.Fatal(err)
	}
	if _, err := peer.Ask(Command{Op: "offer", ID: "t", Transfer: 5, Count: count}); err != nil {
		t.Fatal(err)
	}
	for _, streams := range []int{1, 2, 5, 3 * layers * count} {
		pool, err := NewPool(layers, blocks, block)
		if err != nil {
			t.Fatal(err)
		}
		pool.Clear()
		dst := pool.Scatter(count, 9)
		took, err := pool.ReceiveBare(peer, Command{Transfer: 5, Count: count, Streams: streams}, dst)
		if err != nil || took <= 0 {
			t.Fatalf("%d streams: %v, %v", streams, took, err)
		}
		if err := pool.Check(5, 0, dst); err != nil {
			t.Errorf("%d streams: %v", streams, err)
		}
		pool.Free()
	}
	if used, err := peer.ProcessorTime(); err != nil || used <= 0 {
		t.Errorf("processor time %v, %v", used, err)
	}
	commands.Close()
	if err := <-served; err != nil {
		t.Error(err)
	}
	answers.Close()
}
