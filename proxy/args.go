package proxy

import (
	"flag"
	"fmt"
	"strconv"
	"strings"
)

// Usage is the text for --help.
const Usage = `usage: proxy --prefill URL [BOOTSTRAP_PORT] ... --decode URL ... [--host HOST] [--port PORT] [--bootstrap-ca FILE]

  --prefill URL [PORT|none]  a prefill server and its bootstrap port (none: 8998); repeatable
  --decode URL               a decode server; repeatable
  --host HOST                address to listen on (default 127.0.0.1)
  --port PORT                port to listen on, 0 for any free one (default 8000)
  --bootstrap-ca FILE        the bootstrap ports speak https: whom to trust, "system" for the system's authorities
  --help                     show this text
`

// ErrHelp is returned by ParseArgs for --help: print Usage and exit with 0.
var ErrHelp = flag.ErrHelp

// ParseArgs reads a command line without the program's name. It takes what
// vLLM's example proxy takes, which package flag cannot: --prefill has one or
// two values.
func ParseArgs(args []string) (Config, error) {
	cfg := Config{Host: DefaultHost, Port: DefaultPort}
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
		var err error
		switch name {
		case "--help", "-h":
			return Config{}, ErrHelp
		case "--host":
			cfg.Host, err = value("an address to listen on")
		case "--port":
			var s string
			if s, err = value("a port"); err == nil {
				cfg.Port, err = parsePort("--port", s, 0)
			}
		case "--bootstrap-ca":
			cfg.BootstrapCA, err = value("a file, or system")
		case "--decode":
			var s string
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
