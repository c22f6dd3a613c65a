// The embedded server's folder is locked by its process, and has the secret by which ranks of this host join.

package natsbus

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/internal/fault"
	"github.com/kvconn/kvconn/internal/hostenv"
)

const (
	storePrefix = "kvconn-nats-"
	storeNew    = ".new"  // the end of its name until it is locked
	storeGone   = ".gone" // the end of its name while it is removed
	storeLock   = "lock"
	storeJoin   = "join" // the file with the secret of local ranks, see localSecret
)

// store is the folder that the embedded server must have, though it keeps all in memory, and that has the secret of local ranks.
type store struct {
	dir  string
	lock *os.File // locked for as long as the process lives, or a child that it has forked; nil: the folder is removed
}

// newStore makes a folder for the server of an agent. It has its name when it is locked: else another process might take it for a
// killed one's.
func newStore(owner core.AgentID) (*store, error) {
	dir := filepath.Join(hostenv.TempDir(), storePrefix+string(owner))
	unnamed := dir + storeNew
	if err := os.Mkdir(unnamed, 0o700); err != nil {
		return nil, fmt.Errorf("embedded nats server: no folder for its state, set TMPDIR to one that can be written: %w", err)
	}
	lock, err := lockStore(unnamed, os.O_CREATE)
	if err == nil {
		if err = json.NewEncoder(lock).Encode(thisOwner()); err == nil {
			err = os.Rename(unnamed, dir)
		}
		if err == nil {
			return &store{dir, lock}, nil
		}
		lock.Close()
	}
	_ = os.RemoveAll(unnamed)
	return nil, fmt.Errorf("embedded nats server: no locked folder for its state: %w", err)
}

// secret makes the secret of local ranks.
func (s *store) secret() (string, error) {
	secret := randomName()
	if err := os.WriteFile(filepath.Join(s.dir, storeJoin), []byte(secret), 0o600); err != nil {
		return "", fmt.Errorf("embedded nats server: the secret for ranks on this host: %w", err)
	}
	return secret, nil
}

// touch says that the owner lives, by the times of the folder and its files. So a process of another host knows it, and what removes old
// files from temporary folders leaves these.
func (s *store) touch() {
	if !isOurs(s.dir) || fault.On("bus-owner-silent") {
		return // it is removed, and anybody may have put something in its place
	}
	for _, path := range []string{s.dir, filepath.Join(s.dir, storeLock), filepath.Join(s.dir, storeJoin)} {
		_ = unix.UtimesNanoAt(unix.AT_FDCWD, path, nil, unix.AT_SYMLINK_NOFOLLOW) // Close may remove it meanwhile
	}
}

// remove removes the folder. It may be called again.
func (s *store) remove() error {
	lock := s.lock
	if lock == nil {
		return nil
	}
	s.lock = nil
	return removeStore(s.dir, lock)
}

// removeStore removes a folder whose lock this process has, or whose owner has ended, and gives the lock up. A folder that is gone already
// is no error. removeStore first renames the folder: so it does not touch what somebody else puts in its place, and if this process is
// killed meanwhile, any agent removes the rest. It closes the lock before it removes the lock's file, since some file systems, such as NFS, keep a file in the folder
// as long as it is open.
func removeStore(dir string, lock *os.File) error {
	gone := dir + storeGone
	err := os.RemoveAll(gone)
	if err == nil {
		err = os.Rename(dir, gone)
	}
	lock.Close()
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return err
	}
	return os.RemoveAll(gone)
}

func lockStore(dir string, flag int) (*os.File, error) {
	f, err := openPlain(filepath.Join(dir, storeLock), os.O_RDWR|flag)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// openPlain opens a file. It follows no link and waits for no other end of a pipe.
func openPlain(path string, flag int) (*os.File, error) {
	follow := unix.O_NOFOLLOW
	if fault.On("bus-store-follows") {
		follow = 0
	}
	f, err := os.OpenFile(path, flag|follow|unix.O_NONBLOCK, 0o600)
	if err != nil {
		return nil, err
	}
	st, err := f.Stat()
	if err == nil && !st.Mode().IsRegular() && !fault.On("bus-store-pipe") {
		err = fmt.Errorf("%s is no regular file: its mode is %v", path, st.Mode())
	}
	if err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// localSecret reads the secret that a server on this host keeps for the ranks of its
// engine: processes of the same user. The folder's name names the server.
func localSecret(temp string, server core.AgentID) string {
	dir := filepath.Join(temp, storePrefix+string(server))
	if !isOurs(dir) {
		return ""
	}
	f, err := openPlain(filepath.Join(dir, storeJoin), os.O_RDONLY)
	if err != nil {
		return ""
	}
	defer f.Close()
	secret, err := io.ReadAll(io.LimitReader(f, maxHandshakeLine)) // which is longer than any
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(secret))
}

// isOurs says whether a folder belongs to this user and no other user may enter it.
func isOurs(dir string) bool {
	stat := os.Lstat
	if fault.On("bus-store-link") {
		stat = os.Stat
	}
	st, err := stat(dir)
	if err != nil || !st.IsDir() || st.Mode().Perm()&0o077 != 0 && !fault.On("bus-store-open") {
		return false
	}
	sys, ok := st.Sys().(*syscall.Stat_t)
	return ok && (int(sys.Uid) == os.Geteuid() || fault.On("bus-store-anybodys"))
}
