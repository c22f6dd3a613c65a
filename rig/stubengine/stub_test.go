package stubengine

import (
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/kvconn/kvconn/rig/leaktest"
)

// The lean engine's answers are the other one's, to a real client.
func TestMinimalIsAsHandler(t *testing.T) {
	leaktest.Check(t)
	o := Options{Model: "m", Chunks: 3}
	srv := httptest.NewServer(Handler(o))
	defer srv.Close()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() { defer close(ended); Minimal(l, o) }()
	tr := &http.Transport{}
	client := &http.Client{Transport: tr}
	ask := func(url, method, body string) string {
		req, err := http.NewRequest(method, url, strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		resp, err := client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		text, err := io.ReadAll(resp.Body)
		if err != nil {
			t.Fatal(err)
		}
		return resp.Status + resp.Header.Get("Content-Type") + string(text)
	}
	for range 2 { // on one connection
		for _, r := range [][3]string{{"POST", "/v1/completions", `{"stream":true}`}, {"POST", "/v1/chat/completions", `{"prompt":"x"}`}, {"GET", "/health", ""}} {
			lean, other := ask("http://"+l.Addr().String()+r[1], r[0], r[2]), ask(srv.URL+r[1], r[0], r[2])
			if lean != other {
				t.Errorf("%v: %s\nwant %s", r, lean, other)
			}
		}
	}
	l.Close()
	tr.CloseIdleConnections()
	<-ended
}
