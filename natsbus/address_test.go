package natsbus

import (
	"strings"
	"testing"
)

// One address has one spelling, or each would be a connection of its own.
func TestAddressesHaveOneSpelling(t *testing.T) {
	for _, in := range []string{"http://h.example:8998", "http://H.Example:8998/", "http://h.example:08998", "http://h.EXAMPLE:000008998//"} {
		if a, err := ParseAddress(in); err != nil || a.String() != "http://h.example:8998" || a.Name != "h.example" {
			t.Errorf("%s: %+v, %v", in, a, err)
		}
	}
	if a, err := ParseAddress("https://[FE80::1%25Eth0]:1"); err != nil || a.String() != "https://[fe80::1%Eth0]:1" || a.Name != "fe80::1%Eth0" {
		t.Errorf("%+v, %v", a, err)
	}
	for _, in := range []string{"http://h:0", "http://h:65536", "http://h:99999999999999999999", "http://h:-1"} {
		if a, err := ParseAddress(in); err == nil {
			t.Errorf("%s: %+v", in, a)
		}
	}
}

// TestClusterNamesHoldNoSecret: a cluster's users and passwords stand in no log line and no error.
func TestClusterNamesHoldNoSecret(t *testing.T) {
	if name, err := CheckCluster("nats://s3cret@h:4222, tls://u:s3cret@h2:4222"); err != nil || name != "NATS cluster nats://h:4222,tls://h2:4222" {
		t.Errorf("%q, %v", name, err)
	}
	for _, urls := range []string{"http://u:s3cret@h:4222", "nats://h:1,http://s3cret@h:4222", "nats://s3cret@[::1"} {
		if _, err := CheckCluster(urls); err == nil || strings.Contains(err.Error(), "s3cret") {
			t.Errorf("%v", err)
		}
	}
}
