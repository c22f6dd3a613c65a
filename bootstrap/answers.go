package bootstrap

import (
	"encoding/json"
	"net/http"
	"slices"
	"time"
	"weak"
)

// maxTold bounds the bytes of the answers of GET /query that clients are reading. The longest
// answer has 7.5 MiB, of which a table makes one for each of its changes.
const maxTold = 32 << 20

// told is an answer of GET /query.
type told struct {
	text    []byte
	readers map[*http.ResponseController]struct{}
}

// answers are those of GET /query. One is made for each change of the table, however many
// clients read it slowly.
type answers struct {
	newest  weak.Pointer[told] // nil when it is to be made anew; it is not kept for the next client if memory is wanted back
	reading []*told            // those with readers, oldest first
	bytes   int                // of these
}

// tell returns the answer for a client that reads it until leave. A client may change the table and
// read it slowly, over and over: beyond maxTold the readers of the oldest answer are ended.
func (t *Table) tell(c *http.ResponseController) (*told, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	a := t.answers.newest.Value()
	if a == nil {
		text := []byte("{}")
		if t.engines != nil {
			var err error
			if text, err = json.Marshal(t.engines); err != nil {
				return nil, err
			}
		}
		a = &told{text: text, readers: map[*http.ResponseController]struct{}{}}
		t.answers.newest = weak.Make(a)
	}
	t.answers.enter(a, c)
	return a, nil
}

// leave is called when the client has read the answer, or has gone.
func (t *Table) leave(a *told, c *http.ResponseController) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if _, reads := a.readers[c]; !reads { // it was ended
		return
	}
	delete(a.readers, c)
	if len(a.readers) == 0 {
		t.answers.drop(slices.Index(t.answers.reading, a))
	}
}

func (l *answers) enter(a *told, c *http.ResponseController) {
	if len(a.readers) == 0 { // the newest, so the last
		l.reading = append(l.reading, a)
		l.bytes += len(a.text)
	}
	a.readers[c] = struct{}{}
	for l.bytes > maxTold && len(l.reading) > 1 {
		oldest := l.reading[0]
		for c := range oldest.readers {
			_ = c.SetWriteDeadline(time.Unix(1, 0)) // an error says that there is no connection that could be slow
		}
		clear(oldest.readers)
		l.drop(0)
	}
}

func (l *answers) drop(i int) {
	l.bytes -= len(l.reading[i].text)
	l.reading = slices.Delete(l.reading, i, i+1)
}

// changed says that the table is no longer what the newest answer tells.
func (l *answers) changed() { l.newest = weak.Pointer[told]{} }
