package proxy

import (
	"flag"
	"fmt"
	"strconv"
	"strings"
	"time"
)

// Usage is the text for --help.
const Usage = `usage: proxy --prefill URL [BOOTSTRAP_PORT] ... --decode URL ... [OPTIONS]

  --prefill URL [PORT|none]  a prefill server and its bootstrap port; repeatable. Without a port, and with none:
                             8998; with nixl no bootstrap port, with sglang what the server says
  --decode URL               a decode server; repeatable
  --host HOST                address to listen on (default 127.0.0.1)
  --port PORT                port to listen on, 0 for any free one (default 8000)
  --contract NAME            mooncake: prefill and decode at the same time, with a transfer_id (default)
                             nixl: prefill first, its kv_transfer_params to decode as they are
                             sglang: both at the same time, with bootstrap_host, bootstrap_port and bootstrap_room
  --balance NAME             least-loaded (default) or round-robin, over servers and their data parallel ranks
  --retries N                further attempts with other engines before the first byte of an answer (default 2)
  --fallback-decode          when no prefill server is up, or the retries are spent, a decode server gets the request
                             alone and computes the prompt itself (not with sglang)
  --max-requests N           requests in flight; further ones get a 503 (default 4096)
  --max-body BYTES           of a request (default 67108864)
  --drain-timeout SECONDS    how long requests may go on after SIGTERM (default 30)
  --bootstrap-ca FILE        the bootstrap ports speak https: whom to trust, "system" for the system's authorities
  --no-access-log            no line in the log for each request
  --help                     show this text

/v1/completions, /v1/chat/completions (and /generate by the contract sglang) go to a prefill and a decode server,
/health and /metrics are the router's own, all else goes to a decode server.
`

// ErrHelp is returned by ParseArgs for --help: print Usage and exit with 0.
var ErrHelp = flag.ErrHelp

// ParseArgs reads a command line without the program's name. It takes the arguments of
// vLLM's example proxy, which package flag cannot: --prefill has one or two values.
func ParseArgs(args []string) (Config, error) {
	cfg := Config{Host: DefaultHost, Port: DefaultPort, Retries: DefaultRetries, AccessLog: true}
	for len(args) > 0 {
		name, inline, hasInline := strings.Cut(args[0], "=")
		args = args[1:]
		value := func(want string) (string, error) {
			if hasInline {
				return inline, nil
			}
			if len(args) == 0 || strings.HasPrefix(args[0], "--") {
				return "", fmt.Errorf("proxy: %s needs %s", name, want)
			}
			v := args[0]
			args = args[1:]
			return v, nil
		}
		number := func(least, most int64) (int64, error) {
			s, err := value("a number")
			if err != nil {
				return 0, err
			}
			n, err := strconv.ParseInt(s, 10, 64)
			if err != nil || n < least || n > most {
				return 0, fmt.Errorf("proxy: %s %q: give a number from %d to %d", name, s, least, most)
			}
			return n, nil
		}
		var err error
		var n int64
		var s string
		switch name {
		case "--help", "-h":
			return Config{}, ErrHelp
		case "--host":
			cfg.Host, err = value("an address to listen on")
		case "--port":
			if s, err = value("a port"); err == nil {
				cfg.Port, err = parsePort("--port", s, 0)
			}
		case "--contract":
			if s, err = value("mooncake, nixl or sglang"); err == nil {
				cfg.Contract, err = parseContract(s)
			}
		case "--balance":
			if s, err = value("least-loaded or round-robin"); err == nil {
				cfg.Balance, err = parseBalance(s)
			}
		case "--retries":
			n, err = number(0, maxRetries)
			cfg.Retries = int(n)
		case "--fallback-decode":
			cfg.FallbackDecode = true
			if hasInline {
				err = fmt.Errorf("proxy: --fallback-decode takes no value")
			}
		case "--max-requests":
			n, err = number(1, 1<<20)
			cfg.MaxRequests = int(n)
		case "--max-body":
			cfg.MaxBody, err = number(1, 1<<40)
		case "--drain-timeout":
			n, err = number(1, 24*3600)
			cfg.ShutdownTimeout = time.Duration(n) * time.Second
		case "--no-access-log":
			cfg.AccessLog = false
			if hasInline {
				err = fmt.Errorf("proxy: --no-access-log takes no value")
			}
		case "--bootstrap-ca":
			cfg.BootstrapCA, err = value("a file, or system")
		case "--decode":
			if s, err = value("a URL, as http://host:8020"); err == nil {
				cfg.Decode = append(cfg.Decode, s)
			}
		case "--prefill":
			var p Prefill
			if p.URL, err = value("a URL, as http://host:8010"); err != nil {
				break
			}
			if len(args) > 0 && !strings.HasPrefix(args[0], "-") {
				p.BootstrapPort, err = bootstrapPort(p.URL, args[0])
				args = args[1:]
			}
			cfg.Prefill = append(cfg.Prefill, p)
		default:
			return Config{}, fmt.Errorf("proxy: unknown argument %q: --help lists those there are", name)
		}
		if err != nil {
			return Config{}, err
		}
	}
	if err := cfg.validate(); err != nil {
		return Config{}, err
	}
	return cfg, nil
}

func bootstrapPort(url, s string) (int, error) {
	if strings.EqualFold(s, "none") {
		return 0, nil
	}
	n, err := parsePort("--prefill "+url+": bootstrap port", s, 1)
	if err != nil {
		return 0, fmt.Errorf("%w, or none for %d", err, DefaultBootstrapPort)
	}
	return n, nil
}

func parsePort(what, s string, least int) (int, error) {
	n, err := strconv.Atoi(s)
	if err != nil || n < least || n > 65535 {
		return 0, fmt.Errorf("proxy: %s %q: give a number from %d to 65535", what, s, least)
	}
	return n, nil
}
