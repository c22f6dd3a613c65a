package node

import "bytes"

// mark puts a transport's name before its grant.
func mark(name string, grant []byte) []byte {
	return append(append(make([]byte, 0, len(name)+1+len(grant)), name+"\x00"...), grant...)
}

func unmark(marked []byte) (name string, grant []byte) {
	before, grant, _ := bytes.Cut(marked, []byte{0})
	return string(before), grant
}
