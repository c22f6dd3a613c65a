package proxy

import (
	"container/list"
	"context"
	"errors"
	"io"
	"sync"

	"github.com/kvconn/kvconn/internal/httpserve"
)

// uploads are the bodies that the router passes on to an engine while they arrive. Each upload holds one of the places for
// requests, so there are at most a quarter as many uploads as such places. If one more begins, the one that began first gives
// way.
type uploads struct {
	most int
	mu   sync.Mutex
	list list.List // of func(): each ends one upload
}

var errUploads = errors.New("the body came too slowly, and gave way to others")

// upload is one such body.
type upload struct {
	io.Reader
	of   *uploads
	once sync.Once
	at   *list.Element
	done func() // awaiting the client
}

// begin passes a body on. If the upload must give way, cut ends its request.
func (u *uploads) begin(client context.Context, body io.Reader, cut func()) *upload {
	up := &upload{Reader: body, of: u, done: httpserve.Awaiting(client)}
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.list.Len() >= u.most {
		u.list.Remove(u.list.Front()).(func())()
	}
	up.at = u.list.PushBack(cut)
	return up
}

func (u *upload) Read(p []byte) (int, error) {
	n, err := u.Reader.Read(p)
	if err != nil {
		u.end()
	}
	return n, err
}

func (u *upload) Close() error {
	u.end()
	return nil
}

// end is called when the whole body has come, or when nobody reads it any more.
func (u *upload) end() {
	u.once.Do(func() {
		u.of.mu.Lock()
		u.of.list.Remove(u.at)
		u.of.mu.Unlock()
		u.done()
	})
}
