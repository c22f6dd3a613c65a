// The folders of killed agents are found and removed.

package natsbus

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"time"

	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/kvconn/kvconn/internal/fault"
)

// newFor is how long a folder may have the ending storeNew before it counts as one that a killed process has left.
const newFor = time.Hour

// A process that is killed cannot remove its server's folder. So each agent of the same user looks for such folders, at once and then
// at growing intervals.
const (
	sweepAtMost = time.Hour // much less than silentFor
	sweepNames  = 256       // names that are read at a time; Close ends a round between two reads
	sweepStored = 64        // folders of killed agents after which a round ends
)

// sweep runs until Close.
func (b *Bus) sweep() {
	for wait := b.opt.sweep; ; wait = min(2*wait, sweepAtMost) {
		if b.opt.Server != nil {
			b.opt.Server.store.touch()
		}
		if n := sweepStores(b.ctx, b.temp); n > 0 {
			b.log.Info("folders of killed agents are removed", zap.Int("folders", n), zap.String("from", b.temp))
		}
		if pause(b.ctx, wait) != nil || fault.On("bus-sweeps-once") {
			return
		}
	}
}

// sweepStores removes the folders of processes that have ended, and returns how many it has removed. A folder
// without a lock file stays, since kvconn has not made it.
func sweepStores(ctx context.Context, tmp string) (removed int) {
	folder, err := os.Open(tmp)
	if err != nil {
		return 0 // an agent that needs the folder says so
	}
	defer folder.Close()
	for removed < sweepStored && ctx.Err() == nil {
		names, err := folder.Readdirnames(sweepNames)
		for _, name := range names {
			owner, named := strings.CutPrefix(name, storePrefix)
			owner = strings.TrimSuffix(strings.TrimSuffix(owner, storeNew), storeGone)
			if named && legalID(owner) && sweepStore(filepath.Join(tmp, name)) {
				removed++
			}
		}
		if err != nil {
			break
		}
	}
	return removed
}

// sweepStore removes a folder if it is this user's and its owner has ended, and says whether it has removed it.
func sweepStore(dir string) bool {
	if !isOurs(dir) {
		return false
	}
	switch filepath.Ext(dir) {
	case storeNew: // a folder that is younger than newFor may be one that another process is making
		st, err := os.Lstat(dir)
		return err == nil && time.Since(st.ModTime()) > newFor && os.RemoveAll(dir) == nil
	case storeGone:
		return os.RemoveAll(dir) == nil
	}
	lock, err := openPlain(filepath.Join(dir, storeLock), os.O_RDWR)
	if err != nil {
		return false
	}
	defer lock.Close()
	held := unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB) != nil
	owner, err := readOwner(lock)
	return err == nil && owner.ended(lock, held) && removeStore(dir, lock) == nil
}
