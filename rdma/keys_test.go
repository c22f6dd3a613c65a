package rdma

import (
	"math"
	"strings"
	"testing"

	"github.com/kvconn/kvconn/kv"
)

func mustTable(t testing.TB, where string, regions []memRange, keys ...keyRange) *keyTable {
	t.Helper()
	table, err := newKeyTable(where, regions, keys)
	if err != nil {
		t.Fatal(err)
	}
	return table
}

func key(base, length uint64, k uint32) keyRange { return keyRange{memRange{base, length}, k} }

func TestKeyTableRefuses(t *testing.T) {
	const top = math.MaxUint64
	for _, c := range []struct {
		name    string
		regions []memRange
		keys    []keyRange
		want    string
	}{
		{"no keys", []memRange{{0x1000, 64}}, nil, "region 0 at the peer: 0x1000+64 is not registered from 0x1000 on"},
		{"an end that is not registered", []memRange{{0x1000, 65}}, []keyRange{key(0x1000, 64, 1)}, "not registered from 0x1040 on"},
		{"a start that is not", []memRange{{0x1000, 64}}, []keyRange{key(0x1001, 200, 1)}, "not registered from 0x1000 on"},
		{"a gap", []memRange{{0x1000, 64}}, []keyRange{key(0x1000, 16, 1), key(0x1011, 200, 2)}, "not registered from 0x1010 on"},
		{"an empty region", []memRange{{0x1000, 0}}, []keyRange{key(0x1000, 64, 1)}, "region 0 at the peer: 0x1000+0 is empty"},
		{"a region that wraps", []memRange{{0x1000, 8}, {top - 7, 8}}, []keyRange{key(0x1000, 64, 1)}, "region 1 at the peer: 0xfffffffffffffff8+8 is empty or leaves"},
		{"a region of everything", []memRange{{0x1000, top}}, []keyRange{key(0x1000, 64, 1)}, "leaves the address space"},
		{"an empty key", []memRange{{0x1000, 8}}, []keyRange{key(0x1000, 64, 1), key(0x1040, 0, 1)}, "key 1 at the peer: 0x1040+0 is empty"},
		{"a key that wraps", []memRange{{0x1000, 8}}, []keyRange{key(0x1000, top-0x1000+1, 1)}, "leaves the address space"},
		{"keys out of order", []memRange{{0x1000, 8}}, []keyRange{key(0x2000, 8, 1), key(0x1000, 8, 1)}, "key 1 at the peer: 0x1000+8 begins before 0x2008, where the key before it ends"},
		{"keys that overlap", []memRange{{0x1000, 8}}, []keyRange{key(0x1000, 8, 1), key(0x1007, 8, 1)}, "begins before"},
		{"too many regions", make([]memRange, kv.MaxRegions+1), nil, "65537 regions at the peer, at most 65536"},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := newKeyTable("at the peer", c.regions, c.keys)
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("%v, want %q", err, c.want)
			}
		})
	}
}

func TestKeyTableAt(t *testing.T) {
	table := mustTable(t, "here",
		[]memRange{{0x1000, 0x100}, {0x1080, 0x180}, {0x1100, 0x100}},
		key(0x0800, 0x880, 7), key(0x1080, 0x80, 8), key(0x1100, 0x100, 9), key(0x9000, 8, 10))
	for _, c := range []struct {
		region         uint32
		offset, length uint64
		addr           uint64
		key            uint32
		covered        uint64
		err            string
	}{
		{0, 0, 0x100, 0x1000, 7, 0x80, ""},
		{0, 0x7f, 0x81, 0x107f, 7, 1, ""},
		{0, 0x80, 0x80, 0x1080, 8, 0x80, ""},
		{0, 0x90, 8, 0x1090, 8, 8, ""},
		{0, 0x100, 0, 0x1100, 8, 0, ""},
		{1, 0, 0x180, 0x1080, 8, 0x80, ""},
		{1, 0x80, 0x100, 0x1100, 9, 0x100, ""},
		{2, 0xff, 1, 0x11ff, 9, 1, ""},
		{0, 0x101, 0, 0, 0, 0, "region 0: 0 bytes from offset 257 leave it: it has 256 bytes here"},
		{0, 0xff, 2, 0, 0, 0, "region 0: 2 bytes from offset 255 leave it"},
		{0, math.MaxUint64, 1, 0, 0, 0, "leave it"},
		{0, 1, math.MaxUint64, 0, 0, 0, "leave it"},
		{3, 0, 0, 0, 0, 0, "region 3: there are 3 here"},
		{math.MaxUint32, 0, 0, 0, 0, 0, "there are 3"},
	} {
		addr, k, covered, err := table.at(c.region, c.offset, c.length)
		if c.err != "" {
			if err == nil || !strings.Contains(err.Error(), c.err) {
				t.Errorf("%+v: %v", c, err)
			}
			continue
		}
		if addr != c.addr || k != c.key || covered != c.covered || err != nil {
			t.Errorf("%+v: got %#x, %d, %#x, %v", c, addr, k, covered, err)
		}
	}
}
