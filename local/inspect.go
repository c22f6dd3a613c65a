package local

import (
	"fmt"
	"net"
)

// Report says what this machine lets two of its processes do.
type Report struct {
	Available bool   `json:"available"`
	Tried     bool   `json:"tried"`             // two processes have exchanged a block by it: Inspect looks at this one only
	Untried   string `json:"untried,omitempty"` // why no second process was tried
	Mapped    bool   `json:"mapped"`            // the same out of memory that the other has mapped
	// MappingProblem is why not.
	MappingProblem string `json:"mapping_problem,omitempty"`
	Problem        string `json:"problem,omitempty"`
	BootID         string `json:"boot_id,omitempty"` // the same on all that is on this host
	Network        string `json:"network_namespace,omitempty"`
	Processes      string `json:"process_namespace,omitempty"`
	User           int    `json:"user"`
	Yama           string `json:"yama"` // kernel.yama.ptrace_scope; "" if the kernel has no such thing
	Who            string `json:"who"`  // may read a prefill engine's memory
}

// Inspect finds out, about this process and its host, what a transport would find out.
func Inspect() Report { return inspect(linux{}) }

func inspect(k kernel) (r Report) {
	p, err := here(k)
	r.BootID, r.Network, r.Processes, r.User = p.boot, p.net, p.pids, p.uid
	r.Yama, r.Who = k.yama(), allowed(k.yama())
	if err == nil {
		_, err = reading(k)
	}
	if err == nil {
		err = listens()
	}
	if err != nil {
		r.Problem = err.Error()
		return r
	}
	r.Available = true
	return r
}

// listens says why this process cannot listen on a unix socket, as a prefill agent does; nil: it can.
func listens() error {
	ln, err := net.ListenUnix("unix", &net.UnixAddr{Name: "@" + newName(), Net: "unix"})
	if err != nil {
		return fmt.Errorf("local: cannot listen on a unix socket: %w", err)
	}
	return ln.Close()
}

// allowed says in words what a mode of Yama allows.
func allowed(yama string) string {
	switch yama {
	case "", "0":
		return "any process of its user, with its capabilities"
	case "1":
		return "one decode engine's process, which it names itself: set kernel.yama.ptrace_scope to 0 for more"
	case "2":
		return "processes with CAP_SYS_PTRACE: set kernel.yama.ptrace_scope to 1 or 0 for others"
	}
	return "nobody: set kernel.yama.ptrace_scope to 1 or less and start the host anew"
}
