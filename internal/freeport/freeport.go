// Package freeport finds TCP ports for servers that are told theirs before they start,
// and that may come back at them.
package freeport

import (
	"fmt"
	"math/rand/v2"
	"net"
	"os"
)

// lowest is above the ports that services are known by.
const lowest = 10_000

// Take returns n ports of the loopback address that nobody has. They are below those that
// the kernel gives to outgoing connections: one of these could take a port between two
// servers that are to have it. All are held until the last is found, so no two are equal.
func Take(n int) ([]int, error) {
	ports := make([]int, 0, n)
	below := ephemeral()
	for tries := 0; len(ports) < n; tries++ {
		port := 0 // any: the range leaves no room, or is full
		if below > lowest && tries < 100*n {
			port = lowest + rand.IntN(below-lowest)
		}
		l, err := net.Listen("tcp", fmt.Sprint("127.0.0.1:", port))
		if err != nil {
			if port == 0 {
				return nil, fmt.Errorf("no free port: %w", err)
			}
			continue
		}
		defer l.Close()
		ports = append(ports, l.Addr().(*net.TCPAddr).Port)
	}
	return ports, nil
}

// ephemeral is the first port that outgoing connections get.
func ephemeral() int {
	first := 32768
	if text, err := os.ReadFile("/proc/sys/net/ipv4/ip_local_port_range"); err == nil {
		_, _ = fmt.Sscan(string(text), &first)
	}
	return first
}
