package cli

import (
	"context"
	"encoding/json"
	"os/exec"
	"strconv"
	"time"

	"github.com/kvconn/kvconn/internal/freeport"
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
	ports, err := freeport.Take(1)
	if err != nil {
		return 0, false
	}
	server := exec.CommandContext(ctx, path, "-s", "-1", "-B", "127.0.0.1", "-p", strconv.Itoa(ports[0]))
	if err := server.Start(); err != nil {
		return 0, false
	}
	defer func() {
		_ = server.Process.Kill()
		_ = server.Wait()
	}()
	for ctx.Err() == nil { // until the server listens
		out, err := exec.CommandContext(ctx, path, "-c", "127.0.0.1", "-p", strconv.Itoa(ports[0]), "-t", "1", "-J").Output()
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
