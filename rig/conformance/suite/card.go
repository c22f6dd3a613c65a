package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/rig/coretest"
)

// cardReaches says why no card of this machine takes the first GPU's memory, or why its trials with that memory do not get their bytes
// through: then kvconn goes by tcp. It opens a transport to itself for that.
func cardReaches() error {
	const bytes = 1 << 20
	k := kind{transport: "rdma", device: coretest.Device{}}
	var agents [2]core.Signaller
	ids := [2]core.AgentID{"sender", "receiver"}
	signal := func(from core.AgentID) core.Signal {
		return func(ctx context.Context, to core.AgentID, msg []byte) ([]byte, error) {
			for i, id := range ids {
				if id == to && agents[i] != nil && ctx.Err() == nil {
					return agents[i].Signalled(from, msg)
				}
			}
			return nil, fmt.Errorf("%s: %w", to, core.ErrAbsent)
		}
	}
	for i, id := range ids {
		region := kv.Region{Name: "trial", Base: gpus[0]().NewDeviceMemory(bytes).Address(), BlockStride: bytes, BlockBytes: bytes, NumBlocks: 1}
		l, err := kv.NewLayout([]kv.Region{region})
		if err != nil {
			return err
		}
		tr, err := k.open(id, l, nobody{}, signal(id))
		if err != nil {
			return err
		}
		defer tr.Close()
		agents[i] = tr.(core.Signaller)
	}
	ticket, err := agents[0].Admit(ids[1])
	if err == nil {
		err = agents[1].Connect(ids[0], agents[0].Endpoint(), ticket)
	}
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeoutCause(context.Background(), 30*time.Second, errors.New("the trials have not ended within 30 s"))
	defer cancel()
	return agents[1].Usable(ctx, ids[0])
}

// nobody hears what becomes of no transfers.
type nobody struct{}

func (nobody) Received(core.TransferID, core.TransferStats, error) {}
func (nobody) Written(core.TransferID, core.TransferStats, error)  {}
func (nobody) PeerDown(core.AgentID, error)                        {}
