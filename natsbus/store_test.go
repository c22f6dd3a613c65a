package natsbus

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/kvconn/kvconn/internal/leaktest"
)

// TestStoresOfKilledProcessesAreRemoved: a killed process leaves a folder whose
// lock nobody holds any more; the folder of a living process must stay.
func TestStoresOfKilledProcessesAreRemoved(t *testing.T) {
	leaktest.Check(t)
	tmp := t.TempDir()
	t.Setenv("TMPDIR", tmp)
	living, err := newStore("LIVING")
	if err != nil {
		t.Fatal(err)
	}
	killed, err := newStore("KILLED")
	if err != nil {
		t.Fatal(err)
	}
	killed.lock.Close() // as the kernel does for a killed process
	strange := filepath.Join(tmp, storePrefix+"without-a-lock")
	if err := os.Mkdir(strange, 0o700); err != nil {
		t.Fatal(err)
	}
	next, err := newStore("NEXT")
	if err != nil {
		t.Fatal(err)
	}
	for dir, want := range map[string]bool{living.dir: true, killed.dir: false, strange: true, next.dir: true} {
		if _, err := os.Stat(dir); (err == nil) != want {
			t.Errorf("%s: there %v, want %v", dir, err == nil, want)
		}
	}
	for _, s := range []*store{living, next} {
		if err := s.remove(); err != nil {
			t.Error(err)
		}
	}
}
