package cli

import (
	"fmt"
	"io"
	"time"

	"github.com/kvconn/kvconn/cli/synthetic"
	"github.com/kvconn/kvconn/kv"
)

// tcpBaseline measures what tcp is held against: a bare loop of writev and readv over the blocks of each round, on --streams
// connections; and the processor time of both, on both sides. kvconn uses as many of so many connections as pay.
type tcpBaseline struct {
	rates []float64
	used  [2][]float64 // processor seconds for 10⁹ bytes: kvconn's, the loop's
}

// The columns of used.
const (
	ofKvconn = iota
	ofLoop
)

// processors is the processor time of both processes so far.
func processors(peer *synthetic.Process) (time.Duration, error) {
	there, err := peer.ProcessorTime()
	if err != nil {
		return 0, err
	}
	here, err := synthetic.ProcessorTime()
	return there + here, err
}

// uses measures the processor time of a move of so many bytes.
func (b *tcpBaseline) uses(peer *synthetic.Process, column, bytes int, counts bool, move func() error) error {
	before, err := processors(peer)
	if err != nil {
		return err
	}
	if err := move(); err != nil {
		return err
	}
	after, err := processors(peer)
	if err == nil && counts {
		b.used[column] = append(b.used[column], (after-before).Seconds()/float64(bytes)*1e9)
	}
	return err
}

// measure moves the blocks of a round once more.
func (b *tcpBaseline) measure(c *benchConfig, peer *synthetic.Process, pool *synthetic.Pool, round, count int, dst []kv.BlockID) error {
	return b.uses(peer, ofLoop, c.total, round > 0, func() error {
		took, err := pool.ReceiveBare(peer, synthetic.Command{Transfer: round + 1, Count: count, Adjacent: c.adjacent(), Streams: c.streams}, dst)
		if err == nil && round > 0 {
			b.rates = append(b.rates, float64(c.total)/took.Seconds()/1e9)
		}
		return err
	})
}

// medians go into a result. The part is that of rounds in turn.
func (b *tcpBaseline) medians(r *benchResult, rates []float64) {
	if len(b.rates) == 0 {
		return
	}
	parts := make([]float64, len(rates))
	for i := range rates {
		parts[i] = rates[i] / b.rates[i]
	}
	bare, part, used, loop := median(b.rates), median(parts), median(b.used[ofKvconn]), median(b.used[ofLoop])
	r.Bare, r.BarePart, r.Used, r.BareUsed = &bare, &part, &used, &loop
}

// printBare is the line below a row of tcp's.
func printBare(out io.Writer, r *benchResult, streams int) {
	fmt.Fprintf(out, "%27s of the same blocks: on %d connections, of which kvconn uses as many as pay, writev and readv in a bare loop %.2f GB/s (ratio %.2f); processor seconds for 1 GB %.3f, the loop's %.3f (ratio %.2f)\n",
		"", streams, *r.Bare, *r.BarePart, *r.Used, *r.BareUsed, *r.Used / *r.BareUsed)
}
