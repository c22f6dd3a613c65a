package synthetic

import (
	"bytes"
	"encoding/json"
	"os"
	"slices"
	"strings"
	"testing"

	"go.uber.org/zap"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/rig/leaktest"
)

// TestPoolFindsWrongBytes: a pool's check must see each kind of wrong byte.
func TestPoolFindsWrongBytes(t *testing.T) {
	p, err := NewPool(2, 8, 64)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Free()
	ids := []kv.BlockID{3, 1, 6}
	fresh := func() {
		p.Clear()
		p.Fill(5, ids)
	}
	fresh()
	if err := p.Check(5, 0, ids); err != nil {
		t.Fatal(err)
	}
	for name, harm := range map[string]func(){
		"a byte inside":            func() { p.mem[3*64+9] ^= 1 },
		"a byte outside":           func() { p.mem[2*64] ^= 1 },
		"two blocks in exchange":   func() { p.Fill(5, []kv.BlockID{1, 3, 6}) },
		"another transfer's bytes": func() { p.Fill(6, ids) },
		"another layer's block":    func() { copy(p.mem[8*64+3*64:][:64], p.mem[3*64:][:64]) },
	} {
		fresh()
		harm()
		if p.Check(5, 0, ids) == nil {
			t.Errorf("%s went unseen", name)
		}
	}
	fresh()
	if p.Check(5, 1, ids) == nil {
		t.Error("blocks of other positions went unseen")
	}
}

// TestParts: each of a command's blocks is in one of its transfers.
func TestParts(t *testing.T) {
	o, ids := Command{ID: "t", Parts: 4}, []kv.BlockID{9, 4, 7, 1, 0, 3}
	var all []kv.BlockID
	for i := range o.IDs() {
		part := o.Part(ids, i).Blocks[0]
		if len(part) == 0 {
			t.Errorf("transfer %d has no blocks", i)
		}
		all = append(all, part...)
	}
	if !slices.Equal(all, ids) || !slices.Equal(o.IDs(), []core.TransferID{"t-0", "t-1", "t-2", "t-3"}) {
		t.Errorf("%v have %v, want %v", o.IDs(), all, ids)
	}
	o.Parts = 0
	if !slices.Equal(o.Part(ids, 0).Blocks[0], ids) || !slices.Equal(o.IDs(), []core.TransferID{"t"}) {
		t.Errorf("one transfer, %v, has %v", o.IDs(), o.Part(ids, 0))
	}
}

// TestServeRunsCommands drives the second process's loop in this one.
func TestServeRunsCommands(t *testing.T) {
	leaktest.Check(t)
	commands := []Command{
		{Op: "open", Layers: 2, Blocks: 8, Block: 4096},
		{Op: "announce", ID: "t"},
		{Op: "offer", ID: "t", Transfer: 1, Count: 3},
		{Op: "offer", ID: "t", Transfer: 1, Count: 3},
		{Op: "dance"},
		{Op: "close"},
	}
	var in, out bytes.Buffer
	for _, o := range commands {
		b, _ := json.Marshal(o)
		in.Write(append(b, '\n'))
	}
	in.WriteString("no json\n")
	if err := Serve(t.Context(), &in, &out, zap.NewNop()); err != nil {
		t.Fatal(err)
	}
	dec := json.NewDecoder(&out)
	for i, says := range []string{"", "", "", "offered already", "dance", "", "invalid character"} {
		var a Answer
		if err := dec.Decode(&a); err != nil {
			t.Fatal(err)
		}
		if (says == "") != (a.Error == "") || !strings.Contains(a.Error, says) {
			t.Errorf("answer %d is %+v, want an error with %q", i, a, says)
		}
	}
}

// TestReadLoop: what local is held against copies just the blocks of a transfer.
func TestReadLoop(t *testing.T) {
	var pools [3]*Pool
	for i := range pools {
		p, err := NewPool(3, 200, 4096)
		if err != nil {
			t.Fatal(err)
		}
		defer p.Free()
		p.Clear()
		pools[i] = p
	}
	src, dst := pools[0].Scatter(100, 1), pools[0].Scatter(100, 2)
	pools[0].Fill(7, src)
	n, err := pools[1].ReadLoop(os.Getpid(), pools[0].Regions()[0].Base, src, dst)
	if err != nil || n != 3*100*4096 {
		t.Fatal(n, err)
	}
	pools[2].CopyFrom(pools[0], src, dst)
	for _, p := range pools[1:] {
		if err := p.Check(7, 0, dst); err != nil {
			t.Error(err)
		}
	}
	if _, err := pools[1].ReadLoop(os.Getpid(), 8, src, dst); err == nil {
		t.Error("memory that is not there was read")
	}
}
