package tcp

import "syscall"

// guard returns the Control of a net.Dialer that dials an endpoint; nil if there is no Config.Guard.
func (c *Config) guard(endpoint string) func(network, address string, raw syscall.RawConn) error {
	if c.Guard == nil {
		return nil
	}
	return func(_, address string, _ syscall.RawConn) error { return c.Guard(endpoint, address) }
}
