package natsbus

import (
	"context"
	"errors"
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
	sweepStored = 64  // folders that are tried in one round
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
	for tried := 0; tried < sweepStored && ctx.Err() == nil; {
		names, err := folder.Readdirnames(sweepNames)
		for _, name := range names {
			owner, named := strings.CutPrefix(name, storePrefix)
			if !named || !legalID(strings.TrimSuffix(owner, storeNew)) {
				continue
			}
			if gone, ours := sweepStore(filepath.Join(tmp, name)); gone {
				removed, tried = removed+1, tried+1
			} else if ours {
				tried++
			}
		}
		if err != nil {
			break
		}
	}
	return removed
}

// sweepStore removes one of this user's, if it may.
func sweepStore(dir string) (gone, own bool) {
	if !isOurs(dir) {
		return false, false
	}
	if strings.HasSuffix(dir, storeNew) { // else another process is making it
		st, err := os.Lstat(dir)
		return err == nil && time.Since(st.ModTime()) > newFor && os.RemoveAll(dir) == nil, true
	}
	lock, err := lockStore(dir, 0)
	if err != nil {
		return false, !errors.Is(err, os.ErrNotExist)
	}
	defer lock.Close()
	return removeStore(dir) == nil, true
}
