package proxy

import (
	"crypto/rand"
	"fmt"
)

// newUUID returns a random (version 4) UUID. A transfer id must not be guessable: anybody
// who knows it can ask a prefill server for the blocks.
func newUUID() string {
	var b [16]byte
	_, _ = rand.Read(b[:]) // never fails: it ends the program instead
	b[6] = b[6]&0x0f | 0x40
	b[8] = b[8]&0x3f | 0x80
	return fmt.Sprintf("%x-%x-%x-%x-%x", b[:4], b[4:6], b[6:8], b[8:10], b[10:])
}
