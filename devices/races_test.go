package devices_test

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"
	"unsafe"

	"github.com/kvconn/kvconn/core"
)

// The known races, on agents over tcp. defects_test.go runs these tests on builds without the
// wait that each needs; there they count wrong reads.
const rounds = 200

func counted(t *testing.T, wrong int) {
	t.Helper()
	if wrong > 0 {
		t.Errorf("%d of %d reads were wrong", wrong, rounds)
	}
}

// TestReadAfterMoment: P reads its blocks when the kernels are done that the engine's stream had
// at the offer, though D has asked before.
func TestReadAfterMoment(t *testing.T) {
	p, d := pair(t)
	wrong := 0
	for i := range rounds {
		id, pattern := core.TransferID(fmt.Sprint("t", i)), uint64(i+1)
		d.load(id, p, 1, 1, 0)
		if i%2 == 0 { // D's word may be here before the offer, or after
			time.Sleep(time.Duration(i) * 10 * time.Microsecond)
		}
		p.Kernel(p.stream, p.at(0), blockBytes, pattern)
		p.offer(id, 0, 1, p.moment())
		d.well(id)
		p.well(id)
		if d.Wrong(d.at(1), blockBytes, pattern) > 0 {
			wrong++
		}
		p.Sync(p.stream)
	}
	counted(t, wrong)
}

// TestWrittenAfterMoment: D's blocks are written when the kernels are done that read their old
// content, though P has offered before.
func TestWrittenAfterMoment(t *testing.T) {
	p, d := pair(t)
	d.Must("kvgpu_slow", d.stream, 10_000)
	counter := d.Out("cuMemHostAlloc", 8, 0)
	t.Cleanup(func() { d.Must("cuMemFreeHost", counter) })
	bad := *(**uint64)(unsafe.Pointer(&counter))
	wrong := 0
	for i := range rounds {
		id, old, fresh := core.TransferID(fmt.Sprint("t", i)), uint64(2*i+1), uint64(2*i+2)
		p.Fill(p.at(0), blockBytes, fresh)
		d.Fill(d.at(1), blockBytes, old)
		before := *bad
		p.offer(id, 0, 1, 0)
		d.Must("kvgpu_kernel_check", d.stream, d.at(1), blockBytes, uintptr(old), 0, counter)
		d.load(id, p, 1, 1, d.moment())
		d.well(id)
		p.well(id)
		d.Sync(d.stream)
		if *bad != before {
			wrong++
		}
		if d.Wrong(d.at(1), blockBytes, fresh) > 0 {
			t.Fatal("the bytes have not landed")
		}
	}
	counted(t, wrong)
}

// TestReportAfterCopy: a load is reported when all its bytes are in the device's memory.
func TestReportAfterCopy(t *testing.T) {
	p, d := pair(t)
	wrong := 0
	for i := range rounds {
		id, pattern := core.TransferID(fmt.Sprint("t", i)), uint64(i+1)
		p.Fill(p.at(0), blockBytes, pattern)
		p.offer(id, 0, 1, 0)
		d.load(id, p, 1, 1, 0)
		d.well(id)
		if d.Wrong(d.at(1), blockBytes, pattern) > 0 {
			wrong++
		}
		p.well(id)
		d.settled()
	}
	counted(t, wrong)
}

// TestCancelWaits: the blocks of a load that was cancelled belong to another request when the end
// is reported, and nothing lands in them.
func TestCancelWaits(t *testing.T) {
	p, d := pair(t)
	p.Fill(p.at(0), 4*blockBytes, 1)
	random := rand.New(rand.NewPCG(1, 1))
	wrong, cut := 0, 0
	for i := range rounds {
		id := core.TransferID(fmt.Sprint("t", i))
		p.offer(id, 0, 4, 0)
		d.load(id, p, 2, 4, 0)
		time.Sleep(time.Duration(random.IntN(20_000)) * time.Microsecond)
		if _, err := d.Cancel([]core.TransferID{id}, "of a test"); err != nil {
			t.Fatal(err)
		}
		if d.ended(id).Code != core.OK {
			cut++
		}
		d.Fill(d.at(2), 4*blockBytes, uint64(i+2))
		p.ended(id)
		d.settled()
		if d.Wrong(d.at(2), 4*blockBytes, uint64(i+2)) > 0 {
			wrong++
		}
	}
	t.Logf("%d of %d were cut off", cut, rounds)
	counted(t, wrong)
}

// TestWithdrawWaits: when P has taken a block back, nothing reads it any more. The engine's stream
// overwrites it at once, for another request, and D ends well with the bytes of its own, whether
// it had them all by then or loads anew what P offers at another place.
func TestWithdrawWaits(t *testing.T) {
	p, d := pair(t)
	random := rand.New(rand.NewPCG(1, 2))
	wrong, read := 0, 0
	for i := range rounds {
		id, pattern, other := core.TransferID(fmt.Sprint("t", i)), uint64(2*i+1), uint64(2*i+2)
		p.Fill(p.at(0), blockBytes, pattern)
		p.Fill(p.at(1), blockBytes, pattern)
		part := core.PartialOffer{ID: id, Blocks: sequence(0, 1).Blocks, Ready: []uint32{1}}
		if _, err := p.OfferPartial([]core.PartialOffer{part}); err != nil {
			t.Fatal(err)
		}
		d.load(id, p, 2, 1, 0)
		time.Sleep(time.Duration(random.IntN(4_000)) * time.Microsecond)
		if err := p.Withdraw([]core.TransferID{id}, patience); err != nil {
			t.Fatal(err)
		}
		p.Halt(true) // what P's device has to do now is counted
		if p.Count("stuck") > 0 {
			read++
		}
		p.Halt(false)
		p.Kernel(p.stream, p.at(0), blockBytes, other)
		p.offer(id, 1, 1, 0)
		d.well(id)
		p.well(id)
		if d.Wrong(d.at(2), blockBytes, pattern) > 0 {
			wrong++
		}
		p.Sync(p.stream)
	}
	t.Logf("%d of %d were taken back while D loaded them", p.Stats().Withdrawn, rounds)
	if read > 0 {
		t.Errorf("%d of %d withdrawn blocks were still read", read, rounds)
	}
	counted(t, wrong)
}
