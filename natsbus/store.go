package natsbus

import (
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

const (
	storePrefix = "kvconn-nats-"
	storeLock   = "lock"
)

// store is the folder for the embedded server's few files.
type store struct {
	dir  string
	lock *os.File // locked for as long as the process lives
}

// newStore makes a folder, and removes the folders of processes that were killed.
func newStore() (*store, error) {
	sweepStores(os.TempDir())
	var failure error
	for range 3 { // another process may sweep a folder between its making and its locking
		dir, err := os.MkdirTemp("", storePrefix)
		if err != nil {
			return nil, fmt.Errorf("embedded nats server: no folder for its state, set TMPDIR to one that can be written: %w", err)
		}
		lock, err := lockStore(dir, os.O_CREATE)
		if err == nil {
			return &store{dir, lock}, nil
		}
		_ = os.RemoveAll(dir)
		failure = err
	}
	return nil, fmt.Errorf("embedded nats server: its folder cannot be locked: %w", failure)
}

func (s *store) remove() error {
	err := os.RemoveAll(s.dir)
	s.lock.Close()
	return err
}

func lockStore(dir string, flag int) (*os.File, error) {
	f, err := os.OpenFile(filepath.Join(dir, storeLock), os.O_RDWR|flag, 0o600)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// sweepStores removes the folders whose lock no process holds. A folder without a lock
// file stays: another process is making it, or it is not ours.
func sweepStores(tmp string) {
	dirs, _ := filepath.Glob(filepath.Join(tmp, storePrefix+"*"))
	for _, dir := range dirs {
		if lock, err := lockStore(dir, 0); err == nil {
			_ = os.RemoveAll(dir)
			lock.Close()
		}
	}
}
