package rdma

import "io/fs"

// Place is where a device is, for kvconn doctor: its NUMA node, or -1, and the PCI functions that lead to it, from the root
// complex down.
type Place = place

// CardPlace is where an RDMA device is, as the transport sees it; sys is the root of /sys.
func CardPlace(sys fs.FS, name string) (Place, error) { return devicePlace(sys, name) }

// GPUPlace is where the transport sees a GPU ("0000:3e:00.0"): nowhere if the system does not say.
func GPUPlace(sys fs.FS, address string) Place {
	at, _ := gpuPlace(sys, address)
	return at
}

// Near says how near two devices are: "same switch" and so on. The order is from near to far.
func Near(a, b Place) (order int, text string) {
	d := a.distanceTo(b)
	return int(d), d.String()
}
