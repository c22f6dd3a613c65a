package wire

import (
	"bytes"
	"math"
	"reflect"
	"strings"
	"testing"

	"github.com/tinylib/msgp/msgp"

	"github.com/kvconn/kvconn/rig/alloctest"
)

// maxShort bounds what one message of a few bytes may make Decode allocate. The
// limits on arrays allow 65536 elements to be claimed by a header alone; the
// largest element is a Shape of 40 bytes, and 16 map entries may each claim
// anew only what is larger than before.
const maxShort = 8 << 20

type codec interface {
	message
	msgp.Marshaler
}

// fuzz checks what holds for any bytes.
func fuzz(t *testing.T, b []byte, fresh func() codec) {
	t.Helper()
	m := fresh()
	bound := uint64(math.MaxUint64)
	if len(b) < 1024 {
		bound = maxShort
	}
	var err error
	alloctest.Bound(t, bound, func() { err = Decode(b, m) })
	if err != nil {
		return
	}
	b2, err := m.MarshalMsg(nil)
	if err != nil {
		t.Fatalf("%+v decodes but does not encode: %v", m, err)
	}
	m2 := fresh()
	if err := Decode(b2, m2); err != nil {
		t.Fatalf("%+v does not decode again: %v", m, err)
	}
	b3, err := m2.MarshalMsg(nil)
	if err != nil || !bytes.Equal(b2, b3) {
		t.Fatalf("not the same again: %x, then %x, %v", b2, b3, err)
	}
	if !reflect.DeepEqual(plain(m), plain(m2)) {
		t.Fatalf("not equal: %+v, then %+v", m, m2)
	}
}

// plain makes empty and missing lists alike, as the encoding does.
func plain(v any) any {
	empty(reflect.ValueOf(v))
	return v
}

func empty(v reflect.Value) {
	switch v.Kind() {
	case reflect.Pointer:
		if !v.IsNil() {
			empty(v.Elem())
		}
	case reflect.Struct:
		for i := range v.NumField() {
			empty(v.Field(i))
		}
	case reflect.Slice:
		if v.Len() == 0 {
			v.SetZero()
		}
		for i := range v.Len() {
			empty(v.Index(i))
		}
	}
}

func add(f *testing.F, ms ...msgp.Marshaler) {
	f.Helper()
	f.Add([]byte{})
	for _, m := range ms {
		b, err := m.MarshalMsg(nil)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
		f.Add(b[:len(b)/2])
		f.Add(append(b, 0xc0))
	}
}

func anAgent() *Agent {
	return &Agent{Version: Version, ID: "3f2a", EngineID: "engine-0", DPRank: 1, TPRank: 2, PPRank: 3, Model: "m", DType: "bfloat16", BlockTokens: 16,
		Endpoints: []Endpoint{{"tcp", "10.0.0.1:7000", EncryptMust}, {"rdma", "x", ""}},
		Shapes: []Shape{{"layers.0.k", 8192, 4096, 1000, 0, 16, 8, 8, 16, 2048, 256, 3 | 6<<8},
			{Name: "layers.0.v", BlockStride: 8192, BlockBytes: 4096, NumBlocks: 1000, Group: 1, Tokens: 16, Heads: 1, TotalHeads: 1, TokenStride: 256, HeadStride: 256}},
		Lacks: []Lack{{"shm", "another host"}}, DPSize: 2, RouteInfo: []byte(`{"a":1}`), Host: "h",
		Fingerprint: "1:ab", MustMatch: []Fact{{"speculative", "eagle"}}}
}

func aLoad() *Load {
	return &Load{TransferID: "t-1", Transport: "tcp", Grant: []byte{1, 2, 3},
		Groups: []Blocks{{IDs: []uint32{1, 2, 70000}}, {First: 4}}, Tokens: []uint32{40, 0}, Prompt: 1<<63 + 7, LeaseMS: 30000}
}

func requests() []*Request {
	return []*Request{
		{Kind: KindHello, Hello: anAgent()},
		{Kind: KindLoad, Load: aLoad()},
		{Kind: KindRenew, Renew: &Renew{Loads: []string{"t-1", "t-2"}, Claims: []string{"t-3"}}},
		{Kind: KindFinish, Finishes: []Finish{{TransferID: "t-1", Code: 27, Reason: "no route"}}},
		{Kind: KindSignal, Signal: &Signal{Transport: "rdma", Data: []byte{1, 0, 255}}},
		{Kind: KindJoin, Join: &Join{Agent: &Agent{ID: "p", TPRank: 1, TPSize: 2, PPSize: 1, DPSize: 2, Joined: true}, New: true, Since: 7}},
	}
}

func FuzzRequest(f *testing.F) {
	for _, r := range requests() {
		add(f, r)
	}
	f.Fuzz(func(t *testing.T, b []byte) { fuzz(t, b, func() codec { return new(Request) }) })
}

func FuzzAgent(f *testing.F) {
	add(f, anAgent(), &Agent{})
	f.Fuzz(func(t *testing.T, b []byte) { fuzz(t, b, func() codec { return new(Agent) }) })
}

func FuzzLoad(f *testing.F) {
	add(f, aLoad(), &Load{})
	f.Fuzz(func(t *testing.T, b []byte) { fuzz(t, b, func() codec { return new(Load) }) })
}

func FuzzReply(f *testing.F) {
	add(f, &Reply{}, &Reply{Code: 25, Reason: "no"}, &Reply{Statuses: []uint8{0, 1, 2, 255}},
		&Reply{Statuses: []uint8{6, 6}, Ends: []End{{0, 24, "expired"}, {1, 21, ""}}},
		&Reply{Tickets: []Ticket{{"rdma", make([]byte, 64)}, {"tcp", make([]byte, 16)}, {}}}, &Reply{Signal: []byte("ports")})
	f.Fuzz(func(t *testing.T, b []byte) { fuzz(t, b, func() codec { return new(Reply) }) })
}

// part makes a request of which one part is b: Renew and Finish travel only so.
func part(kind Kind, key string, b []byte) []byte {
	head := msgp.AppendMapHeader(nil, 3)
	head = msgp.AppendUint8(msgp.AppendString(head, "k"), uint8(kind))
	head = msgp.AppendString(msgp.AppendString(head, "f"), "d")
	return append(msgp.AppendString(head, key), b...)
}

func FuzzRenew(f *testing.F) {
	add(f, &Renew{}, &Renew{Loads: []string{"t-1", "", strings.Repeat("x", 128)}})
	f.Fuzz(func(t *testing.T, b []byte) {
		fuzz(t, part(KindRenew, "r", b), func() codec { return new(Request) })
	})
}

func FuzzFinish(f *testing.F) {
	add(f, &Finish{}, &Finish{TransferID: "t-1", Code: 24, Reason: "expired"})
	f.Fuzz(func(t *testing.T, b []byte) {
		fuzz(t, part(KindFinish, "x", append([]byte{0x91}, b...)), func() codec { return new(Request) })
	})
}
