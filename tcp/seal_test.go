package tcp

import (
	"bytes"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/rig/leaktest"
)

// sealsOf are the keys of a stream, as both sides derive them.
func sealsOf(t testing.TB, ticket random, key secret, number int, attempt uint64, ofD, ofP random) *seals {
	t.Helper()
	said := sealedHello(ticket, key, number, attempt, 0)
	k, err := newSeals(ticket, key, &said.of, ofD, ofP)
	if err != nil {
		t.Fatal(err)
	}
	return k
}

func mustSeal(t testing.TB, b *box, plain []byte) []byte {
	t.Helper()
	out, err := b.seal(nil, plain)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// TestKeysOfStreams: the records of a stream can be opened with its keys and in its order only.
func TestKeysOfStreams(t *testing.T) {
	ticket, key, ofD, ofP := newRandom(), secret(newRandom()), newRandom(), newRandom()
	text := []byte("the bytes of a block")
	record := mustSeal(t, sealsOf(t, ticket, key, 1, 7, ofD, ofP).data, text)
	for name, k := range map[string]*seals{
		"another ticket":   sealsOf(t, newRandom(), key, 1, 7, ofD, ofP),
		"another secret":   sealsOf(t, ticket, secret(newRandom()), 1, 7, ofD, ofP),
		"another stream":   sealsOf(t, ticket, key, 2, 7, ofD, ofP),
		"another attempt":  sealsOf(t, ticket, key, 1, 8, ofD, ofP),
		"another D's word": sealsOf(t, ticket, key, 1, 7, newRandom(), ofP),
		"another P's word": sealsOf(t, ticket, key, 1, 7, ofD, newRandom()),
	} {
		if got, err := k.data.open(nil, record); err == nil {
			t.Errorf("%s opens the record: %q", name, got)
		}
	}
	k := sealsOf(t, ticket, key, 1, 7, ofD, ofP)
	if got, err := k.answers.open(nil, record); err == nil {
		t.Errorf("the other direction opens the record: %q", got)
	}
	if got, err := k.data.open(nil, record); err != nil || !bytes.Equal(got, text) {
		t.Errorf("%q, %v", got, err)
	}
	if got, err := k.data.open(nil, record); err == nil {
		t.Errorf("the record is opened twice: %q", got)
	}
	same := sealsOf(t, ticket, key, 1, 7, ofD, ofP).data
	if bytes.Equal(mustSeal(t, same, text), mustSeal(t, same, text)) {
		t.Error("equal records look alike: they have one nonce")
	}
}

// TestNextKey: a direction goes on with a key that follows from the one before.
func TestNextKey(t *testing.T) {
	ticket, key, ofD, ofP := newRandom(), secret(newRandom()), newRandom(), newRandom()
	a, b := sealsOf(t, ticket, key, 0, 1, ofD, ofP).data, sealsOf(t, ticket, key, 0, 1, ofD, ofP).data
	before := a.secret
	a.n, b.n = recordsPerKey-1, recordsPerKey-1
	for i := range 3 {
		got, err := b.open(nil, mustSeal(t, a, []byte{byte(i)}))
		if err != nil || got[0] != byte(i) {
			t.Fatalf("record %d: %v, %v", i, got, err)
		}
	}
	if bytes.Equal(a.secret, before) || a.n != 2 {
		t.Errorf("after %d records the key is the same", recordsPerKey)
	}
}

// FuzzRecords: whatever is done to a stream of records, those that are opened are the first
// ones, each at its place. Of the input each three bytes do something: which record, which
// byte, and what.
func FuzzRecords(f *testing.F) {
	f.Add([]byte{0, 0, 0, 1, 0, 0, 2, 0, 0})
	f.Add([]byte{0, 0, 0, 1, 5, 1, 2, 0, 0})
	f.Add([]byte{1, 0, 0, 0, 0, 0})
	f.Add([]byte{0, 0, 0, 0, 0, 0, 3, 9, 2})
	ticket, key, ofD, ofP := newRandom(), secret(newRandom()), newRandom(), newRandom()
	var plain, records [][]byte
	b := sealsOf(f, ticket, key, 0, 1, ofD, ofP).data
	for i := range 8 {
		plain = append(plain, bytes.Repeat([]byte{byte(i)}, 1+7*i))
		records = append(records, mustSeal(f, b, plain[i]))
	}
	f.Fuzz(func(t *testing.T, in []byte) {
		b := sealsOf(t, ticket, key, 0, 1, ofD, ofP).data
		for i := 0; len(in) >= 3; in, i = in[3:], i+1 {
			record := bytes.Clone(records[int(in[0])%len(records)])
			at := int(in[1]) % len(record)
			switch in[2] % 4 {
			case 1:
				record[at] ^= 1 << (in[2] >> 5)
			case 2:
				record = record[:at]
			case 3:
				record = append(record, record[:at]...)
			}
			got, err := b.open(nil, record)
			if err != nil {
				return
			}
			if i >= len(plain) || !bytes.Equal(got, plain[i]) {
				t.Fatalf("record %d is opened to %x", i, got)
			}
		}
	})
}

// FuzzSealedReceiver: whatever somebody without the secret says to D on a sealed stream, no
// byte lands, and the transfer does not end well.
func FuzzSealedReceiver(f *testing.F) {
	f.Add(frameBytes(header{kind: frameHelloReply}), []byte{})
	f.Add(frameBytes(header{kind: frameHelloReply, key: newRandom()}), append(marked(header{kind: frameData, length: fuzzBlock}), make([]byte, fuzzBlock)...))
	f.Add(marked(header{kind: frameData, length: fuzzBlock}), make([]byte, fuzzBlock))
	f.Add(frameBytes(header{kind: frameLeave}), []byte{})
	f.Fuzz(func(t *testing.T, answer, in []byte) {
		d := newSizedAgent(t, Config{Streams: 1, StallTimeout: time.Hour}, fuzzBlocks, fuzzBlock)
		d.receiver.redial = time.Millisecond
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		ticket := newRandom()
		if err := d.Connect("p", l.Addr().String(), append(ticket[:], bytes.Repeat([]byte{7}, 16)...)); err != nil {
			t.Fatal(err)
		}
		c, err := l.Accept()
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		l.Close()
		grant := d.expect(t, "t", "p", fuzzDst)
		_, _ = c.Write(append(answer, bytes.ReplaceAll(in, grantMark, grant[:])...))
		_ = c.(*net.TCPConn).CloseWrite()
		until(t, "the loss is told", func() bool { return len(d.sink.All("down", "")) == 1 })
		d.Dismiss("p")
		if o := d.sink.Wait("received", "t", 1); o.Err == nil {
			t.Errorf("ended well: %+v", o)
		}
		d.full(t, 0)
	})
}

// TestPlainPeer: an agent that must encrypt and one that does not refuse each other; one that
// may does as the other must.
func TestPlainPeer(t *testing.T) {
	leaktest.Check(t)
	plain, sealed := make([]byte, 16), bytes.Repeat([]byte{1}, 32)
	for _, c := range []struct {
		d      Encryption
		ticket []byte
		says   string // "": it is taken
	}{
		{EncryptMust, plain, "not encrypted"}, {EncryptMust, sealed, ""},
		{EncryptMay, plain, ""}, {EncryptMay, sealed, ""},
		{EncryptNever, plain, ""}, {EncryptNever, sealed, "never encrypts"},
		{EncryptMay, make([]byte, 32), "without a secret"}, {EncryptMay, make([]byte, 17), "17 bytes"},
	} {
		d := newAgent(t, Config{Encrypt: c.d})
		err := d.Connect("p", "127.0.0.1:1", c.ticket)
		if (err == nil) != (c.says == "") || err != nil && !strings.Contains(err.Error(), c.says) {
			t.Errorf("encryption %d with a ticket of %d bytes: %v, want %q in it", c.d, len(c.ticket), err, c.says)
		}
	}
	p := newAgent(t, Config{Encrypt: EncryptMust})
	raw := dial(t, p)
	raw.say(hello(random(p.admit(t, "d")[:16]), 0, 1, 0))
	raw.ends()
	never := newAgent(t, Config{Encrypt: EncryptNever})
	if _, err := never.AdmitSealed("d"); err == nil {
		t.Error("an agent that never encrypts admits a peer that must")
	}
	may := newAgent(t, Config{})
	ticket, err := may.AdmitSealed("d")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := may.Admit("d"); err == nil {
		t.Error("a peer that must encrypt is admitted without")
	}
	d := newAgent(t, Config{Encrypt: EncryptMust})
	if err := d.Connect("p", may.Endpoint(), ticket); err != nil {
		t.Fatal(err)
	}
	may.mem[5] = 5
	grant := d.expect(t, "t", "p", allBlocks(1))
	may.Write(core.WriteOp{ID: "t", Peer: "d", Grant: grant[:], Pairs: may.pairs(t, allBlocks(1))})
	if o := d.sink.Wait("received", "t", 1); o.Err != nil || d.mem[5] != 5 {
		t.Errorf("received: %v", o.Err)
	}
}
