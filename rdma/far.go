package rdma

import (
	"errors"
	"fmt"
)

// far is what D has said of itself. It does not change.
type far struct {
	secret  []byte
	ports   map[int]*portInfo
	tables  map[int]*keyTable // by port, as the next
	scratch map[int]keyInfo
}

// newFar checks what D says of itself.
func newFar(rep *reply) (*far, error) {
	if len(rep.Secret) != secretSize {
		return nil, fmt.Errorf("a secret of %d bytes, want %d", len(rep.Secret), secretSize)
	}
	f := &far{secret: rep.Secret, ports: map[int]*portInfo{}, tables: map[int]*keyTable{}, scratch: map[int]keyInfo{}}
	regions := make([]memRange, len(rep.Regions))
	for i, r := range rep.Regions {
		regions[i] = memRange(r)
	}
	tables := make([]*keyTable, len(rep.Devices))
	for i, d := range rep.Devices {
		keys := make([]keyRange, len(d.Keys))
		for k, key := range d.Keys {
			keys[k] = keyRange{memRange{key.Base, key.Length}, key.Key}
		}
		if d.Scratch.Length < scratchBytes {
			return nil, fmt.Errorf("device %d of the peer has %d bytes for probes, want %d", i, d.Scratch.Length, scratchBytes)
		}
		var err error
		if tables[i], err = newKeyTable("at the peer", regions, keys); err != nil {
			return nil, err
		}
	}
	for i := range rep.Ports {
		p := &rep.Ports[i]
		if p.Device < 0 || p.Device >= len(tables) || f.ports[p.Index] != nil {
			return nil, fmt.Errorf("port %q is of device %d of %d, or listed twice", p.Name, p.Device, len(tables))
		}
		f.ports[p.Index], f.tables[p.Index], f.scratch[p.Index] = p, tables[p.Device], rep.Devices[p.Device].Scratch
	}
	if len(f.ports) == 0 {
		return nil, errors.New("no port of the peer is active")
	}
	return f, nil
}
