package proxy

import (
	"flag"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/kvconn/kvconn/bootstrap"
)

// Option is an option of the router's command line, with its line in the usage and in
// docs/router.md.
type Option struct {
	Name    string
	Value   string // its value, for readers; "" for a switch
	Default string // "" if there is none
	Meaning string
	set     func(c *Config, a *arg) error
}

// Options returns all options.
func Options() []Option {
	d := DefaultConfig()
	count := strconv.Itoa
	return []Option{
		{"--prefill", "URL [PORT]", "", "A prefill server and its bootstrap port; repeatable. Without PORT, or if it is `none`, the port is " + count(bootstrap.DefaultPort) + "; with the contract `nixl` there is no bootstrap port then, with `sglang` the server says it.",
			func(c *Config, a *arg) error {
				url, err := a.value("a URL, as http://host:8010")
				if err != nil {
					return err
				}
				p := Prefill{URL: url}
				if port, ok := a.second(); ok {
					p.BootstrapPort, err = bootstrapPort(url, port)
				}
				c.Prefill = append(c.Prefill, p)
				return err
			}},
		{"--decode", "URL", "", "A decode server; repeatable.",
			func(c *Config, a *arg) error {
				url, err := a.value("a URL, as http://host:8020")
				c.Decode = append(c.Decode, url)
				return err
			}},
		{"--host", "HOST", d.Host, "The address at which the router listens.",
			func(c *Config, a *arg) (err error) { c.Host, err = a.value("an address to listen on"); return err }},
		{"--port", "PORT", count(d.Port), "The port at which the router listens; 0 is any free one.",
			func(c *Config, a *arg) error {
				s, err := a.value("a port")
				if err == nil {
					c.Port, err = parsePort("--port", s, 0)
				}
				return err
			}},
		{"--contract", "NAME", string(d.Contract), "How the two servers are told of each other. `mooncake`: prefill and decode at the same time, with a transfer_id. `nixl`: prefill first, its kv_transfer_params to decode as they are. `sglang`: both at the same time, with bootstrap_host, bootstrap_port and bootstrap_room.",
			func(c *Config, a *arg) error {
				s, err := a.value("mooncake, nixl or sglang")
				if err == nil {
					c.Contract, err = parseContract(s)
				}
				return err
			}},
		{"--balance", "NAME", string(d.Balance), "`least-loaded` or `round-robin`, over servers and their data parallel ranks.",
			func(c *Config, a *arg) error {
				s, err := a.value("least-loaded or round-robin")
				if err == nil {
					c.Balance, err = parseBalance(s)
				}
				return err
			}},
		{"--retries", "N", count(d.Retries), "Further attempts with other engines before the first byte of an answer, 0 to " + count(maxRetries) + ".",
			func(c *Config, a *arg) error { return a.number(0, maxRetries, func(n int64) { c.Retries = int(n) }) }},
		{"--fallback-decode", "", "", "A decode server gets the request alone and computes the prompt itself when no prefill server is up, or the retries are spent. Not with `sglang`.",
			func(c *Config, a *arg) error { c.FallbackDecode = true; return a.alone() }},
		{"--decode-below", "BYTES", "", "A request whose body is smaller goes to a decode server alone, which computes the prompt itself. Not with `sglang`.",
			func(c *Config, a *arg) error { return a.number(1, 1<<40, func(n int64) { c.DecodeBelow = n }) }},
		{"--max-requests", "N", count(d.MaxRequests), "Requests in flight; further ones get a 503. The last sixty-fourth is for clients that have fewer of them. As many need " + strconv.FormatInt(memoryFor(1), 10) + " bytes each of `--body-memory`: else a warning at the start names the value.",
			func(c *Config, a *arg) error { return a.number(1, 1<<20, func(n int64) { c.MaxRequests = int(n) }) }},
		{"--max-body", "BYTES", strconv.FormatInt(d.MaxBody, 10), "The longest body of a request; a longer one gets a 413.",
			func(c *Config, a *arg) error { return a.number(1, 1<<40, func(n int64) { c.MaxBody = n }) }},
		{"--body-memory", "BYTES", strconv.FormatInt(d.BodyMemory, 10), "The memory for all requests: " + count(requestMemory) + " bytes for each in flight, three times its header, and its body until decode answers. Answers that are held whole may take a quarter as much beside it. A request for which there is no room gets a 503, large ones first. At least `--max-body` and " + count(leastReserve) + " more.",
			func(c *Config, a *arg) error { return a.number(1<<20, 1<<41, func(n int64) { c.BodyMemory = n }) }},
		{"--drain-timeout", "SECONDS", count(int(d.ShutdownTimeout / time.Second)), "How long requests may go on after SIGTERM.",
			func(c *Config, a *arg) error {
				return a.number(1, 24*3600, func(n int64) { c.ShutdownTimeout = time.Duration(n) * time.Second })
			}},
		{"--bootstrap-ca", "FILE", "", "The bootstrap ports speak https: the file of the authority to trust, or `system` for the system's.",
			func(c *Config, a *arg) (err error) { c.BootstrapCA, err = a.value("a file, or system"); return err }},
		{"--no-access-log", "", "", "No line in the log for each request.",
			func(c *Config, a *arg) error { c.AccessLog = false; return a.alone() }},
	}
}

// Usage returns the text for --help.
func Usage() string {
	const indent, width = 29, 120
	var b strings.Builder
	b.WriteString("usage: proxy --prefill URL [PORT] ... --decode URL ... [OPTIONS]\n\n")
	for _, o := range append(Options(), Option{Name: "--help", Meaning: "Show this text."}) {
		text := strings.ReplaceAll(o.Meaning, "`", "")
		if o.Default != "" {
			text += " Default: " + o.Default + "."
		}
		line := fmt.Sprintf("  %-*s", indent-3, o.Name+" "+o.Value)
		for _, word := range strings.Fields(text) {
			if len(line)+1+len(word) > width {
				b.WriteString(line + "\n")
				line = strings.Repeat(" ", indent-1)
			}
			line += " " + word
		}
		b.WriteString(line + "\n")
	}
	b.WriteString(`
/v1/completions, /v1/chat/completions (and /generate by the contract sglang) go to a prefill and a decode server,
/health and /metrics are the router's own, all else goes to a decode server.
`)
	return b.String()
}

// ErrHelp is returned by ParseArgs for --help: print Usage and exit with 0.
var ErrHelp = flag.ErrHelp

// arg is an option as it stands on the command line, with its values.
type arg struct {
	name      string
	inline    string // the value behind =
	hasInline bool
	rest      []string // the arguments that follow
}

func (a *arg) value(want string) (string, error) {
	if a.hasInline {
		return a.inline, nil
	}
	if len(a.rest) == 0 || strings.HasPrefix(a.rest[0], "--") {
		return "", fmt.Errorf("proxy: %s needs %s", a.name, want)
	}
	v := a.rest[0]
	a.rest = a.rest[1:]
	return v, nil
}

// second is a value that may follow the first.
func (a *arg) second() (string, bool) {
	if len(a.rest) == 0 || strings.HasPrefix(a.rest[0], "-") {
		return "", false
	}
	v := a.rest[0]
	a.rest = a.rest[1:]
	return v, true
}

func (a *arg) number(least, most int64, set func(int64)) error {
	s, err := a.value("a number")
	if err != nil {
		return err
	}
	n, err := strconv.ParseInt(s, 10, 64)
	if err != nil || n < least || n > most {
		return fmt.Errorf("proxy: %s %q: give a number from %d to %d", a.name, s, least, most)
	}
	set(n)
	return nil
}

func (a *arg) alone() error {
	if a.hasInline {
		return fmt.Errorf("proxy: %s takes no value", a.name)
	}
	return nil
}

// ParseArgs reads a command line without the program's name. It takes the arguments of
// vLLM's example proxy, which package flag cannot: --prefill has one or two values.
func ParseArgs(args []string) (Config, error) {
	cfg, options := DefaultConfig(), Options()
	for len(args) > 0 {
		a := &arg{rest: args[1:]}
		a.name, a.inline, a.hasInline = strings.Cut(args[0], "=")
		if a.name == "--help" || a.name == "-h" {
			return Config{}, ErrHelp
		}
		i := slices.IndexFunc(options, func(o Option) bool { return o.Name == a.name })
		if i < 0 {
			return Config{}, fmt.Errorf("proxy: unknown argument %q: --help lists all arguments", a.name)
		}
		if err := options[i].set(&cfg, a); err != nil {
			return Config{}, err
		}
		args = a.rest
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
		return 0, fmt.Errorf("%w, or the word none for %d", err, bootstrap.DefaultPort)
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
