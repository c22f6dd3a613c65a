package node

import (
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"reflect"
	"strings"
	"testing"

	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/rig/leaktest"
)

const topology = "/route?prefill_dp_rank=-1&prefill_cp_rank=-1&target_tp_rank=-1&target_pp_rank=-1"

// ask sends a request and returns status and body.
func ask(t testing.TB, method, url, body, token string) (int, string) {
	t.Helper()
	defer http.DefaultClient.CloseIdleConnections()
	r, err := http.NewRequest(method, url, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	if token != "" {
		r.Header.Set("Authorization", "Bearer "+token)
	}
	resp, err := http.DefaultClient.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(b)
}

// TestRouteOfAgents: SGLang's routes answer for the ranks that are registered here,
// from the first to the last, and no longer.
func TestRouteOfAgents(t *testing.T) {
	m, two := model{2, 4, false}, kv.Ranks{TP: 2, PP: 1}
	for name, host := range map[string]bool{"a port without caches": true, "the port of the first rank": false} {
		t.Run(name, func(t *testing.T) {
			leaktest.Check(t)
			address := ""
			if host {
				address = openHost(t, 0).BootstrapAddress()
			}
			var ps []*rank
			for dp := range 2 {
				for tp := range 2 {
					if address != "" {
						if code, body := ask(t, "GET", address+topology, "", ""); code != http.StatusServiceUnavailable {
							t.Fatalf("with %d ranks: %d %s", len(ps), code, body)
						}
					}
					cfg := rankConfig(RolePrefill, two, kv.Rank{TP: tp}, address)
					cfg.DPSize, cfg.DPRank, cfg.EngineID, cfg.BlockTokens, cfg.DType = 2, dp, fmt.Sprint("dp", dp), 4, "bfloat16"
					cfg.RouteInfo = json.RawMessage(`{ "follow_bootstrap_room": false, "prefill_http_port": 30000 }`)
					cfg.BootstrapJoin = address
					ps = append(ps, m.open(t, cfg))
					if address == "" {
						address = ps[0].BootstrapAddress()
					}
				}
			}
			code, body := ask(t, "GET", address+topology, "", "")
			if want := `{"attn_cp_size":1,"attn_tp_size":2,"dp_size":2,"follow_bootstrap_room":false,"kv_cache_dtype":"bfloat16","page_size":4,"pp_size":1,"prefill_http_port":30000}`; code != 200 || body != want {
				t.Fatalf("topology: %d %s, want %s", code, body, want)
			}
			for i, p := range ps {
				_, port, err := net.SplitHostPort(p.caches.Load().transports.named(viaTCP).Endpoint())
				if err != nil {
					t.Fatal(err)
				}
				code, body := ask(t, "GET", fmt.Sprintf("%s/route?prefill_dp_rank=%d&prefill_cp_rank=0&target_tp_rank=%d&target_pp_rank=0", address, i/2, i%2), "", "")
				if want := fmt.Sprintf(`{"rank_ip":"127.0.0.1","rank_port":%s}`, port); code != 200 || body != want {
					t.Fatalf("rank %d: %d %s, want %s", i, code, body, want)
				}
			}
			if err := ps[3].Close(); err != nil {
				t.Fatal(err)
			}
			if code, body := ask(t, "GET", address+topology, "", ""); code != 503 || !strings.Contains(body, "3 of the prefill engine's 4 ranks") {
				t.Fatalf("without the last: %d %s", code, body)
			}
		})
	}
}

// TestRouteToken: where a token is set, nobody writes a rank or a room without it, and the
// ranks that join are shown.
func TestRouteToken(t *testing.T) {
	leaktest.Check(t)
	cfg := hostConfig(0)
	cfg.NATSToken = theToken
	h, err := Open(cfg, Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close()
	address := h.BootstrapAddress()
	const row = `{"attn_tp_size":1,"attn_tp_rank":0,"attn_cp_size":1,"attn_cp_rank":0,"attn_dp_size":1,"attn_dp_rank":0,"pp_size":1,"pp_rank":0,` +
		`"system_dp_size":1,"system_dp_rank":0,"page_size":16,"rank_ip":"evil","rank_port":1}`
	for what, c := range map[string]struct {
		method, path, body, token string
		want                      int
	}{
		"an unknown peer's rank": {"PUT", "/route", row, "", 401}, "with another token": {"PUT", "/route", row, "guess", 401},
		"an unknown peer's room": {"POST", "/register_dp_rank", `{"bootstrap_room":1,"dp_rank":0}`, "", 401}, "a question": {"POST", "/query_dp_ranks", `{"bootstrap_rooms":[1]}`, "", 200},
	} {
		if code, body := ask(t, c.method, address+c.path, c.body, c.token); code != c.want {
			t.Errorf("%s: %d %s, want %d", what, code, body, c.want)
		}
	}
	if code, body := ask(t, "GET", address+topology, "", ""); code != 503 {
		t.Fatalf("%d %s", code, body)
	}
	m := model{2, 2, false}
	m.engine(t, RolePrefill, kv.One, joins(address, func(c *Config) { c.NATSToken = theToken }))
	if code, body := ask(t, "PUT", address+"/route", row, theToken); code != 200 { // with the token
		t.Fatalf("%d %s", code, body)
	}
	if code, body := ask(t, "GET", address+"/route?prefill_dp_rank=0&prefill_cp_rank=0&target_tp_rank=0&target_pp_rank=0", "", ""); code != 200 || !strings.Contains(body, "127.0.0.1") {
		t.Fatalf("an agent's rank was replaced: %d %s", code, body)
	}
}

// TestRouteAfterARestart: ranks that come back bring their route_info.
func TestRouteAfterARestart(t *testing.T) {
	leaktest.Check(t)
	m, two := model{2, 4, false}, kv.Ranks{TP: 2, PP: 1}
	port := freePort(t)
	h := openHost(t, port)
	address := h.BootstrapAddress()
	m.engine(t, RolePrefill, two, joins(address, func(c *Config) { c.RouteInfo = json.RawMessage(`{"x":[1,{"y":null}]}`) }))
	_, want := ask(t, "GET", address+topology, "", "")
	if !strings.Contains(want, `"x":[1,{"y":null}]`) {
		t.Fatalf("topology: %s", want)
	}
	if err := h.Close(); err != nil {
		t.Fatal(err)
	}
	openHost(t, port)
	until(t, "the ranks are back", func() bool {
		code, body := ask(t, "GET", address+topology, "", "")
		return code == 200 && reflect.DeepEqual(body, want)
	})
}

func TestRouteInfoConfig(t *testing.T) {
	for text, says := range map[string]string{
		`[1]`: "no JSON object", `"x"`: "no JSON object", `{"dp_size":2}`: `"dp_size"`, `{"attn_tp_size":2}`: `"attn_tp_size"`,
		`{"x":"` + strings.Repeat("y", 4096) + `"}`: "4104 bytes",
	} {
		if _, err := ParseConfig([]byte(`{"engine_id":"e","role":"prefill","route_info":` + text + `}`)); err == nil || !strings.Contains(err.Error(), says) || !strings.Contains(err.Error(), "route_info") {
			t.Errorf("%s: %v, want %q", text, err, says)
		}
	}
	for _, text := range []string{`{}`, `null`, `{"x": ` + strings.Repeat(" ", 5000) + `1}`} {
		if _, err := ParseConfig([]byte(`{"engine_id":"e","role":"prefill","route_info":` + text + `}`)); err != nil {
			t.Errorf("%.20s: %v", text, err)
		}
	}
}
