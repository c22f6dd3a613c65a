// A nats-server, or a cluster of three, in processes of their own, for tests.

package nettest

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/kvconn/kvconn/internal/freeport"
)

// ElectionBound is how long a cluster may be without a leader on a slow machine:
// nats-server waits 4 to 9 s before it elects one.
const ElectionBound = 40 * time.Second

// start is how long a server may take until it listens.
const start = 30 * time.Second

var (
	buildOnce sync.Once
	buildDir  string
	errBuild  error
)

// Main is for TestMain of packages that start servers: it runs the tests and removes the
// program that was built for them.
func Main(m *testing.M) (code int) {
	code = m.Run()
	if buildDir != "" {
		_ = os.RemoveAll(buildDir)
	}
	return code
}

// binary is nats-server of the module's version, built once for all tests.
func binary(t testing.TB) string {
	t.Helper()
	buildOnce.Do(func() {
		if buildDir, errBuild = os.MkdirTemp("", "kvconn-test-"); errBuild != nil {
			return
		}
		if out, err := exec.Command("go", "build", "-o", filepath.Join(buildDir, "nats-server"), "github.com/nats-io/nats-server/v2").CombinedOutput(); err != nil {
			errBuild = fmt.Errorf("build nats-server: %w\n%s", err, out)
		}
	})
	if errBuild != nil {
		t.Fatal(errBuild)
	}
	return filepath.Join(buildDir, "nats-server")
}

// NATSServer is a nats-server in a process of its own.
type NATSServer struct {
	t       testing.TB
	bin     string
	addr    string
	monitor string
	args    []string
	cmd     *exec.Cmd
}

// NewNATS starts a server with JetStream, and with more arguments; it ends with
// the test. It returns when the server listens.
func NewNATS(t testing.TB, args ...string) *NATSServer {
	t.Helper()
	bin := binary(t) // which may take a while to build: the ports are free now
	addrs := freeAddrs(t, 2)
	s := &NATSServer{t: t, bin: bin, addr: addrs[0], monitor: addrs[1], args: args}
	s.endWithTest()
	s.Start()
	return s
}

// Addr is where clients connect, host:port.
func (s *NATSServer) Addr() string { return s.addr }

// URL is where clients connect.
func (s *NATSServer) URL() string { return "nats://" + s.addr }

// Start starts a killed server again, with nothing of what it knew, and returns
// when it listens.
func (s *NATSServer) Start() {
	s.t.Helper()
	s.launch()
	s.await()
}

func (s *NATSServer) launch() {
	s.t.Helper()
	host, port, _ := net.SplitHostPort(s.addr)
	_, monitor, _ := net.SplitHostPort(s.monitor)
	s.cmd = exec.Command(s.bin, append([]string{"-a", host, "-p", port, "-m", monitor, "-js", "-sd", s.t.TempDir()}, s.args...)...)
	if err := s.cmd.Start(); err != nil {
		s.cmd = nil
		s.t.Fatal(err)
	}
}

func (s *NATSServer) await() {
	s.t.Helper()
	for begin := time.Now(); ; time.Sleep(5 * time.Millisecond) {
		conn, err := net.Dial("tcp", s.addr)
		if err == nil {
			_ = conn.Close()
			return
		}
		if time.Since(begin) > start {
			s.t.Fatalf("nats-server does not listen within %v: %v", start, err)
		}
	}
}

// Reload has the server read its configuration again, as "nats-server --signal reload" does, and waits until it has.
func (s *NATSServer) Reload() {
	s.t.Helper()
	loaded := func() (at struct {
		Time time.Time `json:"config_load_time"`
	}) {
		if err := fetchJSON("http://"+s.monitor+"/varz", &at); err != nil {
			s.t.Fatal(err)
		}
		return at
	}
	before := loaded()
	if err := s.cmd.Process.Signal(syscall.SIGHUP); err != nil {
		s.t.Fatal(err)
	}
	for begin := time.Now(); !loaded().Time.After(before.Time); time.Sleep(5 * time.Millisecond) {
		if time.Since(begin) > start {
			s.t.Fatalf("nats-server does not reload its configuration within %v", start)
		}
	}
}

// endWithTest has the server end before its folder is removed: a test's cleanups run from the last to the first.
func (s *NATSServer) endWithTest() {
	s.t.TempDir()
	s.t.Cleanup(s.Kill)
}

// Kill is SIGKILL.
func (s *NATSServer) Kill() {
	if s.cmd == nil {
		return
	}
	_ = s.cmd.Process.Kill()
	_ = s.cmd.Wait()
	s.cmd = nil
}

// NATSTrio is a cluster of three servers.
type NATSTrio struct {
	t       testing.TB
	Servers [3]*NATSServer // s0 to s2
}

// NewNATSTrio starts three servers, with more arguments; they end with the test. It returns
// when they are a cluster.
func NewNATSTrio(t testing.TB, args ...string) *NATSTrio {
	t.Helper()
	c := &NATSTrio{t: t}
	bin := binary(t)
	addrs := freeAddrs(t, 9)
	routes := []string{"nats://" + addrs[6], "nats://" + addrs[7], "nats://" + addrs[8]}
	for i := range c.Servers {
		s := &NATSServer{t: t, bin: bin, addr: addrs[i], monitor: addrs[3+i], args: append([]string{
			"-n", fmt.Sprint("s", i), "--cluster_name", "trio", "--cluster", routes[i], "--routes", strings.Join(routes, ",")}, args...)}
		c.Servers[i] = s
		s.endWithTest()
		s.launch()
	}
	c.MetaLeader()
	return c
}

func freeAddrs(t testing.TB, n int) []string {
	t.Helper()
	ports, err := freeport.Take(n)
	if err != nil {
		t.Fatal(err)
	}
	var addrs []string
	for _, port := range ports {
		addrs = append(addrs, net.JoinHostPort("127.0.0.1", strconv.Itoa(port)))
	}
	return addrs
}

// URLs are those of all servers.
func (c *NATSTrio) URLs() string {
	var all []string
	for _, s := range c.Servers {
		all = append(all, s.URL())
	}
	return strings.Join(all, ",")
}

type replica struct {
	Current bool `json:"current"`
	Offline bool `json:"offline"`
}

type raftGroup struct {
	Leader   string    `json:"leader"`
	Replicas []replica `json:"replicas"`
}

// whole: it has a leader, and the two others hold all that the leader holds.
func (g *raftGroup) whole() bool {
	n := 0
	for _, r := range g.Replicas {
		if r.Current && !r.Offline {
			n++
		}
	}
	return g.Leader != "" && n == 2
}

// jsz is a server's word on JetStream, at its monitoring port.
type jsz struct {
	Meta     raftGroup `json:"meta_cluster"`
	Accounts []struct {
		Streams []struct {
			Name    string    `json:"name"`
			Cluster raftGroup `json:"cluster"`
		} `json:"stream_detail"`
	} `json:"account_details"`
}

// MetaLeader waits until the cluster is whole, and returns its leader and the
// two others.
func (c *NATSTrio) MetaLeader() (leader *NATSServer, others [2]*NATSServer) {
	c.t.Helper()
	return c.leader("the cluster", func(j *jsz) *raftGroup { return &j.Meta })
}

// StreamLeader waits until a stream has three whole replicas, and returns their
// leader and the two others.
func (c *NATSTrio) StreamLeader(name string) (leader *NATSServer, others [2]*NATSServer) {
	c.t.Helper()
	return c.leader("stream "+name, func(j *jsz) *raftGroup {
		for _, a := range j.Accounts {
			for _, s := range a.Streams {
				if s.Name == name {
					return &s.Cluster
				}
			}
		}
		return nil
	})
}

func (c *NATSTrio) leader(what string, group func(*jsz) *raftGroup) (leader *NATSServer, others [2]*NATSServer) {
	c.t.Helper()
	for begin := time.Now(); ; time.Sleep(50 * time.Millisecond) {
		err := errors.New("no server leads it")
		for i, s := range c.Servers {
			var j jsz
			if e := fetchJSON("http://"+s.monitor+"/jsz?accounts=1&streams=1", &j); e != nil {
				err = e
				continue
			}
			g := group(&j)
			if g == nil || g.Leader != fmt.Sprint("s", i) {
				continue // the leader itself knows the others
			}
			if g.whole() {
				return s, [2]*NATSServer{c.Servers[(i+1)%3], c.Servers[(i+2)%3]}
			}
			err = fmt.Errorf("its leader s%d sees %+v", i, g.Replicas)
		}
		if time.Since(begin) > ElectionBound {
			c.t.Fatalf("%s is not whole within %v: %v", what, ElectionBound, err)
		}
	}
}

// connz is a server's word on its clients, at its monitoring port.
type connz struct {
	Connections []struct {
		Name string `json:"name"`
	} `json:"connections"`
}

// At waits until a client with this word in its name is connected to one of the servers,
// and returns that server.
func (c *NATSTrio) At(word string) *NATSServer {
	c.t.Helper()
	for begin := time.Now(); ; time.Sleep(50 * time.Millisecond) {
		for _, s := range c.Servers {
			var j connz
			if s.cmd == nil || fetchJSON("http://"+s.monitor+"/connz", &j) != nil {
				continue
			}
			for _, client := range j.Connections {
				if slices.Contains(strings.Fields(client.Name), word) {
					return s
				}
			}
		}
		if time.Since(begin) > ElectionBound {
			c.t.Fatalf("client %s is at no server within %v", word, ElectionBound)
		}
	}
}

func fetchJSON(url string, v any) error {
	client := &http.Client{Timeout: 5 * time.Second, Transport: &http.Transport{DisableKeepAlives: true}}
	resp, err := client.Get(url)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	return json.NewDecoder(resp.Body).Decode(v)
}
