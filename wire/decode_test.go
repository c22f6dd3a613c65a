package wire

import (
	"math"
	"reflect"
	"strings"
	"testing"

	"github.com/tinylib/msgp/msgp"
)

func encode(t *testing.T, m msgp.Marshaler) []byte {
	t.Helper()
	b, err := m.MarshalMsg(nil)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestDecode(t *testing.T) {
	for _, want := range requests() {
		got := new(Request)
		if err := Decode(encode(t, want), got); err != nil {
			t.Errorf("kind %d: %v", want.Kind, err)
		} else if !reflect.DeepEqual(plain(got), plain(want)) {
			t.Errorf("kind %d: %+v, want %+v", want.Kind, got, want)
		}
	}
}

// Everything at its limit is read.
func TestDecodeAtTheLimits(t *testing.T) {
	n := func(n int) string { return strings.Repeat("x", n) }
	a := &Agent{ID: n(64), EngineID: n(256), Model: n(512), Fingerprint: n(64), DType: n(64), Endpoints: make([]Endpoint, 16), Shapes: make([]Shape, 65536)}
	a.Endpoints[15] = Endpoint{n(16), n(512), n(8)}
	a.Shapes[65535].Name = n(256)
	a.Lacks = make([]Lack, 16)
	a.Lacks[15] = Lack{n(16), n(512)}
	a.RouteInfo, a.DPSize, a.TPSize, a.PPSize, a.Joined, a.Host = make([]byte, MaxRouteInfo), 1, 1, 1, true, strings.Repeat("h", 64) // as many keys as there are
	a.MustMatch = make([]Fact, 16)
	a.MustMatch[15] = Fact{n(64), n(256)}
	tickets := make([]Ticket, 16)
	tickets[15] = Ticket{n(16), make([]byte, 64)}
	groups := make([]Blocks, 16)
	groups[15].IDs = make([]uint32, MaxBlockIDs)
	for what, m := range map[string]codec{
		"hello":  &Request{Kind: KindHello, Hello: a},
		"agent":  a,
		"load":   &Request{Kind: KindLoad, Load: &Load{TransferID: n(144), Transport: n(16), Grant: make([]byte, 4096), Groups: groups, Regions: make([]uint32, 65536)}},
		"renew":  &Request{Kind: KindRenew, Renew: &Renew{Loads: make([]string, 1024), Claims: make([]string, 1024)}},
		"finish": &Request{Kind: KindFinish, Finishes: []Finish{{TransferID: n(144), Reason: n(1024)}}},
		"reply":  &Reply{Reason: n(1024), Statuses: make([]uint8, 2048), Ends: []End{{2047, 1, n(1024)}}, Tickets: tickets, Signal: make([]byte, MaxSignal)},
		"signal": &Request{Kind: KindSignal, Signal: &Signal{Transport: n(16), Data: make([]byte, MaxSignal)}},
		"join":   &Request{Kind: KindJoin, Join: &Join{Agent: anAgent(), New: true, Since: math.MaxInt64}},
	} {
		got := reflect.New(reflect.TypeOf(m).Elem()).Interface().(codec)
		if err := Decode(encode(t, m), got); err != nil {
			t.Errorf("%s: %v", what, err)
		}
	}
}

func TestDecodeRefuses(t *testing.T) {
	n := func(n int) string { return strings.Repeat("x", n) }
	hello := func(f func(*Agent)) *Request {
		a := anAgent()
		f(a)
		return &Request{Kind: KindHello, Hello: a}
	}
	load := func(f func(*Load)) *Request {
		l := aLoad()
		f(l)
		return &Request{Kind: KindLoad, Load: l}
	}
	const limit = "limit exceeded"
	for what, c := range map[string]struct {
		m    codec
		want string
	}{
		"no kind":           {&Request{}, "without its part"},
		"unknown kind":      {&Request{Kind: 9, Finishes: []Finish{{}}}, "kind 9"},
		"hello missing":     {&Request{Kind: KindHello, Load: aLoad()}, "without its part"},
		"load missing":      {&Request{Kind: KindLoad, Hello: anAgent()}, "without its part"},
		"renew missing":     {&Request{Kind: KindRenew}, "without its part"},
		"finish missing":    {&Request{Kind: KindFinish}, "without its part"},
		"agent id":          {hello(func(a *Agent) { a.ID = n(65) }), "agent id"},
		"engine_id":         {hello(func(a *Agent) { a.EngineID = n(257) }), "engine_id"},
		"model":             {hello(func(a *Agent) { a.Model = n(513) }), "model"},
		"model_fingerprint": {hello(func(a *Agent) { a.Fingerprint = n(65) }), "model_fingerprint"},
		"fact's name":       {hello(func(a *Agent) { a.MustMatch = []Fact{{Name: n(65)}} }), "must_match"},
		"fact":              {hello(func(a *Agent) { a.MustMatch = []Fact{{"state_layout", n(257)}} }), "state_layout"},
		"facts":             {hello(func(a *Agent) { a.MustMatch = make([]Fact, 17) }), limit},
		"dtype":             {hello(func(a *Agent) { a.DType = n(65) }), "dtype"},
		"transport":         {hello(func(a *Agent) { a.Endpoints[1].Transport = n(17) }), "transport"},
		"address":           {hello(func(a *Agent) { a.Endpoints[1].Address = n(513) }), "address"},
		"region name":       {hello(func(a *Agent) { a.Shapes[1].Name = n(257) }), "region name"},
		"route info":        {hello(func(a *Agent) { a.RouteInfo = make([]byte, MaxRouteInfo+1) }), limit},
		"host":              {hello(func(a *Agent) { a.Host = strings.Repeat("h", 65) }), "host of 65 bytes"},
		"endpoints":         {hello(func(a *Agent) { a.Endpoints = make([]Endpoint, 17) }), limit},
		"tokens":            {load(func(l *Load) { l.Tokens = make([]uint32, 17) }), limit},
		"shapes":            {hello(func(a *Agent) { a.Shapes = make([]Shape, 65537) }), limit},
		"entry's shapes":    {&Agent{Shapes: make([]Shape, 65537)}, limit},
		"load's id":         {load(func(l *Load) { l.TransferID = n(145) }), "transfer_id"},
		"load's transport":  {load(func(l *Load) { l.Transport = n(17) }), "transport"},
		"grant":             {load(func(l *Load) { l.Grant = make([]byte, 4097) }), limit},
		"groups":            {load(func(l *Load) { l.Groups = make([]Blocks, 17) }), limit},
		"blocks of a group": {load(func(l *Load) { l.Groups[0].IDs = make([]uint32, MaxBlockIDs+1) }), limit},
		"regions":           {load(func(l *Load) { l.Regions = make([]uint32, 65537) }), limit},
		"renewed transfers": {&Request{Kind: KindRenew, Renew: &Renew{Loads: make([]string, 65537)}}, limit},
		"renewed id":        {&Request{Kind: KindRenew, Renew: &Renew{Claims: []string{"a", n(145)}}}, "transfer_id"},
		"finish's id":       {&Request{Kind: KindFinish, Finishes: []Finish{{TransferID: n(145)}}}, "transfer_id"},
		"finish's reason":   {&Request{Kind: KindFinish, Finishes: []Finish{{Reason: n(1025)}}}, "reason"},
		"reply's reason":    {&Reply{Reason: n(1025)}, "reason"},
		"statuses":          {&Reply{Statuses: make([]uint8, 131073)}, limit},
		"finishes":          {&Request{Kind: KindFinish, Finishes: make([]Finish, 4097)}, limit},
		"end of none":       {&Reply{Statuses: make([]uint8, 2), Ends: []End{{Index: 2}}}, "the end of transfer number 2, but the statuses of only 2"},
		"end's reason":      {&Reply{Statuses: make([]uint8, 2), Ends: []End{{1, 2, n(1025)}}}, "reason"},
		"lacks":             {hello(func(a *Agent) { a.Lacks = make([]Lack, 17) }), limit},
		"lack's reason":     {hello(func(a *Agent) { a.Lacks[0].Reason = n(513) }), "reason"},
		"lack's transport":  {hello(func(a *Agent) { a.Lacks[0].Transport = n(17) }), "transport"},
		"join missing":      {&Request{Kind: KindJoin, Hello: anAgent()}, "without its part"},
		"join of nobody":    {&Request{Kind: KindJoin, Join: &Join{}}, "without its part"},
		"join's engine":     {&Request{Kind: KindJoin, Join: &Join{Agent: &Agent{EngineID: n(257)}}}, "engine_id"},
		"signal missing":    {&Request{Kind: KindSignal, Hello: anAgent()}, "without its part"},
		"signal's bytes":    {&Request{Kind: KindSignal, Signal: &Signal{Data: make([]byte, MaxSignal+1)}}, limit},
		"signal's way":      {&Request{Kind: KindSignal, Signal: &Signal{Transport: n(17)}}, "transport"},
		"answer's bytes":    {&Reply{Signal: make([]byte, MaxSignal+1)}, limit},
		"tickets":           {&Reply{Tickets: make([]Ticket, 17)}, limit},
		"a ticket":          {&Reply{Tickets: []Ticket{{"rdma", make([]byte, 65)}}}, limit},
		"a ticket's way":    {&Reply{Tickets: []Ticket{{n(17), nil}}}, "transport"},
	} {
		got := reflect.New(reflect.TypeOf(c.m).Elem()).Interface().(codec)
		err := Decode(encode(t, c.m), got)
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: error %v, want %q in it", what, err, c.want)
		}
	}

	whole := encode(t, requests()[0])
	for i := range whole {
		if err := Decode(whole[:i], new(Request)); err == nil {
			t.Errorf("cut off after %d of %d bytes: read", i, len(whole))
		}
	}
	for what, c := range map[string]struct {
		b    []byte
		want string
	}{
		"trailing":           {append(whole, 0xc0), "1 bytes after its end"},
		"too long":           {make([]byte, MaxMessage+1), "at most 8388608"},
		"a list":             {[]byte{0x93, 1, 2, 3}, "malformed"},
		"many keys":          {append([]byte{0xde, 0, 33}, whole...), limit},
		"claims 4 Gi shapes": {part(KindHello, "h", append(msgp.AppendString([]byte{0x81}, "s"), 0xdd, 0xff, 0xff, 0xff, 0xff)), limit},
		"claims a signal":    {part(KindSignal, "sg", append(msgp.AppendString([]byte{0x81}, "d"), 0xc6, 0x00, 0x3f, 0xff, 0xff)), "malformed"},
		"claims a 4 GiB id":  {part(KindHello, "h", append(msgp.AppendString([]byte{0x81}, "id"), 0xdb, 0xff, 0xff, 0xff, 0xff)), "malformed"},
		"nested for ever":    {append(msgp.AppendString([]byte{0x81}, "?"), []byte(strings.Repeat("\x91", 1<<20))...), "malformed"},
	} {
		if err := Decode(c.b, new(Request)); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: error %v, want %q in it", what, err, c.want)
		}
	}
}
