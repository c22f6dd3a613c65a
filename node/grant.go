package node

import "bytes"

// addTransportName puts a transport's name before its grant.
func addTransportName(name string, grant []byte) []byte {
	return append(append(make([]byte, 0, len(name)+1+len(grant)), name+"\x00"...), grant...)
}

func splitTransportName(marked []byte) (name string, grant []byte) {
	before, grant, _ := bytes.Cut(marked, []byte{0})
	return string(before), grant
}
