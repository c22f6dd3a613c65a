package rdma

import (
	"context"
	"math"
	"reflect"
	"strings"
	"testing"
	"testing/fstest"
	"time"

	"github.com/kvconn/kvconn/kv"
)

// TestGPURanges: regions on GPUs become one range each, unless they overlap.
func TestGPURanges(t *testing.T) {
	region := func(name string, base uint64, blocks uint32, memory kv.Memory) kv.Region {
		return kv.Region{Name: name, Base: base, BlockStride: 200, BlockBytes: 100, NumBlocks: blocks, Memory: memory}
	}
	gpu0, gpu1 := kv.DeviceMemory(0), kv.DeviceMemory(1)
	l := &kv.Layout{Regions: []kv.Region{
		region("k", 1000, 3, gpu0), region("v", 1100, 3, gpu0), // every second block is the other's
		region("next", 1600, 1, gpu0), // adjoins: it may be another allocation
		region("host", 5000, 2, kv.HostMemory),
		region("other", 500, 1, gpu1),
	}}
	want := []gpuRange{
		{memRange{500, 100}, 1, "other"},
		{memRange{1000, 600}, 0, "k"},
		{memRange{1600, 100}, 0, "next"},
	}
	if got := gpuRanges(l); !reflect.DeepEqual(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
	var r agentMemory
	if err := r.init(l, nil); err == nil || !strings.Contains(err.Error(), `"other" lies in device memory`) {
		t.Error(err)
	}
	if len(r.host) != 1 || r.host[0].Base != 5000 {
		t.Errorf("in the host's memory: %v", r.host)
	}
}

// TestGPUPlace: where a GPU is, and which of the host's it is.
func TestGPUPlace(t *testing.T) {
	file := func(s string) *fstest.MapFile { return &fstest.MapFile{Data: []byte(s + "\n")} }
	sys := fstest.MapFS{}
	for _, f := range []struct{ pci, vendor, class string }{
		{"0000:17:00.0", "0x10de", "0x030200"}, {"0000:3e:00.0", "0x15b3", "0x020700"}, // a card
		{"0000:3f:00.0", "0x10de", "0x030200"}, {"0000:3f:00.1", "0x10de", "0x040300"}, // its sound
		{"0000:ca:00.0", "0x10de", "0x030000"},
	} {
		sys["bus/pci/devices/"+f.pci+"/vendor"], sys["bus/pci/devices/"+f.pci+"/class"] = file(f.vendor), file(f.class)
	}
	for pci, want := range map[string]int{"0000:17:00.0": 0, "0000:3f:00.0": 1, "0000:ca:00.0": 2, "0000:99:00.0": 0} {
		if _, number := gpuPlace(sys, pci); number != want {
			t.Errorf("%s is GPU %d, want %d", pci, number, want)
		}
	}
}

// TestTurn: of equally near cards each GPU of a host takes another, unless that one has much to do.
func TestTurn(t *testing.T) {
	now := time.Now()
	path := func(busy uint64, near distance) candidate {
		p := newPath(1000)
		p.inFlight = busy
		return candidate{p, near}
	}
	for _, c := range []struct {
		name   string
		paths  []candidate
		number int
		want   int
	}{
		{"the first GPU", []candidate{path(0, sameRoot), path(0, sameRoot), path(0, sameNode)}, 0, 0},
		{"the second", []candidate{path(0, sameRoot), path(0, sameRoot), path(0, sameNode)}, 1, 1},
		{"the third begins again", []candidate{path(0, sameRoot), path(0, sameRoot), path(0, sameNode)}, 2, 0},
		{"its card has a little to do", []candidate{path(0, sameRoot), path(900, sameRoot)}, 1, 1},
		{"its card has much to do", []candidate{path(0, sameRoot), path(9000, sameRoot)}, 1, -1},
		{"one is nearest", []candidate{path(0, sameNode), path(0, sameSwitch)}, 0, -1},
		{"none", nil, 0, -1},
	} {
		if got := turn(c.paths, c.number, 1000, now); got != c.want {
			t.Errorf("%s: path %d, want %d", c.name, got, c.want)
		}
	}
}

// TestRemoteCards: a transfer of a GPU's memory takes no card that is far from it, however large it is.
func TestRemoteCards(t *testing.T) {
	near, remote := &localPort{nearGPU: []distance{sameSwitch}, near: otherNode}, &localPort{nearGPU: []distance{otherNode}, near: sameNode}
	cn := &conn{t: &Transport{memory: agentMemory{number: []int{0}}}}
	lanes := []*lane{
		{port: near, path: newPath(1000), queue: newSendQueue[*job](4, maxFlight, signalEvery)},
		{port: remote, path: newPath(1000), queue: newSendQueue[*job](4, maxFlight, signalEvery)},
	}
	for _, bytes := range []uint64{1 << 10, 1 << 20, 1 << 32} {
		if w := cn.choose(lanes, bytes, kv.DeviceMemory(0), time.Now()); w[0] <= 0 || w[1] != 0 {
			t.Errorf("%d bytes of a GPU: weights %v", bytes, w)
		}
	}
	if w := cn.choose(lanes, 1<<32, kv.HostMemory, time.Now()); w[0] <= 0 || w[1] <= 0 {
		t.Errorf("host memory: weights %v", w)
	}
}

// TestExamine: D finds a lane's bytes, and no others, in the lane's place.
func TestExamine(t *testing.T) {
	a, err := newHostArea()
	if err != nil {
		t.Fatal(err)
	}
	defer a.close()
	tr := &Transport{memory: agentMemory{areas: []*area{a}}}
	l := &lane{id: 9, port: &localPort{name: "mlx5_0:1"}}
	bytes := stream(7)
	want := bytes[streamAt(l.id):][:trialBytes]
	look := func(says string) {
		t.Helper()
		err := tr.examine(context.Background(), l, want)
		if says == "" && err != nil || says != "" && (err == nil || !strings.Contains(err.Error(), says)) {
			t.Errorf("%v, want %q", err, says)
		}
	}
	look("is not on trial")
	if l.place, err = tr.memory.places.take(); err != nil || l.place != 1 {
		t.Fatal(l.place, err)
	}
	look("written to host memory by mlx5_0:1 are wrong")
	copy(a.host, bytes[streamAt(l.id-1):][:trialBytes]) // an earlier lane's
	look("are wrong")
	copy(a.host, want)
	look("")
	a.host[trialBytes-1]++
	look("1 of 1024 bytes")
}

// TestPlacesOfTrials: their number is bounded, and each is given back once.
func TestPlacesOfTrials(t *testing.T) {
	var p areaSlots
	lanes := make([]lane, trialPlaces)
	for i := range lanes {
		place, err := p.take()
		if err != nil || place != i+1 {
			t.Fatalf("%d, %v", place, err)
		}
		lanes[i].place = place
	}
	if _, err := p.take(); err == nil {
		t.Error("more lanes than places")
	}
	p.drop(&lanes[3])
	p.drop(&lanes[3])
	if place, err := p.take(); err != nil || place != 4 {
		t.Errorf("%d, %v", place, err)
	}
	if at := streamAt(math.MaxUint32); at+trialBytes > trialWords*8 {
		t.Errorf("a lane's bytes begin at %d of %d", at, trialWords*8)
	}
}
