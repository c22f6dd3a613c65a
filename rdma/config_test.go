package rdma

import (
	"slices"
	"strings"
	"testing"
	"time"
)

func TestConfigCheck(t *testing.T) {
	for what, c := range map[string]struct {
		change func(*Config)
		says   []string // none: it passes
	}{
		"defaults":           {func(*Config) {}, nil},
		"gid index 0":        {func(c *Config) { c.GIDIndex = 0 }, nil},
		"gid index":          {func(c *Config) { c.GIDIndex = 256 }, []string{"rdma_gid_index", "256", "-1 to 255", "kvconn doctor"}},
		"gid index below":    {func(c *Config) { c.GIDIndex = -2 }, []string{"rdma_gid_index", "-2"}},
		"no queue pair":      {func(c *Config) { c.QueuePairs = 0 }, []string{"rdma_qps", "1 to 16"}},
		"queue pairs":        {func(c *Config) { c.QueuePairs = 17 }, []string{"rdma_qps", "17"}},
		"send depth":         {func(c *Config) { c.SendDepth = 15 }, []string{"rdma_send_depth", "16 to 16384"}},
		"timeout for ever":   {func(c *Config) { c.Timeout = 0 }, []string{"rdma_timeout", "1 to 21"}},
		"retry":              {func(c *Config) { c.Retry = 8 }, []string{"rdma_retry", "0 to 7"}},
		"rnr retry":          {func(c *Config) { c.RNRRetry = -1 }, []string{"rdma_rnr_retry"}},
		"rnr timer":          {func(c *Config) { c.MinRNRTimer = 32 }, []string{"rdma_min_rnr_timer"}},
		"traffic class":      {func(c *Config) { c.TrafficClass = 256 }, []string{"rdma_traffic_class", "DSCP"}},
		"service level":      {func(c *Config) { c.ServiceLevel = 16 }, []string{"rdma_service_level"}},
		"pkey index":         {func(c *Config) { c.PKeyIndex = 65536 }, []string{"rdma_pkey_index"}},
		"mtu":                {func(c *Config) { c.MTU = 1500 }, []string{"rdma_mtu", "1500", "4096"}},
		"an mtu":             {func(c *Config) { c.MTU = 2048 }, nil},
		"ordering":           {func(c *Config) { c.RelaxedOrdering = "yes" }, []string{"rdma_relaxed_ordering", "yes", "auto, on or off"}},
		"idle":               {func(c *Config) { c.Idle = time.Millisecond }, []string{"rdma_idle_s", "0.001", "1 to 3600"}},
		"devices":            {func(c *Config) { c.Devices = []string{"mlx5_0", "mlx5_1:2"} }, nil},
		"no name":            {func(c *Config) { c.Devices = []string{""} }, []string{"rdma_devices", "kvconn doctor"}},
		"a path":             {func(c *Config) { c.Devices = []string{"/dev/infiniband/uverbs0"} }, []string{"rdma_devices", "uverbs0"}},
		"a name with spaces": {func(c *Config) { c.Devices = []string{"mlx5_0 mlx5_1"} }, []string{"rdma_devices"}},
		"a bad pattern":      {func(c *Config) { c.Deny = []string{"mlx5_["} }, []string{"rdma_deny", "pattern"}},
		"port 0":             {func(c *Config) { c.Deny = []string{"mlx5_0:0"} }, []string{"rdma_deny", "1 to 255"}},
		"port x":             {func(c *Config) { c.Deny = []string{"mlx5_0:x"} }, []string{"rdma_deny", `"x"`}},
		"a long list":        {func(c *Config) { c.Deny = make([]string, maxListed+1) }, []string{"rdma_deny", "257 entries"}},
	} {
		cfg := DefaultConfig()
		c.change(&cfg)
		err := cfg.Check()
		if (err == nil) != (c.says == nil) {
			t.Errorf("%s: %v", what, err)
			continue
		}
		for _, part := range c.says {
			if !strings.Contains(err.Error(), part) {
				t.Errorf("%s: %v does not name %q", what, err, part)
			}
		}
	}
}

func TestConfigSelects(t *testing.T) {
	for _, c := range []struct {
		allow, deny []string
		device      string
		port        int
		want        bool
	}{
		{nil, nil, "mlx5_0", 1, true},
		{[]string{"mlx5_0"}, nil, "mlx5_0", 2, true},
		{[]string{"mlx5_0"}, nil, "mlx5_01", 1, false},
		{[]string{"mlx5_0:1", "rxe0"}, nil, "mlx5_0", 2, false},
		{[]string{"mlx5_0:1", "mlx5_0:2"}, nil, "mlx5_0", 2, true},
		{nil, []string{"mlx5_0:1"}, "mlx5_0", 1, false},
		{nil, []string{"mlx5_0:1"}, "mlx5_0", 2, true},
		{[]string{"mlx5_0"}, []string{"mlx5_0"}, "mlx5_0", 1, false},
		{[]string{"mlx5_*:2"}, nil, "mlx5_7", 2, true},
		{[]string{"mlx5_*:2"}, nil, "mlx5_7", 1, false},
		{[]string{"mlx5_*"}, []string{"mlx5_[01]"}, "mlx5_1", 1, false},
	} {
		cfg := Config{Devices: c.allow, Deny: c.deny}
		if got := cfg.Selects(c.device, c.port); got != c.want {
			t.Errorf("%v without %v: %s:%d is selected: %v", c.allow, c.deny, c.device, c.port, got)
		}
	}
	cfg := Config{Devices: []string{"mlx5_0:1", "mlx5_9", "rxe*:3", "bnxt*"}}
	if got := cfg.Missing([]string{"mlx5_0", "rxe0"}); !slices.Equal(got, []string{"mlx5_9", "bnxt*"}) {
		t.Errorf("missing are %q", got)
	}
}
