package natsbus

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/kvconn/kvconn/core"
)

const (
	storePrefix = "kvconn-nats-"
	storeLock   = "lock"
	storeJoin   = "join" // the file with the secret of local ranks, see localSecret
)

// store is the folder for the embedded server's few files.
type store struct {
	dir  string
	lock *os.File // locked for as long as the process lives
}

// newStore makes a folder for the server of an agent, and removes the folders of processes
// that were killed.
func newStore(owner core.AgentID) (*store, error) {
	sweepStores(os.TempDir())
	var failure error
	for range 3 { // another process may sweep a folder between its making and its locking
		dir := filepath.Join(os.TempDir(), storePrefix+string(owner))
		err := os.Mkdir(dir, 0o700)
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

// secret makes the secret of local ranks.
func (s *store) secret() (string, error) {
	secret := randomName()
	if err := os.WriteFile(filepath.Join(s.dir, storeJoin), []byte(secret), 0o600); err != nil {
		return "", fmt.Errorf("embedded nats server: the secret for ranks on this host: %w", err)
	}
	return secret, nil
}

func (s *store) remove() error {
	err := os.RemoveAll(s.dir)
	s.lock.Close()
	return err
}

func lockStore(dir string, flag int) (*os.File, error) {
	f, err := os.OpenFile(filepath.Join(dir, storeLock), os.O_RDWR|unix.O_NOFOLLOW|flag, 0o600)
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
		if !ours(dir) {
			continue
		}
		if lock, err := lockStore(dir, 0); err == nil {
			_ = os.RemoveAll(dir)
			lock.Close()
		}
	}
}

// localSecret reads the secret that a server on this host keeps for the ranks of its
// engine: processes of the same user. The folder's name names the server.
func localSecret(server core.AgentID) string {
	dir := filepath.Join(os.TempDir(), storePrefix+string(server))
	if !ours(dir) {
		return ""
	}
	b, err := os.ReadFile(filepath.Join(dir, storeJoin))
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(b))
}

// ours says whether a folder is this user's, and nobody else may enter it.
func ours(dir string) bool {
	st, err := os.Lstat(dir)
	if err != nil || !st.IsDir() || st.Mode().Perm()&0o077 != 0 {
		return false
	}
	sys, ok := st.Sys().(*syscall.Stat_t)
	return ok && int(sys.Uid) == os.Geteuid()
}
