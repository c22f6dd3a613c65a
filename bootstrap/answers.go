// All clients that read GET /query share one answer, until the table changes.

package bootstrap

import (
	"encoding/json"
	"net/http"
	"slices"
	"time"
	"weak"
)

// maxReading bounds the bytes of the answers of GET /query that clients are reading. A table makes
// one answer for each of its changes; the longest has 7.5 MiB.
const maxReading = 32 << 20

// queryAnswer is an answer of GET /query.
type queryAnswer struct {
	text    []byte
	readers map[*http.ResponseController]struct{}
}

// answers are the answers of GET /query. For each change of the table only one is made, however
// many clients read it, and however slowly.
type answers struct {
	newest  weak.Pointer[queryAnswer] // nil if the next client's answer is to be made anew; Go may take it back for its memory
	reading []*queryAnswer            // those with readers, oldest first
	bytes   int                       // of these
}

// startAnswer returns the answer for a client that reads it until endAnswer. A client may change the table and
// read it slowly, over and over: beyond maxReading the readers of the oldest answer are ended.
func (t *Table) startAnswer(c *http.ResponseController) (*queryAnswer, error) {
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
		a = &queryAnswer{text: text, readers: map[*http.ResponseController]struct{}{}}
		t.answers.newest = weak.Make(a)
	}
	t.answers.addReader(a, c)
	return a, nil
}

// endAnswer is called when the client has read the answer, or has gone.
func (t *Table) endAnswer(a *queryAnswer, c *http.ResponseController) {
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

func (l *answers) addReader(a *queryAnswer, c *http.ResponseController) {
	if len(a.readers) == 0 { // the newest, so the last
		l.reading = append(l.reading, a)
		l.bytes += len(a.text)
	}
	a.readers[c] = struct{}{}
	for l.bytes > maxReading && len(l.reading) > 1 {
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
func (l *answers) changed() { l.newest = weak.Pointer[queryAnswer]{} }
