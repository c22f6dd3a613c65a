package gpuhost

import (
	"fmt"
	"io/fs"
	"slices"

	"github.com/kvconn/kvconn/rdma"
)

// Card is an RDMA device, how far it is from a GPU, and whether it reaches the GPU's memory.
type Card struct {
	Name     string `json:"name"`
	Distance string `json:"distance"`
	By       string `json:"by,omitempty"`      // how the GPU's memory is registered on it: "dma-buf", or a kernel module
	Problem  string `json:"problem,omitempty"` // why it is not
	Taken    bool   `json:"taken"`             // transfers of the GPU's memory go by it: no card that reaches the memory is nearer

	order  int
	place  rdma.Place
	report *rdma.DeviceReport // nil: libibverbs does not show it
}

// cardsOf are the RDMA devices of the system, and what libibverbs says of each.
func cardsOf(sys fs.FS, report rdma.Report) (cards []Card) {
	entries, _ := fs.ReadDir(sys, "class/infiniband")
	for _, e := range entries {
		at, err := rdma.CardPlace(sys, e.Name())
		if err != nil {
			continue
		}
		c := Card{Name: e.Name(), place: at}
		if i := slices.IndexFunc(report.Devices, func(d rdma.DeviceReport) bool { return d.Name == c.Name }); i >= 0 {
			c.report = &report.Devices[i]
		}
		cards = append(cards, c)
	}
	return cards
}

// unused says why the transport does not use the card, whatever memory there is.
func (c *Card) unused() string {
	switch {
	case c.report == nil:
		return "libibverbs does not show it"
	case c.report.Problem != "":
		return "it cannot be used, see above"
	case !c.report.Selected:
		return "rdma_devices and rdma_deny leave it out"
	case !slices.ContainsFunc(c.report.Ports, func(p rdma.PortReport) bool { return p.Usable }):
		return "no port of it can be used, see above"
	}
	return ""
}

// registers says how the card registers the GPU's memory, or why it does not. The transport tries a dma-buf first.
func (c *Card) registers(d *Device, peermem string) (by, problem string) {
	problem = c.unused()
	switch {
	case problem != "":
	case !d.RDMA:
		problem = "the GPU has no GPUDirect RDMA"
	case d.DMABuf && c.report.DMABuf:
		by = "dma-buf"
	case peermem != "":
		by = peermem
	case !d.DMABuf:
		problem = "the GPU exports no dma-buf"
	default:
		problem = "it registers no dma-buf"
	}
	return by, problem
}

// take marks the cards by which the GPU's transfers go. Cards are in order, the nearest first.
func take(cards []Card) {
	first := slices.IndexFunc(cards, func(c Card) bool { return c.By != "" })
	for i := range cards {
		cards[i].Taken = cards[i].By != "" && cards[i].order == cards[first].order
	}
}

// nearest is the card by which the GPU's transfers go, else the nearest one; nil: there is none.
func (d *Device) nearest() *Card {
	for i := range d.Cards {
		if d.Cards[i].Taken {
			return &d.Cards[i]
		}
	}
	if len(d.Cards) > 0 {
		return &d.Cards[0]
	}
	return nil
}

// noDMABuf is the remedy for a card that can be used, and takes no GPU's memory.
func (c *Card) noDMABuf(peermem string) string {
	if c.unused() != "" || c.report.DMABuf || peermem != "" {
		return ""
	}
	return fmt.Sprintf("RDMA device %s takes no GPU's memory: %s; and nvidia-peermem is not loaded: modprobe nvidia-peermem, or update the card's driver and the kernel "+
		"(irdma and bnxt_re register dma-bufs from Linux 6.12 on, a soft device never); with transport rdma leave the device out (rdma_deny)", c.Name, c.report.NoDMABuf)
}
