package rdma

import (
	"fmt"
	"path"
	"strconv"
	"strings"
)

// portName is a port of a device, "mlx5_0:1".
type portName struct {
	Device string
	Port   int // from 1
}

func (p portName) String() string { return fmt.Sprintf("%s:%d", p.Device, p.Port) }

// devicePattern is an element of a list of devices: a name or a glob, of all its
// ports or of one.
type devicePattern struct {
	device string
	port   int // 0: all
}

func (p devicePattern) String() string {
	if p.port == 0 {
		return p.device
	}
	return fmt.Sprintf("%s:%d", p.device, p.port)
}

func (p devicePattern) match(name portName) bool {
	ok, _ := path.Match(p.device, name.Device)
	return ok && (p.port == 0 || p.port == name.Port)
}

// parseDevices reads a list of entries as "mlx5_0", "mlx5_1:1", "rxe*". setting is
// the name that errors give it.
func parseDevices(setting string, list []string) ([]devicePattern, error) {
	var out []devicePattern
	for _, text := range list {
		device, port, hasPort := strings.Cut(text, ":")
		p := devicePattern{device: device}
		if hasPort {
			n, err := strconv.ParseUint(port, 10, 8)
			if err != nil || n == 0 {
				return nil, fmt.Errorf("%s: %q has port %q: want a number from 1 to 255, as in mlx5_0:1", setting, text, port)
			}
			p.port = int(n)
		}
		if _, err := path.Match(device, ""); err != nil || device == "" || strings.Contains(device, "/") {
			return nil, fmt.Errorf("%s: %q is no device: want a name or a pattern, as mlx5_0, mlx5_1:1 or rxe*", setting, text)
		}
		out = append(out, p)
	}
	return out, nil
}

// deviceFilter says which ports are used: those in allow, or all when it is
// empty, but for those in deny.
type deviceFilter struct {
	allowSetting, denySetting string // names, for errors
	allow, deny               []devicePattern
}

// use returns the ports that are used, in their order. An element of allow that
// matches none is an error, since somebody counts on it; one of deny is not, so
// that one list serves many machines.
func (f *deviceFilter) use(ports []portName) ([]portName, error) {
	for _, p := range f.allow {
		found := false
		for _, name := range ports {
			found = found || p.match(name)
		}
		if !found {
			return nil, fmt.Errorf("%s: no port matches %q; there are %s", f.allowSetting, p, listPorts(ports))
		}
	}
	matches := func(list []devicePattern, name portName) bool {
		for _, p := range list {
			if p.match(name) {
				return true
			}
		}
		return false
	}
	var out []portName
	for _, name := range ports {
		if (len(f.allow) == 0 || matches(f.allow, name)) && !matches(f.deny, name) {
			out = append(out, name)
		}
	}
	if len(out) == 0 && len(ports) > 0 {
		return nil, fmt.Errorf("%s %v and %s %v leave none of the ports: there are %s", f.allowSetting, f.allow, f.denySetting, f.deny, listPorts(ports))
	}
	return out, nil
}

func listPorts(ports []portName) string {
	if len(ports) == 0 {
		return "none"
	}
	s := make([]string, len(ports))
	for i, p := range ports {
		s[i] = p.String()
	}
	return strings.Join(s, ", ")
}
