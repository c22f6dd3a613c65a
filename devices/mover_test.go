package devices

import (
	"context"
	"strings"
	"testing"

	"github.com/kvconn/kvconn/tcp"
)

// TestCopyNamesThePeer: tcp's slots serve transfers of many peers, so an error of a copy says whose bytes it had.
func TestCopyNamesThePeer(t *testing.T) {
	d, _, _ := cache(t, "block after block", 1, 1)
	for to, says := range map[tcp.Direction]string{tcp.FromDevice: "copies from the device for agent engine-a", tcp.ToDevice: "copies to the device for agent engine-a"} {
		s, err := d.Slot(context.Background(), 0, to, "engine-a")
		if err != nil {
			t.Fatal(err)
		}
		s.Copy([]tcp.Run{{Addr: 16, Len: 16}})
		if err := s.Wait(); err == nil || !strings.Contains(err.Error(), says) || !strings.Contains(err.Error(), "not registered") {
			t.Errorf("a copy from outside of the cache: %v", err)
		}
		s.Release()
	}
}
