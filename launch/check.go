// Ports and devices are looked at before anything is started.

package launch

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// cudaDevices is the only device variable whose devices are looked up.
const cudaDevices = "CUDA_VISIBLE_DEVICES"

// checkPorts finds ports that are taken, and ports that are named twice.
func (c Config) checkPorts() error {
	type use struct {
		host, flag, who string
		port            int
	}
	uses := []use{{c.Host, "--port", "the router", c.Port}}
	for i := range c.Prefill {
		who := fmt.Sprintf("prefill server %d", i+1)
		uses = append(uses, use{localhost, "--prefill-ports", who, c.PrefillPorts[i]}, use{localhost, "--bootstrap-ports", who + "'s bootstrap", c.BootstrapPorts[i]})
	}
	for i := range c.Decode {
		uses = append(uses, use{localhost, "--decode-ports", fmt.Sprintf("decode server %d", i+1), c.DecodePorts[i]})
	}
	var errs []error
	for i, u := range uses {
		if u.port < 1 || u.port > 65535 {
			errs = append(errs, fmt.Errorf("launch: port %d for %s: %s takes 1 to 65535", u.port, u.who, u.flag))
			continue
		}
		if k := slices.IndexFunc(uses[:i], func(o use) bool { return o.port == u.port }); k >= 0 {
			errs = append(errs, fmt.Errorf("launch: port %d is for %s and for %s: change %s or %s", u.port, uses[k].who, u.who, uses[k].flag, u.flag))
			continue
		}
		l, err := net.Listen("tcp", net.JoinHostPort(u.host, strconv.Itoa(u.port)))
		switch {
		case errors.Is(err, syscall.EADDRINUSE):
			errs = append(errs, fmt.Errorf("launch: port %d for %s is taken: stop the process that holds it, or set %s to a free one", u.port, u.who, u.flag))
		case err != nil:
			errs = append(errs, fmt.Errorf("launch: port %d for %s (%s): %w", u.port, u.who, u.flag, err))
		default:
			_ = l.Close()
		}
	}
	return errors.Join(errs...)
}

// giveDevices fills in the devices where none are named, and finds missing ones.
func (c *Config) giveDevices(ctx context.Context) error {
	named := len(c.PrefillDevices) > 0
	if c.DeviceVariable != cudaDevices {
		return nil // only the tools of other devices know them
	}
	known, err := nvidiaDevices(ctx)
	if err != nil {
		if named {
			return fmt.Errorf("launch: the devices %s cannot be looked up: %w; on a host without GPUs, leave --prefill-devices and --decode-devices out",
				strings.Join(append(slices.Clone(c.PrefillDevices), c.DecodeDevices...), " "), err)
		}
		return nil // a machine without a GPU
	}
	gpus := slices.IndexFunc(append(known, "MIG "), func(line string) bool { return strings.HasPrefix(line, "MIG ") })
	if !named {
		ours, where := make([]string, gpus), "nvidia-smi lists"
		for i := range ours {
			ours[i] = strconv.Itoa(i)
		}
		if visible, ok := os.LookupEnv(cudaDevices); ok { // the other devices may be another user's
			ours, where = strings.FieldsFunc(visible, func(r rune) bool { return r == ',' || r == ' ' }), cudaDevices+"="+visible+" names"
			if end := slices.IndexFunc(ours, func(d string) bool { return strings.HasPrefix(d, "-") }); end >= 0 {
				ours = ours[:end] // CUDA sees no device from there on
			}
		}
		if len(ours) == 0 {
			return nil
		}
		if need := c.Prefill + c.Decode; len(ours) < need {
			return fmt.Errorf("launch: there are %d servers, but %s %d devices: to let servers share devices, name each server's with --prefill-devices and --decode-devices", need, where, len(ours))
		}
		c.PrefillDevices, c.DecodeDevices = ours[:c.Prefill:c.Prefill], ours[c.Prefill:c.Prefill+c.Decode]
		return nil
	}
	for _, list := range append(slices.Clone(c.PrefillDevices), c.DecodeDevices...) {
		for _, d := range strings.Split(list, ",") {
			if n, err := strconv.Atoi(d); err == nil && n >= 0 && n < gpus {
				continue
			}
			if slices.ContainsFunc(known, func(line string) bool { return d != "" && strings.Contains(line, "UUID: "+d) }) {
				continue
			}
			return fmt.Errorf("launch: device %q is missing: nvidia-smi lists %d (%s)", d, gpus, strings.Join(known, "; "))
		}
	}
	return nil
}

// nvidiaDevices are the lines of nvidia-smi -L, one for each device. Lines of parts of
// devices (MIG) come last.
func nvidiaDevices(ctx context.Context) ([]string, error) {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	out, err := exec.CommandContext(ctx, "nvidia-smi", "-L").Output()
	if err != nil {
		return nil, fmt.Errorf("nvidia-smi: %w", err)
	}
	var lines, parts []string
	for line := range strings.Lines(string(out)) {
		switch line = strings.TrimSpace(line); {
		case strings.HasPrefix(line, "GPU "):
			lines = append(lines, line)
		case strings.HasPrefix(line, "MIG "):
			parts = append(parts, line)
		}
	}
	return append(lines, parts...), nil
}
