package natsbus

import (
	"context"
	"encoding/binary"
	"testing"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/rig/nettest"
	"github.com/kvconn/kvconn/wire"
)

// BenchmarkClusterRequest is a request and its answer through a NATS server of another process.
func BenchmarkClusterRequest(b *testing.B) {
	c := nettest.NewNATS(b)
	prefill := newBus(b, Options{Identity: named("P"), ClusterURL: c.URL()})
	prefill.Serve(func(core.Via, *wire.Request) *wire.Reply { return &wire.Reply{} })
	decode := newBus(b, Options{Identity: named("D"), ClusterURL: c.URL()})
	for name, req := range map[string]*wire.Request{
		"finish":        {Kind: wire.KindFinish, Finishes: []wire.Finish{{TransferID: "t"}}},
		"signal-64-KiB": {Kind: wire.KindSignal, Signal: &wire.Signal{Transport: "x", Data: make([]byte, 64<<10)}},
	} {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if _, err := decode.Request(context.Background(), "", named("P").ID(), req); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// BenchmarkOpenSession is all that two agents compute to open a session.
func BenchmarkOpenSession(b *testing.B) {
	d, p := NewIdentity(), NewIdentity()
	b.ReportAllocs()
	for b.Loop() {
		established(b, d, p)
	}
}

// BenchmarkSeal is all that two agents compute more for a request and its answer.
func BenchmarkSeal(b *testing.B) {
	asks, answers := established(b, NewIdentity(), NewIdentity())
	for name, size := range map[string]int{"100-B": 100, "64-KiB": 64 << 10} {
		b.Run(name, func(b *testing.B) {
			b.SetBytes(int64(size))
			m := make([]byte, sealOverhead+size)
			for b.Loop() {
				request := asks.sealRequest(m[:sealHeader+size])
				to := requestTagOf(request)
				if _, err := answers.requests.unseal(request, nil); err != nil {
					b.Fatal(err)
				}
				answer := answers.sealAnswer(m[:sealHeader+100], &to)
				if _, err := asks.openAnswer(answer, &to); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// BenchmarkNewSession is the place of one more session where all are in use: by as many agents, and by one who has more.
func BenchmarkNewSession(b *testing.B) {
	s, id := newResponderSessions(), uint64(0)
	use := func(key uint64) {
		id++
		v := stub(id, 0)
		binary.BigEndian.PutUint64(v.key[:], key)
		s.add(v)
		s.use(v, 0)
	}
	for key := range uint64(maxSessions) {
		use(1 + key)
	}
	b.ReportAllocs()
	for b.Loop() {
		use(0)
	}
}

// BenchmarkUnknownSenders is what a responder computes for a message of somebody whom it does not know.
func BenchmarkUnknownSenders(b *testing.B) {
	d, p, e := NewIdentity(), NewIdentity(), NewIdentity()
	o, err := d.open(p.id)
	if err != nil {
		b.Fatal(err)
	}
	forged, err := (&Identity{signer: e.signer, id: d.id}).open(p.id)
	if err != nil {
		b.Fatal(err)
	}
	to := requestTagOf(o.message)
	for name, do := range map[string]func(){
		"open":        func() { _, _, _ = p.accept(d.id, o.message, 1) },
		"forged-open": func() { _, _, _ = p.accept(d.id, forged.message, 1) },
		"notice":      func() { p.notice(d.id, &to, noticeAgain, "") },
	} {
		b.Run(name, func(b *testing.B) {
			for b.Loop() {
				do()
			}
		})
	}
}
