package bootstrap

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"

	"github.com/kvconn/kvconn/rig/leaktest"
)

const good = `{"engine_id":"e1","dp_rank":0,"tp_rank":0,"pp_rank":0,"addr":"tcp://h:1"}`

// do sends one request and returns status and body.
func do(t *testing.T, h http.Handler, method, path, body string) (int, string) {
	t.Helper()
	w := httptest.NewRecorder()
	h.ServeHTTP(w, httptest.NewRequest(method, path, strings.NewReader(body)))
	return w.Code, w.Body.String()
}

func TestEmptyTableAndHealth(t *testing.T) {
	leaktest.Check(t)
	h := NewHandler(new(Table), nil, nil)
	for path, want := range map[string]string{"/query": `{}`, "/health": `{"status":"ok"}`} {
		if code, body := do(t, h, "GET", path, ""); code != 200 || body != want {
			t.Errorf("GET %s: %d %s, want 200 %s", path, code, body, want)
		}
	}
}

func TestRegisterThenQuery(t *testing.T) {
	leaktest.Check(t)
	h := NewHandler(new(Table), nil, nil)
	for _, r := range []Registration{
		{"e1", 0, 0, 0, "tcp://h:1"}, {"e1", 0, 0, 1, "tcp://h:2"}, {"e1", 0, 1, 0, "tcp://h:3"},
		{"e2", 10, 0, 0, "tcp://i:1"},
	} {
		body, _ := json.Marshal(r)
		for range 2 { // the second time is the same registration again
			if code, got := do(t, h, "POST", "/register", string(body)); code != 200 || got != `{"status":"ok"}` {
				t.Fatalf("register %s: %d %s", body, code, got)
			}
		}
	}
	want := `{"0":{"engine_id":"e1","worker_addr":{"0":{"0":"tcp://h:1","1":"tcp://h:2"},"1":{"0":"tcp://h:3"}}},` +
		`"10":{"engine_id":"e2","worker_addr":{"0":{"0":"tcp://i:1"}}}}`
	if code, got := do(t, h, "GET", "/query", ""); code != 200 || got != want {
		t.Fatalf("query: %d\n%s\nwant\n%s", code, got, want)
	}
}

// Each refused request gets its status and a detail, and changes nothing.
func TestRefusals(t *testing.T) {
	leaktest.Check(t)
	with := func(field, value string) string {
		var m map[string]json.RawMessage
		if err := json.Unmarshal([]byte(good), &m); err != nil {
			t.Fatal(err)
		}
		m[field] = json.RawMessage(value)
		b, err := json.Marshal(m)
		if err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
	without := func(field string) string {
		var m map[string]any
		if err := json.Unmarshal([]byte(good), &m); err != nil {
			t.Fatal(err)
		}
		delete(m, field)
		b, _ := json.Marshal(m)
		return string(b)
	}
	long := func(n int) string { return `"` + strings.Repeat("x", n) + `"` }

	tests := []struct {
		name, method, path, body string
		status                   int
		detail                   string
	}{
		{"engine mismatch", "POST", "/register", with("engine_id", `"other"`), 400,
			"Engine ID mismatch for dp_rank=0: expected e1, got other"},
		{"engine mismatch of a new rank", "POST", "/register",
			`{"engine_id":"other","dp_rank":0,"tp_rank":5,"pp_rank":0,"addr":"a"}`, 400, "Engine ID mismatch"},
		{"rank taken", "POST", "/register", with("addr", `"tcp://h:2"`), 400,
			"Worker with dp_rank=0, tp_rank=0, pp_rank=0 is already registered at tcp://h:1, but still want to register at tcp://h:2"},
		{"empty body", "POST", "/register", "", 422, "json_invalid"},
		{"malformed", "POST", "/register", good[:20], 422, "json_invalid"},
		{"trailing data", "POST", "/register", with("tp_rank", "1") + " x", 422, "json_invalid"},
		{"two objects", "POST", "/register", with("tp_rank", "1") + with("tp_rank", "2"), 422, "json_invalid"},
		{"not UTF-8", "POST", "/register", with("tp_rank", "1")[:20] + "\xff" + good[20:], 422, "json_invalid"},
		{"null", "POST", "/register", "null", 422, "JSON object"},
		{"array", "POST", "/register", "[" + good + "]", 422, "JSON object"},
		{"no engine_id", "POST", "/register", without("engine_id"), 422, "Field required"},
		{"no dp_rank", "POST", "/register", without("dp_rank"), 422, "Field required"},
		{"no tp_rank", "POST", "/register", without("tp_rank"), 422, "Field required"},
		{"no pp_rank", "POST", "/register", without("pp_rank"), 422, "Field required"},
		{"no addr", "POST", "/register", without("addr"), 422, "Field required"},
		{"name in another case", "POST", "/register", strings.Replace(good, "addr", "ADDR", 1), 422, "Field required"},
		{"rank is a string", "POST", "/register", with("tp_rank", `"1"`), 422, "valid integer"},
		{"rank is a fraction", "POST", "/register", with("tp_rank", `1.5`), 422, "valid integer"},
		{"rank is null", "POST", "/register", with("tp_rank", `null`), 422, "valid integer"},
		{"rank is true", "POST", "/register", with("tp_rank", `true`), 422, "valid integer"},
		{"rank is huge", "POST", "/register", with("tp_rank", `99999999999999999999`), 422, "valid integer"},
		{"rank is negative", "POST", "/register", with("tp_rank", `-1`), 422, "-1 is not a rank"},
		{"rank is absurd", "POST", "/register", with("dp_rank", `65536`), 422, "65536 is not a rank"},
		{"pp rank is absurd", "POST", "/register", with("pp_rank", `65536`), 422, "65536 is not a rank"},
		{"engine_id is a number", "POST", "/register", with("engine_id", `7`), 422, "valid string"},
		{"engine_id is null", "POST", "/register", with("engine_id", `null`), 422, "valid string"},
		{"engine_id is empty", "POST", "/register", with("engine_id", `""`), 422, "must not be empty"},
		{"engine_id is long", "POST", "/register", with("engine_id", long(MaxEngineID+1)), 422, "257 bytes"},
		{"engine_id with a newline", "POST", "/register", with("engine_id", `"a\nb"`), 422, "control characters"},
		{"addr is a list", "POST", "/register", with("addr", `["a"]`), 422, "valid string"},
		{"addr is empty", "POST", "/register", with("addr", `""`), 422, "must not be empty"},
		{"addr is long", "POST", "/register", with("addr", long(MaxAddr+1)), 422, "1025 bytes"},
		{"body over the limit", "POST", "/register", with("extra", long(MaxBody)), 413, "65536 bytes"},
		{"table full", "POST", "/register", with("tp_rank", "1"), 503, "unregister"},
		{"GET register", "GET", "/register", "", 405, "Method Not Allowed"},
		{"PUT register", "PUT", "/register", with("tp_rank", "1"), 405, "Method Not Allowed"},
		{"POST query", "POST", "/query", "", 405, "Method Not Allowed"},
		{"DELETE query", "DELETE", "/query", "", 405, "Method Not Allowed"},
		{"POST health", "POST", "/health", "", 405, "Method Not Allowed"},
		{"elsewhere", "GET", "/elsewhere", "", 404, "Not Found"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			table := &Table{limit: 2} // one place is kept for the agent's own rank
			h := NewHandler(table, nil, nil)
			if code, body := do(t, h, "POST", "/register", good); code != 200 {
				t.Fatalf("the good registration: %d %s", code, body)
			}
			_, before := do(t, h, "GET", "/query", "")
			code, body := do(t, h, tt.method, tt.path, tt.body)
			var answer struct{ Detail any }
			if err := json.Unmarshal([]byte(body), &answer); err != nil || answer.Detail == nil {
				t.Errorf("the answer %q has no detail: %v", body, err)
			}
			if code != tt.status || !strings.Contains(body, tt.detail) {
				t.Errorf("got %d %s\nwant %d with %q", code, body, tt.status, tt.detail)
			}
			if _, after := do(t, h, "GET", "/query", ""); after != before || table.entries != 1 {
				t.Errorf("the table changed from %s to %s (%d entries)", before, after, table.entries)
			}
		})
	}
}

// TestBoundsAreInclusive: values just inside the bounds are taken, and unknown fields are ignored.
func TestBoundsAreInclusive(t *testing.T) {
	leaktest.Check(t)
	h := NewHandler(new(Table), nil, nil)
	body := fmt.Sprintf(`{"engine_id":%q,"dp_rank":65535,"tp_rank":65535,"pp_rank":65535,"addr":%q,"later":{"version":[2]}}`,
		strings.Repeat("e", MaxEngineID), strings.Repeat("a", MaxAddr))
	if code, got := do(t, h, "POST", "/register", body); code != 200 {
		t.Fatalf("got %d %s, want 200", code, got)
	}
	if code, got := do(t, h, "POST", "/register", good+strings.Repeat(" ", MaxBody-len(good))); code != 200 {
		t.Fatalf("body of the limit: got %d %s, want 200", code, got)
	}
}

func TestFieldErrorsHaveFastAPIsShape(t *testing.T) {
	leaktest.Check(t)
	_, got := do(t, NewHandler(new(Table), nil, nil), "POST", "/register", `{"engine_id":"e","dp_rank":0,"tp_rank":0,"pp_rank":0}`)
	if want := `{"detail":[{"type":"missing","loc":["body","addr"],"msg":"Field required"}]}`; got != want {
		t.Fatalf("got %s, want %s", got, want)
	}
}

func TestExtraRoutes(t *testing.T) {
	leaktest.Check(t)
	unexpected := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusTeapot) })
	h := NewHandler(new(Table), nil, map[string]http.Handler{"/nats": unexpected})
	if code, _ := do(t, h, "GET", "/nats", ""); code != http.StatusTeapot {
		t.Errorf("GET /nats: %d, want 418", code)
	}
	if code, _ := do(t, h, "GET", "/query", ""); code != 200 {
		t.Errorf("GET /query beside it: %d, want 200", code)
	}
}

// Registrations and queries over real connections at the same time.
func TestConcurrentRequests(t *testing.T) {
	leaktest.Check(t)
	table := new(Table)
	srv := httptest.NewServer(NewHandler(table, nil, nil))
	defer srv.Close()
	client := srv.Client()
	defer client.CloseIdleConnections()
	var wg sync.WaitGroup
	for dp := range 8 {
		wg.Go(func() {
			for tp := range 8 {
				body := fmt.Sprintf(`{"engine_id":"e%d","dp_rank":%d,"tp_rank":%d,"pp_rank":0,"addr":"a"}`, dp, dp, tp)
				resp, err := client.Post(srv.URL+"/register", "application/json", strings.NewReader(body))
				if err != nil {
					t.Error(err)
					return
				}
				resp.Body.Close()
				resp, err = client.Get(srv.URL + "/query")
				if err != nil {
					t.Error(err)
					return
				}
				raw, _ := io.ReadAll(resp.Body)
				resp.Body.Close()
				var all map[int]Engine
				if err := json.Unmarshal(raw, &all); err != nil || len(all[dp].WorkerAddr) != tp+1 {
					t.Errorf("dp %d after tp %d: %s (%v)", dp, tp, raw, err)
				}
			}
		})
	}
	wg.Wait()
	if table.entries != 64 {
		t.Fatalf("%d entries, want 64", table.entries)
	}
}
