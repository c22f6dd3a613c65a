package cli

import (
	"context"
	"encoding/json"
	"net"
	"os/exec"
	"strconv"
	"time"
)

// runIperf measures the loopback with iperf3's defaults for one second, in
// 10⁹ bytes a second; false when iperf3 is not there or fails.
func runIperf(ctx context.Context) (float64, bool) {
	path, err := exec.LookPath("iperf3")
	if err != nil {
		return 0, false
	}
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	port, err := freePort()
	if err != nil {
		return 0, false
	}
	server := exec.CommandContext(ctx, path, "-s", "-1", "-B", "127.0.0.1", "-p", strconv.Itoa(port))
	if err := server.Start(); err != nil {
		return 0, false
	}
	defer func() {
		_ = server.Process.Kill()
		_ = server.Wait()
	}()
	for ctx.Err() == nil { // until the server listens
		out, err := exec.CommandContext(ctx, path, "-c", "127.0.0.1", "-p", strconv.Itoa(port), "-t", "1", "-J").Output()
		var res struct {
			End struct {
				Received struct {
					Bits float64 `json:"bits_per_second"`
				} `json:"sum_received"`
			} `json:"end"`
		}
		if err == nil && json.Unmarshal(out, &res) == nil && res.End.Received.Bits > 0 {
			return res.End.Received.Bits / 8e9, true
		}
		time.Sleep(20 * time.Millisecond)
	}
	return 0, false
}

func freePort() (int, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return 0, err
	}
	defer l.Close()
	return l.Addr().(*net.TCPAddr).Port, nil
}
