package node

import (
	"encoding/json"
	"errors"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/kvconn/kvconn/core"
)

// FuzzConfig: any text is either refused with ErrInvalid, or a Config that
// passes its own check, that is the same after it was written and read again,
// and whose numbers are within their documented ranges.
func FuzzConfig(f *testing.F) {
	full, err := json.Marshal(testConfig(RoleBoth))
	if err != nil {
		f.Fatal(err)
	}
	f.Add(full)
	f.Add(full[:len(full)/2])
	for _, s := range []string{
		`{"engine_id":"e","role":"prefill"}`, `{"engine_id":"e","role":"decode","lease_s":0.5,"peer_timeout_s":3600,"tcp_streams":64}`,
		`{"engine_id":"e","role":"decode","lease_s":3601}`, `{"engine_id":"e","role":"decode","lease_s":1e300}`, `{"engine_id":"e","role":"decode","lease_s":-1e300}`, `{"engine_id":"e","role":"decode","lease_s":1.0000000001}`,
		`{"ENGINE_ID":"e","Role":"both","nats_url":"nats://h:1,h:2","nats_replicas":3}`, `{"engine_id":"e","role":"prefill","bootstrap_port":-1}`,
		`{"engine_id":"e","role":"prefill","bootstrap_port":99999999999999999999}`, `{"engine_id":"e","role":"prefill","max_transfers":65536,"nats_token":"a b"}`,
		`{"engine_id":"e","role":"decode","bootstrap_allow":["10.0.0.0/8","*.cluster.local","h"],"advertise_host":"::1"}`, `{"engine_id":"e","role":"both","advertise_host":"h:1"}`,
		`{"engine_id":"e","role":"both","nats_nkeys":["UA"]}`, `{"engine_id":"e","role":"both","tls_cert_file":"c","tls_key_file":"k"}`, `{"engine_id":"\ud800","role":"both"}`,
		`{"engine_id":"e","role":"both","transport":"rdma","rdma_devices":["mlx5_0","mlx5_1:2"],"rdma_deny":[],"rdma_gid_index":3,"rdma_qps":16,"rdma_idle_s":1.5}`,
		`{"engine_id":"e","role":"both","transport":"shm"}`, `{"engine_id":"e","role":"both","rdma_mtu":1500}`, `{"engine_id":"e","role":"both","rdma_timeout":0}`, `{"engine_id":"e","role":"both","rdma_idle_s":0.9}`,
		`{"engine_id":"e","role":"both","rdma_relaxed_ordering":"on","rdma_traffic_class":256}`, `{"engine_id":"e","role":"both","rdma_devices":["mlx5_0:0"]}`, `{"engine_id":"e","role":"both","rdma_deny":["\u0000"]}`,
		`{"engine_id":"e","role":"both"} x`, `{"engine_id":"e","role":"both","engine_id":"","x":1}`, `null`, `[]`, ``, `{"a":`, strings.Repeat(`[`, 20000),
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		c, err := ParseConfig(text)
		if err != nil {
			if !errors.Is(err, core.ErrInvalid) {
				t.Errorf("%q: %v is no ErrInvalid", text, err)
			}
			return
		}
		if err := c.Check(); err != nil {
			t.Fatalf("%q is accepted, but %v", text, err)
		}
		for _, s := range []Seconds{c.Lease, c.PeerTimeout, c.EarlyLoad, c.ConnectTimeout, c.StallTimeout, c.CloseTimeout} {
			if d := time.Duration(s); d < 500*time.Millisecond || d > time.Hour {
				t.Errorf("%q has a duration of %v", text, d)
			}
		}
		if c.MaxTransfers < 1 || c.MaxTransfers > 65536 || c.TCPStreams < 1 || c.TCPStreams > 64 || c.EngineID == "" || len(c.EngineID) > 256 {
			t.Errorf("%q is accepted: %+v", text, c)
		}
		for key, v := range map[string][3]int{"rdma_gid_index": {c.RDMAGIDIndex, -1, 255}, "rdma_qps": {c.RDMAQPs, 1, 16}, "rdma_send_depth": {c.RDMASendDepth, 16, 16384},
			"rdma_mtu": {c.RDMAMTU, 0, 4096}, "rdma_timeout": {c.RDMATimeout, 1, 21}, "rdma_retry": {c.RDMARetry, 0, 7}, "rdma_rnr_retry": {c.RDMARNRRetry, 0, 7},
			"rdma_min_rnr_timer": {c.RDMAMinRNRTimer, 0, 31}, "rdma_traffic_class": {c.RDMATrafficClass, 0, 255}, "rdma_service_level": {c.RDMAServiceLevel, 0, 15},
			"rdma_pkey_index": {c.RDMAPKeyIndex, 0, 65535}} {
			if v[0] < v[1] || v[0] > v[2] {
				t.Errorf("%q has %s %d, want %d to %d", text, key, v[0], v[1], v[2])
			}
		}
		if d := time.Duration(c.RDMAIdle); d < time.Second || d > time.Hour {
			t.Errorf("%q has rdma_idle_s %v", text, d)
		}
		again, err := json.Marshal(c)
		if err != nil {
			t.Fatalf("%+v is not written: %v", c, err)
		}
		c2, err := ParseConfig(again)
		if err != nil {
			t.Fatalf("%q becomes %s: %v", text, again, err)
		}
		for _, list := range []*[]string{&c.NATSNKeys, &c.BootstrapAllow, &c.RDMADevices, &c.RDMADeny, &c2.NATSNKeys, &c2.BootstrapAllow, &c2.RDMADevices, &c2.RDMADeny} {
			if len(*list) == 0 { // [] and null are alike
				*list = nil
			}
		}
		if !reflect.DeepEqual(c, c2) {
			t.Errorf("%q is %+v, and then %+v", text, c, c2)
		}
	})
}
