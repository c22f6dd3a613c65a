// By its boot id a host is known until it is started anew.

package hostenv

import (
	"fmt"
	"os"
	"strings"
	"sync"
)

// BootID is this host's boot id: each start of each host has another one.
var BootID = sync.OnceValues(func() (string, error) {
	b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "", fmt.Errorf("the host's boot id is not known: %w", err)
	}
	return strings.TrimSpace(string(b)), nil
})
