package bootstrap

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"reflect"
	"strings"
	"testing"
	"unicode"
	"unicode/utf8"

	"github.com/kvconn/kvconn/rig/alloctest"
)

// maxServed is what one request may make the handler allocate: a body of the
// largest size, read into a buffer that grows, and decoded twice.
const maxServed = 32 * MaxBody

// checkTable: a table that an unauthenticated client wrote into stays within its bounds, and
// its count is that of its entries.
func checkTable(t *testing.T, table *Table) {
	t.Helper()
	n := 0
	for dp, e := range table.Query() {
		for tp, byPP := range e.WorkerAddr {
			for pp, addr := range byPP {
				n++
				for _, rank := range []int{dp, tp, pp} {
					if rank < 0 || rank > MaxRank {
						t.Errorf("rank %d is in the table", rank)
					}
				}
				for text, most := range map[string]int{e.EngineID: MaxEngineID, addr: MaxAddr} {
					if text == "" || len(text) > most || !utf8.ValidString(text) || strings.ContainsFunc(text, unicode.IsControl) {
						t.Errorf("%q is in the table", text)
					}
				}
			}
		}
	}
	if n != table.entries || n > table.limit {
		t.Errorf("the table has %d entries, counts %d, and its limit is %d", n, table.entries, table.limit)
	}
}

// FuzzRegister: whatever the body, the answer is a documented one, and what a
// 200 has put into the table is what another reader of the body finds in it.
func FuzzRegister(f *testing.F) {
	for _, body := range []string{
		good, `{"engine_id":"e1","dp_rank":0,"tp_rank":1,"pp_rank":0,"addr":"tcp://h:2"}`, `{"engine_id":"e2","dp_rank":65535,"tp_rank":65535,"pp_rank":65535,"addr":"x"}`,
		`{"engine_id":"e2","dp_rank":9,"tp_rank":null,"pp_rank":0,"addr":"x"}`, `{"engine_id":"e2","dp_rank":9,"tp_rank":-0,"pp_rank":65536,"addr":"x"}`, `{"engine_id":"e2","dp_rank":1e3,"tp_rank":1.0,"pp_rank":"3","addr":7}`,
		`{"ENGINE_ID":"e2","dp_rank":9223372036854775808,"tp_rank":null,"pp_rank":[],"addr":{}}`, `{"engine_id":"\u0000","dp_rank":1,"tp_rank":1,"pp_rank":1,"addr":"\ud800"}`,
		`{"engine_id":"a","engine_id":"b","dp_rank":1,"tp_rank":1,"pp_rank":1,"addr":"x","more":[[[[]]]]}`, ``, `null`, `[]`, `"x"`, good[:30], good + good, "\xff" + good,
		strings.Repeat("[", 20000), `{"engine_id":"` + strings.Repeat("x", 300) + `"}`,
	} {
		f.Add([]byte(body))
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		table := &Table{limit: 2}
		if err := table.Register(Registration{"e1", 0, 0, 0, "tcp://h:1"}); err != nil {
			t.Fatal(err)
		}
		before := table.Query()
		h := NewHandler(table, nil, nil)
		w := httptest.NewRecorder()
		alloctest.Bound(t, maxServed, func() { h.ServeHTTP(w, httptest.NewRequest("POST", "/register", bytes.NewReader(body))) })
		checkTable(t, table)
		checkAnswer(t, w)
		if w.Code != 200 {
			if w.Code != 400 && w.Code != 413 && w.Code != 422 {
				t.Errorf("status %d: %s", w.Code, w.Body)
			}
			if !reflect.DeepEqual(table.Query(), before) {
				t.Errorf("status %d, but the table has changed: %v", w.Code, table.Query())
			}
			return
		}
		var m map[string]any
		d := json.NewDecoder(bytes.NewReader(body))
		d.UseNumber()
		if err := d.Decode(&m); err != nil {
			t.Fatalf("%q is accepted: %v", body, err)
		}
		number := func(name string) int {
			n, ok := m[name].(json.Number)
			v, err := n.Int64()
			if !ok || err != nil {
				t.Fatalf("%q is accepted with %s %v", body, name, m[name])
			}
			return int(v)
		}
		e := table.Query()[number("dp_rank")]
		if addr := e.WorkerAddr[number("tp_rank")][number("pp_rank")]; any(addr) != m["addr"] || any(e.EngineID) != m["engine_id"] {
			t.Errorf("%q is in the table as %+v", body, e)
		}
	})
}

// FuzzPutRoute: whatever the body, the answer is a documented one, and a 200 has
// put one rank into the table, with a place within its engine's sizes.
func FuzzPutRoute(f *testing.F) {
	one := Sizes{1, 1, 1, 1}
	for _, body := range []string{
		today(Place{}, one, nil), today(Place{TP: 3}, Sizes{2, 2, 4, 2}, nil), today(Place{}, one, map[string]any{"system_dp_size": 3, "system_dp_rank": 2}),
		today(Place{}, one, map[string]any{"attn_tp_size": 1 << 60, "dsv41_spec_layout": map[string]any{"a": []int{1}}}), `{"engine_rank":null}`, ``, `null`, `[]`,
	} {
		f.Add([]byte(body))
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		table := new(Table)
		routes := table.Routes()
		w := httptest.NewRecorder()
		alloctest.Bound(t, maxServed, func() {
			NewHandler(table, nil, nil).ServeHTTP(w, httptest.NewRequest("PUT", "/route", bytes.NewReader(body)))
		})
		checkAnswer(t, w)
		if w.Code != 200 {
			if w.Code != 413 && w.Code != 422 || len(routes.told) != 0 {
				t.Errorf("status %d: %s; in the table: %+v", w.Code, w.Body, routes.told)
			}
			return
		}
		if len(routes.told) != 1 {
			t.Fatalf("in the table: %+v", routes.told)
		}
		for at, r := range routes.told {
			n := r.Sizes
			if at != r.Place || at.DP < 0 || at.DP >= n.DP || at.CP < 0 || at.CP >= n.CP || at.TP < 0 || at.TP >= n.TP || at.PP < 0 || at.PP >= n.PP || n.count() > MaxEntries || r.Port < 1 || r.Port > 65535 {
				t.Errorf("in the table: %+v", r)
			}
		}
		w = httptest.NewRecorder()
		NewHandler(table, nil, nil).ServeHTTP(w, httptest.NewRequest("GET", "/route?"+topology, nil))
		if checkAnswer(t, w); w.Code != 200 && w.Code != 503 {
			t.Errorf("topology: %d %s", w.Code, w.Body)
		}
	})
}

// checkAnswer: JSON, with a detail unless all is well.
func checkAnswer(t *testing.T, w *httptest.ResponseRecorder) {
	t.Helper()
	var answer any
	if err := json.Unmarshal(w.Body.Bytes(), &answer); err != nil || w.Header().Get("Content-Type") != "application/json" {
		t.Fatalf("the answer %d %v %q: %v", w.Code, w.Header(), w.Body, err)
	}
	if m, ok := answer.(map[string]any); w.Code != 200 && (!ok || m["detail"] == nil || m["detail"] == "") {
		t.Errorf("status %d without a detail: %s", w.Code, w.Body)
	}
}

// FuzzHTTP gives the whole handler any request that net/http can read. Nothing
// but a full table is a fault of the server, only POST /register with the token
// changes the table, a refused body is not read, and a redirect stays here.
func FuzzHTTP(f *testing.F) {
	post := func(extra, body string) {
		f.Add([]byte("POST /register HTTP/1.1\r\nHost: h\r\n"+extra+"\r\n"+body), false)
		f.Add([]byte("POST /register HTTP/1.1\r\nHost: h\r\n"+extra+"\r\n"+body), true)
	}
	post("Authorization: Bearer secret\r\nContent-Length: 77\r\n", good)
	post("Content-Length: 77\r\n", good)
	post("Authorization: Bearer secret\r\nContent-Length: 4294967296\r\n", good)
	post("Authorization: bearer  secret \r\nTransfer-Encoding: chunked\r\n", "4d\r\n"+good+"\r\n0\r\n\r\n")
	post("Authorization: Bearer secret\r\nTransfer-Encoding: chunked\r\n", "ffffffff\r\n{")
	post("Authorization: Bearer secret\r\nContent-Length: 66000\r\n", strings.Repeat(" ", 66000-len(good))+good)
	post("Authorization: Basic c2VjcmV0\r\nContent-Length: 0\r\n", "")
	for _, head := range []string{"PUT /route", "POST /register_dp_rank", "POST /query_dp_ranks"} {
		for _, body := range []string{today(Place{}, Sizes{1, 1, 2, 1}, nil), `{"bootstrap_room":9,"dp_rank":1}`, `{"bootstrap_rooms":[9]}`} {
			for _, token := range []string{"", "Authorization: Bearer secret\r\n"} {
				f.Add([]byte(fmt.Sprintf("%s HTTP/1.1\r\nHost: h\r\n%sContent-Length: %d\r\n\r\n%s", head, token, len(body), body)), false)
			}
		}
	}
	for _, line := range []string{"GET /route?" + topology, "DELETE /route", "GET /query", "HEAD /health", "DELETE /register", "GET /", "OPTIONS *", "CONNECT h:1", "GET //evil.example/x", "GET /query/..//health",
		"GET http://other/query?x=%zz", "PUT /query", "GET /extra", "POST /extra", "GET /%2e%2e/query", "PRI *"} {
		f.Add([]byte(line+" HTTP/1.1\r\nHost: h\r\n\r\n"), false)
		f.Add([]byte(line+" HTTP/1.0\r\n\r\n"), true)
	}
	f.Fuzz(func(t *testing.T, raw []byte, full bool) {
		r, err := http.ReadRequest(bufio.NewReader(bytes.NewReader(raw)))
		if err != nil {
			return
		}
		body := &counted{r.Body, 0}
		r.Body = body
		table := &Table{limit: 2}
		if err := table.Register(Registration{"e1", 0, 0, 0, "tcp://h:1"}); err != nil {
			t.Fatal(err)
		}
		if full {
			table.limit = 1
		}
		before := table.Query()
		extra := false
		h := NewHandler(table, &Access{Token: "secret"}, map[string]http.Handler{"/extra": http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			extra = true
			answer(w, 200, statusOK)
		})})
		w := httptest.NewRecorder()
		alloctest.Bound(t, maxServed, func() { h.ServeHTTP(w, r) })
		checkTable(t, table)
		if code := w.Code; code >= 500 && (code != 503 || !full && r.URL.Path != "/route") {
			t.Fatalf("status %d: %s", code, w.Body)
		}
		if w.Code == 301 || w.Code == 307 { // by http.ServeMux, of a path that is not clean
			if to := w.Header().Get("Location"); !strings.HasPrefix(to, "/") || strings.HasPrefix(to, "//") || strings.HasPrefix(to, "/\\") {
				t.Errorf("%s is sent to %q", r.URL, to)
			}
			return
		}
		if !strings.HasPrefix(r.URL.Path, "/") { // http.ServeMux answers OPTIONS * and CONNECT itself
			if w.Code < 400 {
				t.Errorf("%s %q: status %d", r.Method, r.URL, w.Code)
			}
			return
		}
		checkAnswer(t, w)
		changed := !reflect.DeepEqual(table.Query(), before)
		if scheme, token, _ := strings.Cut(r.Header.Get("Authorization"), " "); !strings.EqualFold(scheme, "bearer") || strings.TrimSpace(token) != "secret" {
			routes := table.Routes()
			changed = changed || len(routes.told) > 0 || len(routes.rooms.dp) > 0
			if changed || body.read > 0 && r.URL.Path != "/query_dp_ranks" || r.URL.Path == "/register" && r.Method != "GET" && r.Method != "HEAD" && w.Code != 401 {
				t.Errorf("without the token: status %d, %d bytes read, table %v", w.Code, body.read, table.Query())
			}
		}
		if changed && (r.Method != "POST" || r.URL.Path != "/register" || w.Code != 200) {
			t.Errorf("%s %s, status %d, changes the table", r.Method, r.URL, w.Code)
		}
		most := MaxBody
		if r.URL.Path == "/query_dp_ranks" {
			most = MaxQuery
		}
		if body.read > most+1 {
			t.Errorf("%d bytes of the body are read", body.read)
		}
		if extra != (r.URL.Path == "/extra" && w.Code == 200) {
			t.Errorf("%s %s: extra handler called: %v", r.Method, r.URL, extra)
		}
	})
}

// counted counts what is read of a body.
type counted struct {
	io.ReadCloser
	read int
}

func (c *counted) Read(b []byte) (int, error) {
	n, err := c.ReadCloser.Read(b)
	c.read += n
	return n, err
}
