package proxy

import (
	"errors"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/kvconn/kvconn/rig/leaktest"
)

func TestParseArgs(t *testing.T) {
	leaktest.Check(t)
	cfg, err := ParseArgs(strings.Fields("--prefill http://p1:8010 9000 --prefill http://p2:8010 none --prefill=http://[::1]:8010" +
		" --decode http://d1:8020 --decode=https://d2 --host 0.0.0.0 --port=0"))
	want := DefaultConfig()
	want.Host, want.Port = "0.0.0.0", 0
	want.Prefill = []Prefill{{"http://p1:8010", 9000}, {"http://p2:8010", 0}, {"http://[::1]:8010", 0}}
	want.Decode = []string{"http://d1:8020", "https://d2"}
	if err != nil || !reflect.DeepEqual(cfg, want) {
		t.Fatalf("got %+v, %v\nwant %+v", cfg, err, want)
	}
	cfg, err = ParseArgs(strings.Fields("--prefill http://p --decode http://d"))
	if err != nil || cfg.Host != "127.0.0.1" || cfg.Port != 8000 || cfg.Retries != 2 || !cfg.AccessLog {
		t.Fatalf("defaults: %+v, %v", cfg, err)
	}
	cfg, err = ParseArgs(strings.Fields("--prefill http://p --decode http://d --contract nixl --balance=round-robin --retries 0 --max-requests 9 --max-body 1000 --drain-timeout 7 --no-access-log --fallback-decode"))
	want = DefaultConfig()
	want.Prefill, want.Decode = []Prefill{{"http://p", 0}}, []string{"http://d"}
	want.Contract, want.Balance, want.Retries = NIXL, RoundRobin, 0
	want.MaxRequests, want.MaxBody, want.ShutdownTimeout = 9, 1000, 7*time.Second
	want.FallbackDecode, want.AccessLog = true, false
	if err != nil || !reflect.DeepEqual(cfg, want) {
		t.Fatalf("got %+v, %v\nwant %+v", cfg, err, want)
	}
	for _, help := range []string{"--help", "-h", "--port 1 --help"} {
		if _, err := ParseArgs(strings.Fields(help)); !errors.Is(err, ErrHelp) {
			t.Errorf("%s: %v, want ErrHelp", help, err)
		}
	}
}

func TestParseArgsErrors(t *testing.T) {
	leaktest.Check(t)
	const p, d = "--prefill http://p:1 ", "--decode http://d:1 "
	for args, want := range map[string]string{
		"":                            "no prefill server",
		d:                             "no prefill server",
		p:                             "no decode server",
		p + "--decode":                "--decode needs a URL",
		d + "--prefill":               "--prefill needs a URL",
		d + "--prefill --port 1":      "--prefill needs a URL",
		p + d + "--port":              "--port needs a port",
		p + d + "--port x":            `--port "x"`,
		p + d + "--port -1":           `--port "-1"`,
		p + d + "--port 65536":        `--port "65536"`,
		d + "--prefill http://p:1 0":  `bootstrap port "0"`,
		d + "--prefill http://p:1 x":  "or the word none for 8998",
		p + d + "--contract http":     `contract "http"`,
		p + d + "--balance":           "--balance needs",
		p + d + "--balance x":         `balance "x"`,
		p + d + "--retries 10":        `--retries "10"`,
		p + d + "--max-requests 0":    `--max-requests "0"`,
		p + d + "--drain-timeout 0":   `--drain-timeout "0"`,
		p + d + "--no-access-log=no":  "takes no value",
		p + d + "--fallback-decode=1": "takes no value",
		p + d + "--fallback-decode --contract sglang": "compute no prompts",
		d + p + "9000 9001":                           `unknown argument "9001"`,
		p + d + "--prefil http://p":                   `unknown argument "--prefil"`,
		d + "--prefill p:8010":                        `bad URL "p:8010"`,
		d + "--prefill http://":                       `bad URL "http://"`,
		d + "--prefill http://p:0":                    `port "0"`,
		d + "--prefill http://p:":                     `port ""`,
		d + "--prefill http://p:x":                    "bad URL",
		p + d + d:                                     "decode server http://d:1 is given twice",
		p + d + p + "9001":                            "is given twice",
		p + "--decode ftp://d":                        `bad URL "ftp://d"`,
		p + "--decode http://d?x=1":                   "query",
		p + "--decode http://u@d":                     "user",
		p + "--decode http://d:70000":                 `port "70000"`,
	} {
		if _, err := ParseArgs(strings.Fields(args)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v; want an error with %q", args, err, want)
		}
	}
}

func TestBootstrapURL(t *testing.T) {
	leaktest.Check(t)
	for in, want := range map[Prefill]string{
		{"http://p1:8010", 9000}:            "http://p1:9000",
		{"http://P1:8010", 9000}:            "http://p1:9000",
		{"https://p1", 0}:                   "http://p1:8998",
		{"http://[fe80::1]:8010", 0}:        "http://[fe80::1]:8998",
		{"http://[fe80::1%25eth0]:8010", 0}: "http://[fe80::1%25eth0]:8998",
		{"http://[FE80::1%25Eth0]:8010", 0}: "http://[fe80::1%25Eth0]:8998", // an interface's name has a case
	} {
		base, err := baseURL(in.URL)
		if err != nil {
			t.Fatal(err)
		}
		if got := bootstrapURL(base, in.BootstrapPort, false); got != want {
			t.Errorf("%+v: %s, want %s", in, got, want)
		}
		if got := bootstrapURL(base, in.BootstrapPort, true); got != strings.Replace(want, "http", "https", 1) {
			t.Errorf("%+v with TLS: %s", in, got)
		}
	}
}
