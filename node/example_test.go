package node_test

import (
	"bytes"
	"fmt"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/kv"
	"github.com/kvconn/kvconn/node"
)

// Two agents move the three blocks of a request; here both are in one process.
func Example() {
	const blocks, blockBytes = 16, 4096
	pages := func() ([]byte, []kv.Region) {
		// Memory that Go does not move or free, as an engine's own.
		cache, err := unix.Mmap(-1, 0, blocks*blockBytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
		if err != nil {
			panic(err)
		}
		return cache, []kv.Region{{Name: "layer.0", Base: uint64(uintptr(unsafe.Pointer(&cache[0]))),
			BlockStride: blockBytes, BlockBytes: blockBytes, NumBlocks: blocks}}
	}
	open := func(role string, regions []kv.Region) *node.Agent {
		cfg := node.DefaultConfig()
		cfg.EngineID, cfg.Role = "my-"+role, role
		cfg.BootstrapHost, cfg.BootstrapPort = "127.0.0.1", 0
		agent, err := node.Open(cfg, node.Options{})
		if err != nil {
			panic(err)
		}
		if err := agent.RegisterKVCaches(regions); err != nil {
			panic(err)
		}
		return agent
	}
	prefillCache, prefillRegions := pages()
	decodeCache, decodeRegions := pages()
	prefill, decode := open(node.RolePrefill, prefillRegions), open(node.RoleDecode, decodeRegions)
	defer decode.Close()
	defer prefill.Close()

	copy(prefillCache[5*blockBytes:], "the prompt's keys and values")
	_, err := decode.StartLoad([]core.LoadRequest{{ID: "xfer-1", Selection: kv.Selection{Blocks: [][]kv.BlockID{{2, 9, 4}}}, From: core.Target{Bootstrap: prefill.BootstrapAddress(), EngineID: "my-prefill"}}})
	if err != nil {
		panic(err)
	}
	if _, err := prefill.Offer([]core.OfferRequest{{ID: "xfer-1", Selection: kv.Selection{Blocks: [][]kv.BlockID{{5, 1, 7}}}}}); err != nil {
		panic(err)
	}
	<-decode.Finished()
	for _, r := range decode.GetFinished() {
		fmt.Println(r.ID, r.Code, r.Stats.Bytes, "bytes by", r.Transport)
	}
	fmt.Println(bytes.Equal(prefillCache[5*blockBytes:6*blockBytes], decodeCache[2*blockBytes:3*blockBytes]))
	// Output:
	// xfer-1 ok 12288 bytes by local
	// true
}
