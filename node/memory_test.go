package node

import (
	"errors"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/rig/leaktest"
)

// mapped is a cache whose pages are its own.
func mapped() ([]byte, error) {
	return unix.Mmap(-1, 0, layers*numBlocks*blockBytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
}

// TestMemoryIsCheckedAtRegister: an agent that could never read its caches, or never write
// what it loads, says so before a request depends on it.
func TestMemoryIsCheckedAtRegister(t *testing.T) {
	leaktest.Check(t)
	for _, c := range []struct {
		role string
		prot int
		says string // "": taken
	}{
		{RolePrefill, unix.PROT_READ, ""},
		{RolePrefill, unix.PROT_NONE, "not readable"},
		{RoleDecode, unix.PROT_READ, "not writable"},
		{RoleDecode, unix.PROT_NONE, "not readable"},
		{RoleBoth, unix.PROT_READ, "not writable"},
	} {
		cache, err := mapped()
		if err != nil {
			t.Fatal(err)
		}
		const from = (numBlocks + 5) * blockBytes // block 5 of layer 1
		if err := unix.Mprotect(cache[from:from+blockBytes], c.prot); err != nil {
			t.Fatal(err)
		}
		a, err := Open(testConfig(c.role), Options{})
		if err != nil {
			t.Fatal(err)
		}
		err = a.RegisterKVCaches(regions(cache))
		if c.says == "" && err != nil {
			t.Errorf("%s: %v", c.role, err)
		}
		if c.says != "" {
			if !errors.Is(err, core.ErrInvalid) || !strings.Contains(err.Error(), c.says) || !strings.Contains(err.Error(), `region "layer.1"`) || !strings.Contains(err.Error(), "block 5 of 32") {
				t.Errorf("%s: %v, want that layer.1 is %s", c.role, err, c.says)
			}
			if err := unix.Mprotect(cache, unix.PROT_READ|unix.PROT_WRITE); err != nil {
				t.Fatal(err)
			}
			if err := a.RegisterKVCaches(regions(cache)); err != nil { // nothing of the first try is left
				t.Errorf("%s, mended: %v", c.role, err)
			}
		}
		_ = a.Close()
		_ = unix.Munmap(cache)
	}
}

// TestMemoryThatGoes: the memory was right at register and is not any more. The transfer
// fails on both sides by the region's name, be it in this process or in the peer's, and
// the next one ends well.
func TestMemoryThatGoes(t *testing.T) {
	leaktest.Check(t)
	t.Setenv("KVCONN_TEST_SPOIL", "1")
	t.Run("the prefill engine's", func(t *testing.T) {
		byEach(t, func(t *testing.T, transport, by string) {
			t.Setenv("KVCONN_TEST_TRANSPORT", transport)
			address, _ := prefillProcess(t, 0, "")
			d := open(t, forced(RoleDecode, transport))
			d.load("offered", address, 3, 4)
			d.want("offered", core.Failed, map[string][]string{
				viaTCP:   {`region "layer.0" cannot be read`, "not readable"},
				viaLocal: {`region "layer.0" of prefill agent`, "cannot be read", "not mapped any more"},
			}[by]...)
		})
	})
	t.Run("the decode engine's", func(t *testing.T) {
		byEach(t, func(t *testing.T, transport, by string) {
			t.Setenv("KVCONN_TEST_TRANSPORT", transport)
			p := open(t, forced(RolePrefill, transport))
			p.offer("loaded", 3)
			p.offer("good", 3, 4)
			decodeProcess(t, p.BootstrapAddress())
			if r := p.want("loaded", core.Failed, `region "layer.0" cannot be written`); r.Transport != by {
				t.Errorf("%+v went by another transport", r)
			}
			d := open(t, forced(RoleDecode, transport))
			d.load("good", p.BootstrapAddress(), 7, 8)
			d.want("good", core.OK)
			p.want("good", core.OK)
			same(t, p, []kv.BlockID{3, 4}, d, []kv.BlockID{7, 8})
		})
	})
}
