// All servers are waited for, until each is ready and warm.

package launch

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"time"

	"github.com/kvconn/kvconn/internal/sleep"
)

// How often servers are asked, and how often the status is told if it is not a line that
// can be written over.
const (
	askEvery  = 250 * time.Millisecond
	tellEvery = 15 * time.Second
)

// waitReady waits until every server is ready and warm.
func (c Config) waitReady(ctx context.Context, servers []*server) error {
	begin := time.Now()
	var told time.Time
	said := 0 // how many were ready when last told
	defer func() {
		if c.Terminal {
			fmt.Fprint(c.Out, "\r\033[K")
		}
	}()
	for {
		ready := 0
		for _, s := range servers {
			select {
			case <-s.ended:
				return s.died()
			default:
			}
			if s.ready == 0 {
				if _, err := ask(ctx, http.MethodGet, s.url+"/health", c.apiKey(), nil, 5*time.Second); err == nil {
					if engines[c.Engine].alone() {
						err = warmUp(ctx, s.url, c.servedName(), s.name, c.apiKey())
					}
					if err != nil {
						return fmt.Errorf("launch: %s is up, but does not answer a request: %w; the end of its log %s:\n%s", s.name, err, s.logPath, s.logTail(20))
					}
					s.ready = time.Since(begin)
				}
			}
			if s.ready > 0 {
				ready++
			}
		}
		switch now := time.Now(); {
		case c.Terminal:
			fmt.Fprintf(c.Out, "\r\033[K%s", status(servers, now.Sub(begin)))
		case ready != said || now.Sub(told) > tellEvery:
			said, told = ready, now
			fmt.Fprintln(c.Out, status(servers, now.Sub(begin)))
		}
		if ready == len(servers) {
			return nil
		}
		if time.Since(begin) > c.Ready {
			return c.notReady(servers)
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		_ = sleep.For(ctx, askEvery)
	}
}

// notReady is the error if servers take too long.
func (c Config) notReady(servers []*server) error {
	var late []string
	for _, s := range servers {
		if s.ready == 0 {
			late = append(late, fmt.Sprintf("%s is not ready after %v (--timeout); the end of its log %s:\n%s", s.name, c.Ready, s.logPath, s.logTail(20)))
		}
	}
	return errors.New("launch: " + strings.Join(late, "\n"))
}

// status is one line about all servers.
func status(servers []*server, since time.Duration) string {
	parts := []string{fmt.Sprintf("%4.0f s", since.Seconds())}
	for _, s := range servers {
		if s.ready > 0 {
			parts = append(parts, s.name+": ready")
		} else {
			parts = append(parts, s.name+": "+s.lastLogLine())
		}
	}
	return strings.Join(parts, " | ")
}
