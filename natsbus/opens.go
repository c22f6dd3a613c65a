package natsbus

// An open is a stranger's message whose answer takes signatures, 0.2 ms of a processor. So opens have places of their
// own: they take none of the requests', however many come.
const (
	// maxOpens is how many opens wait: what one processor answers before their askers send another (openAgain).
	maxOpens = 4096
	// maxOpeners is how many opens are answered at one time: the other processors stay free.
	maxOpeners = 1
)

// openCame takes an open. If too many wait, it gets nothing: a refusal would cost a signature too. Its asker sends
// another after openAgain.
func (b *Bus) openCame(v *asked) {
	select {
	case b.opens <- v:
		b.answerOpens()
	default:
		v.link.seals.crowded.Add(1)
	}
}

// answerOpens has the opens that wait answered, on a goroutine that ends when there is none.
func (b *Bus) answerOpens() {
	select {
	case b.openers <- struct{}{}:
	default: // it runs
		return
	}
	if !b.spawn("natsbus.opens", func() {
		defer func() {
			<-b.openers
			if len(b.opens) > 0 { // one came between the last look and this, or its forerunner made a fault
				b.answerOpens()
			}
		}()
		for b.ctx.Err() == nil {
			select {
			case v := <-b.opens:
				b.unseal(v)
			default:
				return
			}
		}
	}) {
		<-b.openers // the bus closes: nobody is at the asker's next one
	}
}
