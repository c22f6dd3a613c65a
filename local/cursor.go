package local

// cursor walks over runs from one byte on.
type cursor struct {
	runs []run
	off  uint64
}

// cut appends the next n bytes to v.
func (c *cursor) cut(v []iovec, n uint64) []iovec {
	off := c.off
	for i := 0; n > 0; i++ {
		k := min(c.runs[i].len-off, n)
		v = append(v, iovec{uintptr(c.runs[i].base + off), uintptr(k)})
		n, off = n-k, 0
	}
	return v
}

func (c *cursor) advance(n uint64) {
	for n > 0 {
		left := c.runs[0].len - c.off
		if n < left {
			c.off += n
			return
		}
		n -= left
		c.runs, c.off = c.runs[1:], 0
	}
}
