// Cases of ids that come twice or that nobody knows, and of calls after Close.

package coretest

import (
	"bytes"
	"strings"
	"sync"
	"testing"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/kv"
)

// idAgain: a load whose first agent is gone expects the same id again.
func idAgain(t *testing.T, f Fixture) {
	p, d := pair(t, f, dense(4096, 20), dense(4096, 20))
	src, first, second := [][]kv.BlockID{sequence(0, 5)}, [][]kv.BlockID{sequence(1, 5)}, [][]kv.BlockID{sequence(10, 5)}
	p.paint(1, src)
	old := d.expect("t", p, first)
	d.revoke("t")
	grant := d.expect("t", p, second)
	if bytes.Equal(old, grant) {
		t.Errorf("the second grant is the first one again")
	}
	p.write("t", d, grant, src, second)
	well(t, "t", p, d, d.layout.Bytes(second))
	d.check(t, delivery{transfer: 1, blocks: second})
}

// expectTwice: a part of a transfer is expected twice. The error names the transfer as the engine knows it.
func expectTwice(t *testing.T, f Fixture) {
	const part = "t" + core.PartSeparator + "0/2@0"
	p, d := pair(t, f, dense(4096, 20), dense(4096, 20))
	src, dst := [][]kv.BlockID{sequence(0, 5)}, [][]kv.BlockID{sequence(1, 5)}
	p.paint(1, src)
	grant := d.expect(part, p, dst)
	_, err := d.tr.Expect(part, p.id, d.layout.Segments([][]kv.BlockID{sequence(10, 5)}))
	if err == nil {
		t.Errorf("Expect of an id that is expected already gave no error")
	} else if text := err.Error(); !strings.Contains(text, `transfer "t"`) {
		t.Errorf("the error does not name the transfer as the engine does: %s", text)
	}
	p.write(part, d, grant, src, dst)
	well(t, part, p, d, d.layout.Bytes(dst))
	d.check(t, delivery{transfer: 1, blocks: dst})
}

func unknownIDs(t *testing.T, f Fixture) {
	p, d := pair(t, f, dense(4096, 4), dense(4096, 4))
	d.revoke("never")
	p.revoke("never")
	p.tr.Stop("never")
	d.tr.Stop("never")
	src := [][]kv.BlockID{sequence(0, 4)}
	p.paint(1, src)
	p.write("t", d, d.expect("t", p, src), src, src)
	well(t, "t", p, d, d.layout.Bytes(src))
}

// closed: an idle transport closes at once, from several goroutines too, and
// takes no more calls.
func closed(t *testing.T, f Fixture) {
	p, d := pair(t, f, dense(4096, 4), dense(4096, 4))
	blocks := [][]kv.BlockID{sequence(0, 4)}
	p.paint(1, blocks)
	grant := d.expect("t", p, blocks)
	d.expect("u", p, blocks)
	var wg sync.WaitGroup
	for range 3 {
		wg.Go(func() {
			if err := d.tr.Close(); err != nil {
				t.Errorf("Close: %v", err)
			}
		})
	}
	wg.Wait()
	d.sink.Shut()
	if _, err := d.tr.Expect("v", p.id, d.layout.Segments(blocks)); err == nil {
		t.Errorf("Expect after Close gave no error")
	}
	if _, err := d.tr.Admit(p.id); err == nil {
		t.Errorf("Admit after Close gave no error")
	}
	d.tr.Dismiss(p.id)
	d.revoke("t")
	p.write("t", d, grant, blocks, blocks)
	if o := p.sink.Wait("written", "t", 1); o.Err == nil {
		t.Errorf("a write to a closed agent ended well: %+v", o)
	}
	d.check(t)
	late := open(t, f, "late", dense(4096, 4))
	p.admit(late.id)
	p.write("w", late, grant, blocks, blocks)
	p.close() // checks that the write was told
}
