package bootstrap

import (
	"bufio"
	"bytes"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvconn/kvconn/rig/leaktest"
)

// TestReadersOfAChangingTable: a client changes a long table and reads it slowly, again and again. It ends its own previous
// answers by that, and the port keeps a few. Nothing is kept when nobody reads.
func TestReadersOfAChangingTable(t *testing.T) {
	leaktest.Check(t)
	table := &Table{}
	s := NewServer(NewHandler(table, nil, nil), nil, nil)
	if err := s.Listen("127.0.0.1:0"); err != nil {
		t.Fatal(err)
	}
	served := make(chan struct{})
	go func() {
		defer close(served)
		_ = s.Serve()
	}()
	defer func() {
		_ = s.Close(t.Context())
		<-served
	}()
	register := func(dp int) {
		t.Helper()
		if err := table.Register(Registration{strings.Repeat("<", MaxEngineID), dp, 0, 0, strings.Repeat("<", MaxAddr)}); err != nil {
			t.Fatal(err)
		}
	}
	const versions = 6
	first := MaxEntries - versions
	for dp := range first {
		register(dp)
	}
	var readers []*bufio.Reader
	for i := range versions {
		register(first + i)
		for range 2 { // of each answer
			c, err := net.Dial("tcp", s.Addr().String())
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
			_ = c.SetDeadline(time.Now().Add(time.Minute))
			_, _ = io.WriteString(c, "GET /query HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n")
			r := bufio.NewReader(c)
			if _, err := r.Peek(1); err != nil { // it is being written now
				t.Fatal(err)
			}
			readers = append(readers, r)
		}
	}
	table.mu.Lock()
	kept, sum := len(table.answers.reading), 0
	for _, a := range table.answers.reading {
		sum += len(a.text)
	}
	if sum > maxReading || sum != table.answers.bytes || kept == 0 || kept == versions {
		t.Errorf("%d answers of %d bytes are kept, %d are counted", kept, sum, table.answers.bytes)
	}
	table.mu.Unlock()
	for i := range slices.Backward(readers) { // the newest first: it has 10 s
		resp, err := http.ReadResponse(readers[i], nil)
		if err != nil {
			t.Fatal(err)
		}
		text, err := io.ReadAll(resp.Body)
		resp.Body.Close()
		switch n := first + i/2 + 1; {
		case i/2 < versions-kept && err == nil:
			t.Errorf("reader %d of an earlier table gets all of it", i)
		case i == len(readers)-1 && (err != nil || bytes.Count(text, []byte("engine_id")) != n || !json.Valid(text)):
			t.Errorf("the newest reader gets %d bytes, %v", len(text), err)
		}
	}
	for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(time.Millisecond) {
		runtime.GC()
		table.mu.Lock()
		n, sum, newest := len(table.answers.reading), table.answers.bytes, table.answers.newest.Value()
		table.mu.Unlock()
		if n == 0 && sum == 0 && newest == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%d answers of %d bytes are kept for nobody, newest %t", n, sum, newest != nil)
		}
	}
}

// TestAnswerIsMadeOnce: clients that read the same table share one answer; a change makes another.
func TestAnswerIsMadeOnce(t *testing.T) {
	leaktest.Check(t)
	table := &Table{}
	ask := func() (*queryAnswer, *http.ResponseController) {
		t.Helper()
		c := http.NewResponseController(nil)
		a, err := table.startAnswer(c)
		if err != nil {
			t.Fatal(err)
		}
		return a, c
	}
	a, ca := ask()
	runtime.GC() // what is read stays
	b, cb := ask()
	if a != b || string(a.text) != "{}" {
		t.Errorf("of an empty table two are told %q and %q", a.text, b.text)
	}
	if err := table.Register(Registration{"e", 0, 0, 0, "a"}); err != nil {
		t.Fatal(err)
	}
	n, cn := ask()
	if n == a || !strings.Contains(string(n.text), `"e"`) {
		t.Errorf("after a change it is %q", n.text)
	}
	table.endAnswer(a, ca)
	table.endAnswer(n, cn)
	table.endAnswer(b, cb)
	if len(table.answers.reading) != 0 || table.answers.bytes != 0 {
		t.Errorf("%+v is kept", table.answers)
	}
}
