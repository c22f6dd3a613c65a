// A small file system can be filled up, so that the engines find no room for their files.

package chaos

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"

	"golang.org/x/sys/unix"
)

// diskBytes is the size of the small disk.
const diskBytes = 4 << 20

// disk is where the engines keep their temporary files: if mounting is permitted, a small
// file system that can be filled up. No path leads to it but the open folder, so that it
// goes with the processes, however they end.
type disk struct {
	root   *os.File
	path   string
	reason string // why it cannot be filled
	plain  string // a folder of the system's instead

	mu   sync.Mutex
	fill *os.File
}

func newDisk() (*disk, error) {
	dir, err := os.MkdirTemp("", "kvconn-chaos-")
	if err != nil {
		return nil, err
	}
	if err := unix.Mount("tmpfs", dir, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, fmt.Sprintf("size=%d,mode=700", diskBytes)); err != nil {
		return &disk{path: dir, plain: dir, reason: "a small file system cannot be mounted: " + err.Error()}, nil
	}
	root, err := os.Open(dir)
	err = errors.Join(err, unix.Unmount(dir, unix.MNT_DETACH), os.Remove(dir))
	if err != nil {
		return nil, fmt.Errorf("small file system: %w", err)
	}
	return &disk{root: root, path: fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), root.Fd())}, nil
}

// folder makes a folder on the disk.
func (d *disk) folder(name string) (string, error) {
	path := filepath.Join(d.path, name)
	return path, os.Mkdir(path, 0o700)
}

// fillUp leaves no room; d.reason is empty.
func (d *disk) fillUp() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.fill != nil {
		return nil
	}
	f, err := os.OpenFile(filepath.Join(d.path, "fill"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return err
	}
	d.fill = f
	for page := make([]byte, 4<<10); ; {
		if _, err := f.Write(page); err != nil {
			if errors.Is(err, unix.ENOSPC) {
				return nil
			}
			return err
		}
	}
}

// empty makes room again.
func (d *disk) empty() {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.fill != nil {
		_ = os.Remove(filepath.Join(d.path, "fill"))
		_ = d.fill.Close()
		d.fill = nil
	}
}

func (d *disk) close() {
	d.empty()
	if d.root != nil {
		_ = d.root.Close()
	}
	if d.plain != "" {
		_ = os.RemoveAll(d.plain)
	}
}
