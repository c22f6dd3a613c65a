package cli

import (
	"fmt"
	"io"
	"time"

	"github.com/kvconn/kvconn/cli/synthetic"
	"github.com/kvconn/kvconn/kv"
)

// localBaseline measures what the transport of one host is held against, over the blocks of each round.
type localBaseline struct {
	shared bool // the prefill process's memory can be mapped

	sources [2]*synthetic.Pool // in this process, for memcpy: ordinary memory; such as can be mapped, if shared
	loops   []float64
	copies  [2][]float64
}

// measure copies the blocks of a round once more, out of the prefill process and out of the sources.
func (b *localBaseline) measure(pool *synthetic.Pool, opened synthetic.Answer, src, dst []kv.BlockID, counts bool) (err error) {
	began := time.Now()
	n, err := pool.ReadLoop(opened.PID, opened.Base, src, dst)
	if err != nil {
		return err
	}
	if counts {
		b.loops = append(b.loops, float64(n)/time.Since(began).Seconds()/1e9)
	}
	for i, shared := range []bool{false, true} {
		if shared && !b.shared {
			break
		}
		if b.sources[i] == nil {
			if b.sources[i], err = pool.NewLike(shared); err != nil {
				return err
			}
		}
		began := time.Now()
		pool.CopyFrom(b.sources[i], src, dst)
		if counts {
			b.copies[i] = append(b.copies[i], float64(n)/time.Since(began).Seconds()/1e9)
		}
	}
	return nil
}

// medians go into a result.
func (b *localBaseline) medians(r *benchResult) {
	of := func(rates []float64) *float64 {
		if len(rates) == 0 {
			return nil
		}
		m := median(rates)
		return &m
	}
	r.Loop, r.Memcpy, r.MemcpyShared = of(b.loops), of(b.copies[0]), of(b.copies[1])
}

func (b *localBaseline) free() {
	for _, source := range b.sources {
		if source != nil {
			source.Free()
		}
	}
}

// printBaseline is the line below a row of local's.
func printBaseline(out io.Writer, r *benchResult) {
	fmt.Fprintf(out, "%27s by %s; of the same blocks: process_vm_readv in a plain loop %.2f GB/s (ratio %.2f), memcpy by one thread %.2f GB/s (ratio %.2f)",
		"", r.How, *r.Loop, r.Median / *r.Loop, *r.Memcpy, r.Median / *r.Memcpy)
	if r.MemcpyShared != nil {
		fmt.Fprintf(out, ", out of shared memory %.2f GB/s (ratio %.2f)", *r.MemcpyShared, r.Median / *r.MemcpyShared)
	}
	fmt.Fprintln(out)
}
