package launch

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"syscall"
	"testing"
	"time"

	"github.com/kvconn/kvconn/bootstrap"
	"github.com/kvconn/kvconn/rig/stubengine"
)

// How the stub engines of a test behave, by the environment.
const (
	stubDir    = "STUB_DIR"    // where each says what it was started as
	stubMode   = "STUB_MODE"   // dies, hangs, refuses; of decode servers
	stubGrace  = "STUB_GRACE"  // of guards
	stubLaunch = "STUB_LAUNCH" // the JSON of a Config: be the launcher
)

// TestMain lets this binary be a guard, the vllm program and a launcher: tests
// start it under these names.
func TestMain(m *testing.M) {
	switch {
	case filepath.Base(os.Args[0]) == "vllm":
		os.Exit(stubVLLM(os.Args[1:]))
	case filepath.Base(os.Args[0]) == "python3":
		os.Exit(stubPython(os.Args[1:]))
	case len(os.Args) > 2 && os.Args[1] == GuardCommand:
		grace, err := time.ParseDuration(os.Getenv(stubGrace))
		if err != nil {
			grace = StopGrace
		}
		code, err := Guard(os.Stdin, os.Args[2:], grace)
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
		os.Exit(code)
	case os.Getenv(stubLaunch) != "":
		var c Config
		if err := json.Unmarshal([]byte(os.Getenv(stubLaunch)), &c); err != nil {
			panic(err)
		}
		c.Out = os.Stdout
		if err := Run(context.Background(), c); err != nil {
			fmt.Println(err)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// started is a stub engine's word on itself.
type started struct {
	Args    []string
	Devices string
	Config  string // of kvconn.sglang
	Key     string // the benchmark's
	Pids    []int  // its own and those of what it has started
}

// stubVLLM is vllm serve and vllm bench serve.
func stubVLLM(args []string) int {
	if args[0] == "bench" {
		return stubBench(args)
	}
	fs := flag.NewFlagSet("vllm", flag.ExitOnError)
	fs.String("host", "", "")
	port := fs.Int("port", 0, "")
	transfer := fs.String("kv-transfer-config", "", "")
	fs.String("served-model-name", "", "")
	fs.Bool("enforce-eager", false, "")
	_ = fs.Parse(args[2:]) // exits on errors
	var cfg struct {
		Role  string `json:"kv_role"`
		Extra struct {
			Port int `json:"bootstrap_port"`
		} `json:"kv_connector_extra_config"`
	}
	if err := json.Unmarshal([]byte(*transfer), &cfg); err != nil {
		fmt.Println(err)
		return 2
	}
	bootstrapPort := 0
	if cfg.Role == "kv_producer" {
		bootstrapPort = cfg.Extra.Port
	}
	return stubServe(args, *port, bootstrapPort, stubengine.Handler(stubengine.Options{Model: "m", Chunks: 2}))
}

// stubServe is a server, with a bootstrap port if it prefills.
func stubServe(args []string, port, bootstrapPort int, engine http.Handler) int {
	mode := os.Getenv(stubMode)
	if bootstrapPort != 0 {
		mode = ""
	}
	if mode == "dies" {
		fmt.Println("ValueError: no such model")
		return 3
	}
	// As vLLM's engine cores: processes that no signal to the group reaches, and
	// that have other children.
	core := exec.Command("/bin/sh", "-c", "trap '' TERM; sleep 1000 & echo $!; wait")
	core.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	out, err := core.StdoutPipe()
	if err != nil {
		panic(err)
	}
	if err := core.Start(); err != nil {
		panic(err)
	}
	var grandchild int
	if _, err := fmt.Fscan(out, &grandchild); err != nil {
		panic(err)
	}
	if mode == "hangs" {
		signal.Ignore(syscall.SIGTERM)
	}
	say(port, started{Args: args, Devices: os.Getenv(cudaDevices), Config: os.Getenv(sglangVariable),
		Pids: []int{os.Getpid(), os.Getppid(), core.Process.Pid, grandchild}})
	fmt.Println("INFO [stub.py] loading")
	if mode == "hangs" {
		select {}
	}
	if mode == "refuses" {
		engine = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.URL.Path != "/health" && r.URL.Path != "/model_info" { // which an engine answers without a forward pass
				http.Error(w, "no forward pass", http.StatusInternalServerError)
			}
		})
	}
	if bootstrapPort != 0 {
		table := new(bootstrap.Table)
		if err := table.Register(bootstrap.Registration{EngineID: "e", Addr: "tcp://x:1"}); err != nil {
			panic(err)
		}
		l, err := net.Listen("tcp", net.JoinHostPort(localhost, strconv.Itoa(bootstrapPort)))
		if err != nil {
			panic(err)
		}
		go func() { panic(http.Serve(l, bootstrap.NewHandler(table, nil, nil))) }()
	}
	panic(http.ListenAndServe(net.JoinHostPort(localhost, strconv.Itoa(port)), engine))
}

// say writes a file of the stub's own, whole at once.
func say(name int, s started) {
	b, err := json.Marshal(s)
	if err != nil {
		panic(err)
	}
	at := filepath.Join(os.Getenv(stubDir), strconv.Itoa(name))
	if err := os.WriteFile(at+".part", b, 0o600); err != nil {
		panic(err)
	}
	if err := os.Rename(at+".part", at); err != nil {
		panic(err)
	}
}

func stubBench(args []string) int {
	say(0, started{Args: args, Key: os.Getenv("OPENAI_API_KEY")})
	fs := flag.NewFlagSet("vllm bench serve", flag.ContinueOnError)
	port := fs.Int("port", 0, "")
	for _, name := range []string{"backend", "host", "model", "served-model-name", "seed", "dataset-name", "random-input-len", "random-output-len", "burstiness", "request-rate"} {
		fs.String(name, "", "")
	}
	prompts := fs.Int("num-prompts", 0, "")
	if err := fs.Parse(args[2:]); err != nil {
		return 2
	}
	s := server{process: &process{name: "router"}, url: "http://" + net.JoinHostPort(localhost, strconv.Itoa(*port))}
	for range *prompts {
		if err := warmUp(context.Background(), s.url, "m", s.name, ""); err != nil {
			fmt.Println(err)
			return 1
		}
	}
	fmt.Printf("Successful requests: %d\n", *prompts)
	return 0
}
