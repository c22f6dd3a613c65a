// Memory that kvconn has allocated is a file of the kernel, so P hands it out by its descriptor.

package local

import (
	"sync"

	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/shmem"
)

// fileSpace is the space of all memory files of a P.
const fileSpace = 1

// files are the memories under a layout's regions that kvconn has allocated. They stay until release.
func files(l *kv.Layout) (list []memory, release func(), err error) {
	var held []*shmem.Memory
	release = sync.OnceFunc(func() {
		for _, m := range held {
			m.Release()
		}
	})
	seen := map[*shmem.Memory]bool{}
	for i := range l.Regions {
		r := &l.Regions[i]
		if r.Memory != kv.HostMemory {
			continue
		}
		some, err := shmem.Hold(r.Base, r.Extent())
		if err != nil {
			release()
			return nil, nil, err
		}
		held = append(held, some...)
		for _, m := range some {
			if !seen[m] {
				seen[m] = true
				list = append(list, memory{space: fileSpace, kind: memoryFile, base: m.Base(), size: m.Size(), handle: make([]byte, 8), open: m.File})
			}
		}
	}
	return list, release, nil
}
