package memrelease

import (
	"os"
	"runtime"
	"runtime/debug"
	"strconv"
	"strings"
	"testing"
)

// TestFreeMemoryIsTaken: of a large heap that was given back nearly all is taken again, and
// costs the system nothing.
func TestFreeMemoryIsTaken(t *testing.T) {
	const burst = 64 << 20
	b := make([]byte, burst)
	for i := 0; i < len(b); i += 512 {
		b[i] = 1
	}
	runtime.KeepAlive(b)
	b = nil
	debug.FreeOSMemory()
	before := resident(t)
	k := &releaser{}
	pieces := k.takeFree()
	grew := resident(t) - before
	free, released := freeMemory()
	var taken uint64
	for i := range pieces {
		taken += uint64(pieces[i].Cap())
	}
	runtime.KeepAlive(pieces)
	if taken < burst*3/4 {
		t.Errorf("%d MiB were taken of more than %d", taken>>20, burst>>20)
	}
	if left := free + released; left > burst/4 {
		t.Errorf("%d MiB are free after nearly all was taken", left>>20)
	}
	if grew > burst/8 {
		t.Errorf("the process grew by %d MiB", grew>>20)
	}
}

// TestAddressesDoNotGrow: what does not fit into what is free is asked for once.
func TestAddressesDoNotGrow(t *testing.T) {
	k := &releaser{}
	k.giveBack()
	before := mapped()
	for range 8 {
		k.compact()
		debug.FreeOSMemory()
	}
	if grew := mapped() - before; grew > 16<<20 {
		t.Errorf("%d MiB of addresses came on top of %d", grew>>20, before>>20)
	}
}

// TestLimit: what is taken leaves the rest of a limit to others.
func TestLimit(t *testing.T) {
	const limit = 64 << 20
	defer debug.SetMemoryLimit(debug.SetMemoryLimit(limit))
	var taken int
	for _, p := range (&releaser{}).takeFree() {
		taken += p.Cap()
	}
	if taken > limit/4 {
		t.Errorf("%d MiB are taken of a limit of %d", taken>>20, limit>>20)
	}
}

// resident is this process's memory.
func resident(t *testing.T) int {
	t.Helper()
	text, err := os.ReadFile("/proc/self/statm")
	if err != nil {
		t.Fatal(err)
	}
	pages, err := strconv.Atoi(strings.Fields(string(text))[1])
	if err != nil {
		t.Fatal(err)
	}
	return pages * os.Getpagesize()
}
