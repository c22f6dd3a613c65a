package natsbus

import (
	"bytes"
	"io"
	"math/rand/v2"
	"net"
	"testing"
)

// TestClientWriterPassesAll: pieces of all sizes come out as they went in, however the client reads,
// and what is kept takes hardly more memory than its bytes.
func TestClientWriterPassesAll(t *testing.T) {
	budget := newBudget(1 << 30)
	from, server := io.Pipe()
	client, to := net.Pipe()
	o := newClientWriter(from, to, newWindow(budget.newShare("A", func() {}), newRegistryQueries()), budget.newShare("A", func() {}))
	ended := make(chan error, 1)
	go func() {
		err := o.run()
		_ = to.Close()
		ended <- err
	}()
	r := rand.New(rand.NewPCG(1, 2))
	var sent bytes.Buffer
	go func() {
		for range 400 { // less than is kept of what is not read
			piece := bytes.Repeat([]byte{byte(r.Uint32())}, 1+int(r.Uint32N(3000)))
			piece[len(piece)-1] = '\n'
			sent.Write(piece)
			_, _ = server.Write(piece)
			o.mu.Lock()
			size := 0
			for _, p := range o.kept {
				size += cap(p)
			}
			if int64(size) > o.bytes+pieceSize {
				t.Errorf("%d bytes are kept in %d", o.bytes, size)
			}
			o.mu.Unlock()
		}
		_ = server.Close()
	}()
	var got bytes.Buffer
	b := make([]byte, 100<<10)
	for {
		n, err := client.Read(b[:1+r2(got.Len())])
		got.Write(b[:n])
		if err != nil {
			break
		}
	}
	if err := <-ended; err != nil && err != io.EOF {
		t.Fatal(err)
	}
	if !bytes.Equal(got.Bytes(), sent.Bytes()) {
		t.Fatalf("%d bytes came, %d were sent; they differ", got.Len(), sent.Len())
	}
	if budget.total != 0 {
		t.Errorf("%d bytes are still counted", budget.total)
	}
}

// r2 is another size of a read after each.
func r2(n int) int { return n * 7919 % (99 << 10) }
