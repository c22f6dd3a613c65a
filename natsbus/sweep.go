package natsbus

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"time"

	"go.uber.org/zap"

	"github.com/kvconn/kvconn/internal/fault"
)

// newFor is how long a folder may lack its name before it counts as a killed process's.
const newFor = time.Hour

// A process that is killed cannot remove its server's folder. So each agent of the same user looks for such folders, at once and then at
// growing distances.
const (
	sweepAtMost = time.Hour
	sweepNames  = 256 // read at a time; between these Close ends it
	sweepStored = 64  // folders of killed agents after which a round ends
)

// sweep runs until Close.
func (b *Bus) sweep() {
	for wait := b.opt.sweep; ; wait = min(2*wait, sweepAtMost) {
		if n := sweepStores(b.ctx, b.temp); n > 0 {
			b.log.Info("folders of killed agents are removed", zap.Int("folders", n), zap.String("from", b.temp))
		}
		if pause(b.ctx, wait) != nil || fault.On("bus-sweeps-once") {
			return
		}
	}
}

// sweepStores removes the folders whose lock no process holds, and says how many. A folder without a lock
// file stays: it is not ours.
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

// sweepStore removes one of this user's, if it may.
func sweepStore(dir string) bool {
	if !isOurs(dir) {
		return false
	}
	switch filepath.Ext(dir) {
	case storeNew: // else another process is making it
		st, err := os.Lstat(dir)
		return err == nil && time.Since(st.ModTime()) > newFor && os.RemoveAll(dir) == nil
	case storeGone:
		return os.RemoveAll(dir) == nil
	}
	lock, err := lockStore(dir, 0)
	if err != nil {
		return false
	}
	if !ofThisHost(lock) {
		lock.Close()
		return false
	}
	return removeStore(dir, lock) == nil
}
