package node

import (
	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/shmem"
)

// ownMemory is memory of kvconn's own, which stays although the engine frees it.
type ownMemory []*shmem.Memory

// holdOwnMemory keeps such memory that lies under a layout until release.
func holdOwnMemory(layout *kv.Layout) (all ownMemory, err error) {
	for i := range layout.Regions {
		r := &layout.Regions[i]
		if r.Memory != kv.HostMemory {
			continue
		}
		some, err := shmem.Hold(r.Base, r.Extent())
		if err != nil {
			all.release()
			return nil, err
		}
		all = append(all, some...)
	}
	return all, nil
}

func (all ownMemory) release() {
	for _, m := range all {
		m.Release()
	}
}
