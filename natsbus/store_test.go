package natsbus

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/rig/leaktest"
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
	unlocked := filepath.Join(tmp, storePrefix+"without-a-lock")
	if err := os.Mkdir(unlocked, 0o700); err != nil {
		t.Fatal(err)
	}
	making, begun := filepath.Join(tmp, storePrefix+"MAKING"+storeNew), filepath.Join(tmp, storePrefix+"BEGUN"+storeNew)
	for _, dir := range []string{making, begun} {
		if err := os.Mkdir(dir, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	long := time.Now().Add(-2 * newFor)
	if err := os.Chtimes(begun, long, long); err != nil {
		t.Fatal(err)
	}
	removing := filepath.Join(tmp, storePrefix+"REMOVING"+storeGone)
	if err := os.MkdirAll(filepath.Join(removing, "of", "the", "server's"), 0o700); err != nil {
		t.Fatal(err)
	}
	// As it looks to this host where locks are not shared.
	of := map[string]string{"ELSEWHERE": "another's", "NOWHERE": "", "SILENT": "another's", "SILENT-HELD": "another's", "STRANGE": ""}
	others := map[string]string{}
	for name, boot := range of {
		other, err := newStore(core.AgentID(name))
		if err != nil {
			t.Fatal(err)
		}
		others[name] = other.dir
		lock := filepath.Join(other.dir, storeLock)
		o := thisOwner()
		o.Boot = boot
		writeOwner(t, lock, o)
		if name == "STRANGE" { // of no version that is known
			err = os.WriteFile(lock, []byte("what is not known"), 0o600)
		}
		if strings.HasPrefix(name, "S") {
			past := time.Now().Add(-silentFor - time.Hour)
			err = errors.Join(err, os.Chtimes(lock, past, past))
		}
		if err != nil {
			t.Fatal(err)
		}
		if name != "SILENT-HELD" {
			other.lock.Close()
		} else {
			defer other.lock.Close()
		}
	}
	if n := sweepStores(t.Context(), tmp); n != 4 {
		t.Errorf("%d folders are removed, want 4", n)
	}
	next, err := newStore("NEXT")
	if err != nil {
		t.Fatal(err)
	}
	for dir, want := range map[string]bool{living.dir: true, killed.dir: false, unlocked: true, making: true, begun: false, removing: false,
		others["ELSEWHERE"]: true, others["NOWHERE"]: true, others["SILENT"]: false, others["SILENT-HELD"]: true, others["STRANGE"]: true, next.dir: true} {
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

// TestStoreInTheMaking: a process that removes the folders of killed ones takes none that another process is making.
func TestStoreInTheMaking(t *testing.T) {
	leaktest.Check(t)
	tmp := t.TempDir()
	t.Setenv("TMPDIR", tmp)
	done, swept := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(swept)
		for {
			select {
			case <-done:
				return
			default:
				sweepStores(t.Context(), tmp)
			}
		}
	}()
	for i := range 500 {
		s, err := newStore(core.AgentID(fmt.Sprint("A", i)))
		if err != nil {
			t.Error(err)
			break
		}
		_, err = s.secret()
		if err := errors.Join(err, s.remove()); err != nil {
			t.Error(err)
			break
		}
	}
	close(done)
	<-swept
}
