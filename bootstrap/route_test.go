package bootstrap

import (
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/kvconn/kvconn/rig/leaktest"
)

// today is what a rank of SGLang 0.5.23 puts.
func today(p Place, s Sizes, more map[string]any) string {
	m := map[string]any{
		"attn_tp_size": s.TP, "attn_tp_rank": p.TP, "attn_cp_size": s.CP, "attn_cp_rank": p.CP, "attn_dp_size": s.DP, "attn_dp_rank": p.DP,
		"pp_size": s.PP, "pp_rank": p.PP, "system_dp_size": 1, "system_dp_rank": 0, "rank_ip": "10.0.0.1", "rank_port": 4000 + p.TP + 10*p.PP + 100*p.CP + 1000*p.DP,
		"page_size": 16, "kv_cache_dtype": "bfloat16", "kv_layout": nil, "dsv41_spec_layout": nil, "load_balance_method": "round_robin",
		"enable_dsa_cache_layer_split": false, "enable_kv_cache_sharding": false, "prefill_http_port": 30000, "decode_allocation_policy": "early",
	}
	for key, v := range more {
		m[key] = v
		if v == missing {
			delete(m, key)
		}
	}
	b, _ := json.Marshal(m)
	return string(b)
}

var missing = new(int)

func put(t *testing.T, h http.Handler, body string, want int, says ...string) {
	t.Helper()
	code, got := do(t, h, "PUT", "/route", body)
	if code != want {
		t.Fatalf("PUT %s: %d %s, want %d", body, code, got, want)
	}
	for _, part := range says {
		if !strings.Contains(got, part) {
			t.Fatalf("PUT %s: %s does not say %q", body, got, part)
		}
	}
}

func get(t *testing.T, h http.Handler, query string, code int, want string) {
	t.Helper()
	if got, body := do(t, h, "GET", "/route?"+query, ""); got != code || !strings.Contains(body, want) {
		t.Fatalf("GET /route?%s: %d %s, want %d with %s", query, got, body, code, want)
	}
}

func each(s Sizes, f func(p Place)) {
	for dp := range s.DP {
		for cp := range s.CP {
			for tp := range s.TP {
				for pp := range s.PP {
					f(Place{dp, cp, tp, pp})
				}
			}
		}
	}
}

// topology asks for the engine's sizes.
const topology = "prefill_dp_rank=-1&prefill_cp_rank=-1&target_tp_rank=-1&target_pp_rank=-1"

// TestRoute: ranks register as SGLang 0.5.23's do, and its decode engine can read the answers.
func TestRoute(t *testing.T) {
	leaktest.Check(t)
	for _, s := range []Sizes{{1, 1, 1, 1}, {1, 1, 4, 2}, {3, 2, 2, 1}} {
		h := NewHandler(new(Table), nil, nil)
		get(t, h, topology, 503, "no rank")
		n := 0
		each(s, func(p Place) {
			if n > 0 {
				get(t, h, topology, 503, fmt.Sprintf("%d of the prefill engine's %d ranks", n, s.count()))
				get(t, h, "prefill_dp_rank=0&prefill_cp_rank=0&target_tp_rank=0&target_pp_rank=0", 503, "ranks")
			}
			for range 2 { // it may ask again
				put(t, h, today(p, s, nil), 200)
			}
			n++
		})
		want := fmt.Sprintf(`{"attn_cp_size":%d,"attn_tp_size":%d,"decode_allocation_policy":"early","dp_size":%d,"enable_dsa_cache_layer_split":false,"enable_kv_cache_sharding":false,`+
			`"follow_bootstrap_room":false,"kv_cache_dtype":"bfloat16","page_size":16,"pp_size":%d,"prefill_http_port":30000}`, s.CP, s.TP, s.DP, s.PP)
		if code, got := do(t, h, "GET", "/route?"+topology, ""); code != 200 || got != want {
			t.Fatalf("topology: %d %s\nwant %s", code, got, want)
		}
		each(s, func(p Place) {
			at := fmt.Sprintf(`{"rank_ip":"10.0.0.1","rank_port":%d}`, 4000+p.TP+10*p.PP+100*p.CP+1000*p.DP)
			get(t, h, fmt.Sprintf("prefill_dp_rank=%d&prefill_cp_rank=%d&target_tp_rank=%d&target_pp_rank=%d", p.DP, p.CP, p.TP, p.PP), 200, at)
		})
		for _, q := range []string{"prefill_dp_rank=%d&prefill_cp_rank=0&target_tp_rank=0&target_pp_rank=0", "prefill_dp_rank=0&prefill_cp_rank=%d&target_tp_rank=0&target_pp_rank=0",
			"prefill_dp_rank=0&prefill_cp_rank=0&target_tp_rank=%d&target_pp_rank=0", "prefill_dp_rank=0&prefill_cp_rank=0&target_tp_rank=0&target_pp_rank=%d"} {
			get(t, h, fmt.Sprintf(q, 9), 404, "no rank")
			get(t, h, fmt.Sprintf(q, -1), 404, "no rank")
		}
		if p := (Place{s.DP - 1, s.CP - 1, s.TP - 1, s.PP - 1}); true { // replaced: the rank was restarted
			put(t, h, today(p, s, map[string]any{"rank_port": 7}), 200)
			get(t, h, fmt.Sprintf("prefill_dp_rank=%d&prefill_cp_rank=%d&target_tp_rank=%d&target_pp_rank=%d", p.DP, p.CP, p.TP, p.PP), 200, `"rank_port":7}`)
		}
	}
}

// TestRouteOfSystemDP: data parallelism of whole engines has numbers of its own.
func TestRouteOfSystemDP(t *testing.T) {
	leaktest.Check(t)
	h := NewHandler(new(Table), nil, nil)
	for dp := range 2 {
		put(t, h, today(Place{}, Sizes{1, 1, 1, 1}, map[string]any{"system_dp_size": 2, "system_dp_rank": dp, "rank_port": 70 + dp, "load_balance_method": missing}), 200)
	}
	get(t, h, topology, 200, `"dp_size":2,"enable_dsa_cache_layer_split":false,"enable_kv_cache_sharding":false,"follow_bootstrap_room":true`)
	get(t, h, "prefill_dp_rank=1&prefill_cp_rank=0&target_tp_rank=0&target_pp_rank=0", 200, `"rank_port":71`)
}

// TestRouteRefusals: each refused request has its status and reason, and changes
// nothing.
func TestRouteRefusals(t *testing.T) {
	leaktest.Check(t)
	two := Sizes{1, 1, 2, 1}
	with := func(key string, v any) string {
		return today(Place{TP: 1}, two, map[string]any{key: v})
	}
	for name, c := range map[string]struct {
		method, target, body string
		status               int
		says                 string
	}{
		"other sizes":           {"PUT", "/route", today(Place{TP: 1}, Sizes{1, 1, 4, 1}, nil), 400, "tp 4"},
		"other pages":           {"PUT", "/route", with("page_size", 32), 400, "page_size 32, rank dp 0 cp 0 tp 0 pp 0 has 16"},
		"other dtype":           {"PUT", "/route", with("kv_cache_dtype", "fp8"), 400, "kv_cache_dtype"},
		"other policy":          {"PUT", "/route", with("decode_allocation_policy", "prefill_complete"), 400, "decode_allocation_policy"},
		"other layout":          {"PUT", "/route", with("kv_layout", "x"), 400, "kv_layout"},
		"no rank_ip":            {"PUT", "/route", with("rank_ip", missing), 422, "Field required"},
		"no rank_port":          {"PUT", "/route", with("rank_port", missing), 422, "Field required"},
		"no attn_tp_rank":       {"PUT", "/route", with("attn_tp_rank", missing), 422, "Field required"},
		"no attn_cp_size":       {"PUT", "/route", with("attn_cp_size", missing), 422, "Field required"},
		"no page_size":          {"PUT", "/route", with("page_size", missing), 422, "Field required"},
		"no page":               {"PUT", "/route", with("page_size", 0), 422, "page_size"},
		"text for a rank":       {"PUT", "/route", with("attn_tp_rank", "1"), 422, "valid integer"},
		"null for a size":       {"PUT", "/route", with("pp_size", nil), 422, "valid integer"},
		"size of 0":             {"PUT", "/route", with("attn_cp_size", 0), 422, "rank 0 of 0"},
		"rank over its size":    {"PUT", "/route", with("attn_tp_rank", 2), 422, "rank 2 of 2"},
		"rank below 0":          {"PUT", "/route", with("pp_rank", -1), 422, "rank -1 of 1"},
		"dp rank over its size": {"PUT", "/route", with("attn_dp_rank", 1), 422, "attn_dp_rank"},
		"system dp rank":        {"PUT", "/route", with("system_dp_size", 0), 422, "system_dp_rank"},
		"too many ranks":        {"PUT", "/route", today(Place{}, Sizes{128, 1, 128, 2}, nil), 422, "more than 1024 ranks"},
		"far too many":          {"PUT", "/route", today(Place{}, Sizes{1024, 1024, 1024, 1024}, nil), 422, "more than 1024 ranks"},
		"more than there are":   {"PUT", "/route", with("attn_tp_size", 1<<62), 422, "rank 1 of"},
		"port 0":                {"PUT", "/route", with("rank_port", 0), 422, "not a port"},
		"port 65536":            {"PUT", "/route", with("rank_port", 65536), 422, "not a port"},
		"no host":               {"PUT", "/route", with("rank_ip", ""), 422, "must not be empty"},
		"long host":             {"PUT", "/route", with("rank_ip", strings.Repeat("h", MaxHost+1)), 422, "257 bytes"},
		"host with a newline":   {"PUT", "/route", with("rank_ip", "a\nb"), 422, "control characters"},
		"empty":                 {"PUT", "/route", "", 422, "json_invalid"},
		"no object":             {"PUT", "/route", "[1]", 422, "JSON object"},
		"over the limit":        {"PUT", "/route", with("more", strings.Repeat("x", MaxBody)), 413, "65536"},
		"other method":          {"POST", "/route", "{}", 405, "Not Allowed"},
		"no numbers":            {"GET", "/route", "", 400, "prefill_dp_rank"},
		"too few":               {"GET", "/route?prefill_dp_rank=0&prefill_cp_rank=0&target_tp_rank=0", "", 400, "target_pp_rank"},
		"text":                  {"GET", "/route?prefill_dp_rank=0&prefill_cp_rank=x&target_tp_rank=0&target_pp_rank=0", "", 400, "prefill_cp_rank is \\\"x\\\""},
		"no query":              {"GET", "/route?%zz", "", 400, "query"},
		"room without a rank":   {"POST", "/register_dp_rank", `{"bootstrap_room":1}`, 422, "Field required"},
		"room of text":          {"POST", "/register_dp_rank", `{"bootstrap_room":"1","dp_rank":0}`, 422, "valid integer"},
		"room over 2^63-1":      {"POST", "/register_dp_rank", `{"bootstrap_room":9223372036854775808,"dp_rank":0}`, 422, "valid integer"},
		"room below 0":          {"POST", "/register_dp_rank", `{"bootstrap_room":-1,"dp_rank":0}`, 422, "not a room"},
		"unknown dp rank":       {"POST", "/register_dp_rank", `{"bootstrap_room":1,"dp_rank":1}`, 422, "from 0 to 0"},
		"dp rank below 0":       {"POST", "/register_dp_rank", `{"bootstrap_room":1,"dp_rank":-1}`, 422, "not a dp rank"},
		"room by GET":           {"GET", "/register_dp_rank", "", 405, "Not Allowed"},
		"no rooms":              {"POST", "/query_dp_ranks", `{}`, 422, "Field required"},
		"rooms of text":         {"POST", "/query_dp_ranks", `{"bootstrap_rooms":["1"]}`, 422, "list of integers"},
		"many rooms":            {"POST", "/query_dp_ranks", `{"bootstrap_rooms":[` + strings.Repeat("1,", MaxQuery/2) + `1]}`, 413, "32768"},
		"query by GET":          {"GET", "/query_dp_ranks", "", 405, "Not Allowed"},
	} {
		t.Run(name, func(t *testing.T) {
			table := new(Table)
			h := NewHandler(table, nil, nil)
			put(t, h, today(Place{}, two, nil), 200)
			code, got := do(t, h, c.method, c.target, c.body)
			if code != c.status || !strings.Contains(got, c.says) || !strings.HasPrefix(got, `{"detail":`) {
				t.Errorf("%d %s, want %d with %q", code, got, c.status, c.says)
			}
			if r := table.Routes(); len(r.told) != 1 || len(r.rooms.dp) != 0 || r.told[Place{}].Port != 4000 {
				t.Errorf("it has changed the table: %+v", r)
			}
			get(t, h, topology, 503, "1 of the prefill engine's 2 ranks")
		})
	}
}

// TestRouteOfAgents: where kvconn agents are, they alone count.
func TestRouteOfAgents(t *testing.T) {
	leaktest.Check(t)
	table := new(Table)
	h, routes := NewHandler(table, nil, nil), table.Routes()
	two := Sizes{1, 1, 2, 1}
	put(t, h, today(Place{}, Sizes{1, 1, 1, 1}, nil), 200) // of a client without the token
	get(t, h, topology, 200, `"page_size":16`)
	agent := func(tp int) Rank {
		return Rank{Place{TP: tp}, two, "a", 10 + tp, map[string]json.RawMessage{"page_size": json.RawMessage("64"), "attn_tp_size": json.RawMessage("9")}}
	}
	routes.Join(agent(1))
	get(t, h, topology, 503, "1 of the prefill engine's 2 ranks")
	put(t, h, today(Place{}, Sizes{1, 1, 1, 1}, nil), 400, "of dp 1 cp 1 tp 1 pp 1") // it contradicts
	put(t, h, today(Place{}, two, nil), 200)                                         // it does not count
	get(t, h, topology, 503, "1 of the prefill engine's 2 ranks")
	routes.Join(agent(0))
	put(t, h, today(Place{TP: 1}, two, map[string]any{"rank_ip": "attacker"}), 200)
	get(t, h, topology, 200, `{"attn_cp_size":1,"attn_tp_size":2,"dp_size":1,"follow_bootstrap_room":true,"kv_cache_dtype":null,"page_size":64,"pp_size":1}`)
	get(t, h, "prefill_dp_rank=0&prefill_cp_rank=0&target_tp_rank=1&target_pp_rank=0", 200, `{"rank_ip":"a","rank_port":11}`)
	routes.Leave(Place{TP: 1})
	get(t, h, topology, 503, "1 of the prefill engine's 2 ranks")
	routes.Leave(Place{})
	get(t, h, topology, 503, "no rank") // the ranks that were put before are forgotten

	// Dp ranks of unequal sizes are no engine of SGLang's.
	routes.Join(Rank{Place: Place{}, Sizes: Sizes{2, 1, 1, 1}})
	routes.Join(Rank{Place: Place{DP: 1}, Sizes: Sizes{2, 1, 2, 1}})
	get(t, h, topology, 503, "1 of the prefill engine's 2 ranks")
}

// TestRoomsOfRequests: the table tells for a while which dp rank has a room's request.
func TestRoomsOfRequests(t *testing.T) {
	leaktest.Check(t)
	h := NewHandler(new(Table), nil, nil)
	for room, dp := range map[string]int{"0": 3, "9223372036854775807": 5, "7": 1} {
		if code, got := do(t, h, "POST", "/register_dp_rank", fmt.Sprintf(`{"bootstrap_room":%s,"dp_rank":%d}`, room, dp)); code != 200 {
			t.Fatalf("%d %s", code, got)
		}
	}
	_, _ = do(t, h, "POST", "/register_dp_rank", `{"bootstrap_room":7,"dp_rank":2}`) // it was sent elsewhere
	for body, want := range map[string]string{
		`{"bootstrap_rooms":[7,0,8,9223372036854775807,7]}`: `{"0":3,"7":2,"9223372036854775807":5}`,
		`{"bootstrap_rooms":[]}`:                            `{}`,
		`{"bootstrap_rooms":[-3,6]}`:                        `{}`,
	} {
		if code, got := do(t, h, "POST", "/query_dp_ranks", body); code != 200 || got != want {
			t.Errorf("%s: %d %s, want %s", body, code, got, want)
		}
	}
}

// TestRouteAccess: with a token, a client without it changes no rank and no room, and may
// still ask.
func TestRouteAccess(t *testing.T) {
	leaktest.Check(t)
	for name, access := range map[string]*Access{"token": {Token: "secret"}, "nkeys only": {Closed: true}} {
		table := new(Table)
		h := NewHandler(table, access, nil)
		for target, method := range map[string]string{"/route": "PUT", "/register_dp_rank": "POST"} {
			r := httptest.NewRequest(method, target, untouched{t})
			w := httptest.NewRecorder()
			h.ServeHTTP(w, r)
			if w.Code != 401 {
				t.Errorf("%s: %s %s: %d %s", name, method, target, w.Code, w.Body)
			}
		}
		if code, got := do(t, h, "POST", "/query_dp_ranks", `{"bootstrap_rooms":[1]}`); code != 200 {
			t.Errorf("%s: %d %s", name, code, got)
		}
		get(t, h, topology, 503, "no rank")
		r := httptest.NewRequest("PUT", "/route", strings.NewReader(today(Place{}, Sizes{1, 1, 1, 1}, nil)))
		r.Header.Set("Authorization", "Bearer secret")
		w := httptest.NewRecorder()
		h.ServeHTTP(w, r)
		if want := map[bool]int{true: 200, false: 401}[access.Token != ""]; w.Code != want {
			t.Errorf("%s: with the token: %d %s", name, w.Code, w.Body)
		}
	}
}

// TestConnectionsAreKept: a client that asks often, as a decode engine does, needs one
// connection.
func TestConnectionsAreKept(t *testing.T) {
	leaktest.Check(t)
	var opened atomic.Int32
	lives := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { // the connection, after the bodies before
		if r.Context().Err() != nil {
			w.WriteHeader(http.StatusInternalServerError)
		}
	})
	srv := httptest.NewUnstartedServer(NewHandler(new(Table), nil, map[string]http.Handler{"/lives": lives}))
	srv.Config.ConnState = func(_ net.Conn, s http.ConnState) {
		if s == http.StateNew {
			opened.Add(1)
		}
	}
	srv.Start()
	defer srv.Close()
	client := srv.Client()
	defer client.CloseIdleConnections()
	for i := range 20 {
		for path, body := range map[string]string{"/register_dp_rank": fmt.Sprintf(`{"bootstrap_room":%d,"dp_rank":0}`, i), "/query_dp_ranks": `{"bootstrap_rooms":[1]}`, "/lives": ""} {
			resp, err := client.Post(srv.URL+path, "application/json", strings.NewReader(body))
			if err != nil {
				t.Fatal(err)
			}
			_, _ = io.Copy(io.Discard, resp.Body)
			resp.Body.Close()
			if resp.StatusCode != 200 {
				t.Fatalf("%s: %s", path, resp.Status)
			}
		}
	}
	if n := opened.Load(); n != 1 {
		t.Errorf("%d connections, want 1", n)
	}
}
