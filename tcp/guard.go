package tcp

import "syscall"

// guard is net.Dialer's Control for an endpoint; nil without Config.Guard.
func (c *Config) guard(endpoint string) func(network, address string, raw syscall.RawConn) error {
	if c.Guard == nil {
		return nil
	}
	return func(_, address string, _ syscall.RawConn) error { return c.Guard(endpoint, address) }
}
