package rig

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/kvconn/kvconn/rig/leaktest"
	"github.com/kvconn/kvconn/rig/stubengine"
)

func TestBenchProxyArguments(t *testing.T) {
	for _, args := range [][]string{{"--clients", "0"}, {"--clients", "x"}, {"--rounds", "0"}, {"--chunks", "0"}, {"more"}, {"--requests", "-1"}} {
		if err := runBenchProxy(context.Background(), args, io.Discard); !errors.Is(err, errUsage) {
			t.Errorf("%v: %v, want an error of usage", args, err)
		}
	}
}

// The benchmark's client counts only whole answers.
func TestClosedLoop(t *testing.T) {
	leaktest.Check(t)
	engine := stubengine.Handler(stubengine.Options{Model: "m", Chunks: 4})
	cut := false
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if cut {
			io.WriteString(w, "data: one\n\n")
			return
		}
		engine.ServeHTTP(w, r)
	}))
	defer srv.Close()
	addr, body := strings.TrimPrefix(srv.URL, "http://"), []byte(`{"stream":true}`)
	took, _, err := closedLoop(t.Context(), addr, 2, load{requests: 5}, body, 4)
	if err != nil || len(took) != 10 {
		t.Fatalf("%d requests, %v", len(took), err)
	}
	if _, _, err := closedLoop(t.Context(), addr, 1, load{requests: 1}, body, 5); err == nil {
		t.Error("an answer with an event too few passes")
	}
	cut = true
	if _, _, err := closedLoop(t.Context(), addr, 1, load{requests: 1}, body, 4); err == nil {
		t.Error("an answer that ends early passes")
	}
}

// The stub engines end with their input, and say where they listen.
func TestStubs(t *testing.T) {
	leaktest.Check(t)
	in, stop := io.Pipe()
	out, said := io.Pipe()
	ended := make(chan error, 1)
	go func() { ended <- runStubs(t.Context(), []string{"2"}, in, said) }()
	line := make([]byte, 300)
	n, err := out.Read(line)
	if err != nil || !bytes.Contains(line[:n], []byte(`"Bootstrap"`)) {
		t.Fatalf("%q, %v", line[:n], err)
	}
	stop.Close()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}
