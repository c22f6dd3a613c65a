package natsbus

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/rig/leaktest"
)

// TestForgedTempFolder: anybody may make names in a host's temporary folder. What is planted
// there as a server's folder, or in one, gives a rank no secret, is not removed, and leads neither
// to another file nor into a wait.
func TestForgedTempFolder(t *testing.T) {
	leaktest.Check(t)
	tmp := t.TempDir()
	t.Setenv("TMPDIR", tmp)
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	put := func(path string) {
		t.Helper()
		must(os.WriteFile(path, []byte("planted"), 0o600))
	}
	// folder is like a server's, with a lock that nobody holds and a secret.
	folder := func(path string) string {
		t.Helper()
		must(os.Mkdir(path, 0o700))
		writeOwner(t, filepath.Join(path, storeLock), thisOwner())
		put(filepath.Join(path, storeJoin))
		return path
	}
	// pipe is one with a writer: who reads it gets the text, and then waits for more.
	var writers []*os.File
	pipe := func(path string) {
		t.Helper()
		_ = os.Remove(path)
		must(unix.Mkfifo(path, 0o600))
		f, err := os.OpenFile(path, os.O_RDWR, 0)
		must(err)
		t.Cleanup(func() { f.Close() })
		writers = append(writers, f)
		_, err = f.WriteString("planted")
		must(err)
	}
	// link puts a link in the place of a file.
	link := func(to, path string) {
		t.Helper()
		_ = os.Remove(path)
		must(os.Symlink(to, path))
	}
	elsewhere := folder(filepath.Join(tmp, "elsewhere"))
	plants := map[core.AgentID]func(dir string){
		"LINK":     func(dir string) { link(elsewhere, dir) },
		"PIPE":     pipe,
		"FILE":     put,
		"OPEN":     func(dir string) { must(os.Chmod(folder(dir), 0o777)) },
		"LINKED":   func(dir string) { link(filepath.Join(elsewhere, storeLock), filepath.Join(folder(dir), storeLock)) },
		"PIPED":    func(dir string) { pipe(filepath.Join(folder(dir), storeLock)) },
		"ANYBODYS": func(dir string) { must(os.Chown(folder(dir), 65534, 65534)) },
	}
	if os.Geteuid() != 0 {
		delete(plants, "ANYBODYS") // only root can make a folder of another user
	}
	for id, plant := range plants {
		plant(filepath.Join(tmp, storePrefix+string(id)))
	}
	// Beside a true server's lock: a secret that is a link or a pipe.
	held := map[core.AgentID]func(path string){
		"TRUE":    func(string) {},
		"LEADS":   func(path string) { link(filepath.Join(elsewhere, storeJoin), path) },
		"PIPES":   pipe,
		"NOTHING": func(path string) { must(os.Remove(path)) },
	}
	for id, plant := range held {
		dir := folder(filepath.Join(tmp, storePrefix+string(id)))
		lock, err := lockStore(dir, 0)
		must(err)
		t.Cleanup(func() { lock.Close() })
		plant(filepath.Join(dir, storeJoin))
	}
	sweepStores(t.Context(), tmp)
	for id := range plants {
		if _, err := os.Lstat(filepath.Join(tmp, storePrefix+string(id))); err != nil {
			t.Errorf("%s is removed: %v", id, err)
		}
	}
	for id := range held {
		if _, err := os.Lstat(filepath.Join(tmp, storePrefix+string(id))); err != nil {
			t.Errorf("%s, whose server lives, is removed: %v", id, err)
		}
	}
	// Whoever has read a pipe's text is let go, and would wait for more for as long as a writer is there.
	read, asked := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(read)
		for {
			select {
			case <-asked:
				return
			case <-time.After(time.Millisecond):
			}
			for _, f := range writers {
				if empty(f) {
					f.Close()
				}
			}
		}
	}()
	defer func() { close(asked); <-read }()
	for _, id := range []core.AgentID{"LINK", "PIPE", "FILE", "OPEN", "ANYBODYS", "LEADS", "PIPES", "NOTHING", "NOWHERE"} {
		if secret := localSecret(tmp, id); secret != "" {
			t.Errorf("%s gives the secret %q", id, secret)
		}
	}
	if secret := localSecret(tmp, "TRUE"); secret != "planted" {
		t.Errorf("a true folder gives the secret %q", secret)
	}
	// A lock is not made where a link leads.
	target := filepath.Join(tmp, "target")
	dir := filepath.Join(tmp, "dangling")
	must(os.Mkdir(dir, 0o700))
	link(target, filepath.Join(dir, storeLock))
	if lock, err := lockStore(dir, os.O_CREATE); err == nil {
		lock.Close()
		t.Error("a link is taken for a lock")
	}
	if _, err := os.Lstat(target); err == nil {
		t.Error("a file is made where a link leads")
	}
	if _, err := newStore("LINK"); err == nil { // whoever planted it is not to be the server's
		t.Error("a folder that was there is taken for a new one")
	}
}

// empty says whether a pipe holds no byte.
func empty(pipe *os.File) bool {
	conn, err := pipe.SyscallConn()
	if err != nil {
		return false
	}
	n := 1
	_ = conn.Control(func(fd uintptr) {
		if held, err := unix.IoctlGetInt(int(fd), unix.TIOCINQ); err == nil {
			n = held
		}
	})
	return n == 0
}
