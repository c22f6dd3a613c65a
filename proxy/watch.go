// Each server is asked again and again whether it is up, in which role, and with which engine id.

package proxy

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strconv"
	"time"

	"go.uber.org/zap"
)

// Bounds of a probe.
const (
	probeTimeout = 5 * time.Second
	maxQuery     = 32 << 20
	// askTimeout is how long a request waits for a server that is asked because of it.
	askTimeout = 500 * time.Millisecond
)

// watch keeps the router's knowledge of one server fresh until ctx ends. A restarted prefill
// server has a new engine id, so the server is asked again and again, and not only until it
// is up.
func (p *Proxy) watch(ctx context.Context, s *server) {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
		}
		pause := p.look(ctx, s)
		if ctx.Err() != nil {
			return
		}
		timer.Reset(pause)
	}
}

// look asks a server, notes what it finds, and says how long that is good for.
func (p *Proxy) look(ctx context.Context, s *server) time.Duration {
	since := s.times()
	err := p.ask(ctx, s)
	var other *otherRole
	switch {
	case ctx.Err() != nil, errors.Is(err, errOvertaken):
	case err == nil, errors.As(err, &other):
		return p.cfg.RefreshInterval
	default:
		p.noteDown(s, since, err)
	}
	return p.cfg.RetryInterval
}

// askAgain asks a server between its probes, for a request that waits, and reports whether the router might now choose another server.
// All requests that wait for one server ask once together. If the server was silent, nobody asks it again within RetryInterval, since
// each request would wait for that.
func (p *Proxy) askAgain(ctx context.Context, s *server) bool {
	if _, up, _, _ := s.state(); up { // it is asked for what it has become since, and a question from before does not tell that
		ctx, cancel := context.WithTimeout(ctx, p.askTimeout)
		defer cancel()
		return mayDiffer(p.ask(ctx, s))
	}
	s.againMu.Lock()
	q := s.again
	if q == nil || q.ended() && !time.Now().Before(q.silentUntil) {
		q = &question{done: make(chan struct{})}
		s.again = q
		p.wg.Go(func() { p.askTogether(s, q) }) // the request's place holds wg
	}
	s.againMu.Unlock()
	select {
	case <-q.done:
		return q.mayDiffer
	case <-ctx.Done():
		return false
	}
}

// mayDiffer reports whether a choice may be another one after an answer of a server.
func mayDiffer(err error) bool {
	var other *otherRole
	return err == nil || errors.As(err, &other) || errors.Is(err, errOvertaken)
}

// question is one that several requests ask together.
type question struct {
	done chan struct{}
	// These are written before done is closed.
	mayDiffer   bool
	silentUntil time.Time
}

func (q *question) ended() bool {
	select {
	case <-q.done:
		return true
	default:
		return false
	}
}

func (p *Proxy) askTogether(s *server, q *question) {
	defer close(q.done)
	ctx, cancel := context.WithTimeout(p.ctx, p.askTimeout)
	defer cancel()
	err := p.ask(ctx, s)
	q.mayDiffer = mayDiffer(err)
	if errors.Is(err, context.DeadlineExceeded) {
		q.silentUntil = time.Now().Add(p.cfg.RetryInterval)
	}
}

var errOvertaken = errors.New("the server has told another role since it was asked")

// ask probes a server, and notes that it is up in its role, or has the other one. Any other error is the caller's to note.
func (p *Proxy) ask(ctx context.Context, s *server) error {
	ranks, role, err := p.probe(ctx, s)
	note := func() { p.noteUp(s, ranks) }
	if other := (*otherRole)(nil); errors.As(err, &other) {
		note = func() { p.noteRoleChange(s, err) }
	} else if err != nil {
		return err
	}
	if !s.roleProbe.doIfCurrent(role, note) {
		return errOvertaken
	}
	return err
}

// noteUp notes that a server is up, so that it is chosen again. If it is given in both roles, it is chosen in this one only.
func (p *Proxy) noteUp(s *server, ranks []rank) {
	wasUp, changed := s.setUp(ranks)
	if !wasUp && s.other != nil {
		p.noteRoleChange(s.other, errors.New("it is up as a "+s.role+" server"))
	}
	if !wasUp || changed {
		p.log.Info("server is up", zap.String("role", s.role), zap.String("url", s.url),
			zap.Int("dp_size", len(ranks)), zap.Bool("was_up", wasUp))
	}
}

// noteRoleChange takes a server out of the choice until it has its role again. If it is not given in the other role too, it is lost.
func (p *Proxy) noteRoleChange(s *server, err error) {
	if !s.setRoleChanged(err.Error()) {
		return
	}
	say := p.log.Warn
	if s.other != nil {
		say = p.log.Info
	}
	say("server has changed its role", serverFields(s, err)...)
}

// noteDown takes a server out of the choice until its next good probe. What failed began when the server had come up so many times: if
// the server has come up since, the failure is of the one before.
func (p *Proxy) noteDown(s *server, since uint64, err error) {
	if s.setDown(since, err.Error()) {
		p.log.Warn("server is down", serverFields(s, err)...)
	}
}

func serverFields(s *server, err error) []zap.Field {
	return []zap.Field{zap.String("role", s.role), zap.String("url", s.url), zap.Error(err)}
}

// probe asks a server whether it is healthy and, if it is a prefill server, for its ranks. role is the role that the server tells; "" if it
// tells none.
func (p *Proxy) probe(ctx context.Context, s *server) (ranks []rank, role string, err error) {
	ctx, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	if p.cfg.Contract == SGLang {
		return p.probeSGLang(ctx, s)
	}
	if _, err := p.fetch(ctx, p.client, s.path("/health")); err != nil {
		return nil, "", err
	}
	if s.bootstrap == "" {
		return []rank{{dp: unranked}}, "", nil
	}
	body, err := p.fetch(ctx, p.bootstraps, s.bootstrap+"/query")
	if err != nil {
		return nil, "", err
	}
	if ranks, err = parseQuery(body); err != nil {
		return nil, "", fmt.Errorf("%s/query: %w", s.bootstrap, err)
	}
	return ranks, "", nil
}

// parseQuery reads the answer of GET /query, ordered by dp rank.
func parseQuery(body []byte) ([]rank, error) {
	var entries map[string]struct {
		EngineID string `json:"engine_id"`
	}
	if err := json.Unmarshal(body, &entries); err != nil {
		return nil, fmt.Errorf("not a table of ranks: %w", err)
	}
	if len(entries) == 0 {
		return nil, fmt.Errorf("no rank has registered yet")
	}
	var ranks []rank
	for key, e := range entries {
		dp, err := strconv.Atoi(key)
		if err != nil || dp < 0 || strconv.Itoa(dp) != key { // "01" would be a second rank 1
			return nil, fmt.Errorf("dp rank %q is not a number", key)
		}
		if e.EngineID == "" {
			return nil, fmt.Errorf("dp rank %d has no engine_id", dp)
		}
		ranks = append(ranks, rank{dp: dp, engineID: e.EngineID})
	}
	slices.SortFunc(ranks, func(a, b rank) int { return a.dp - b.dp })
	return ranks, nil
}

// fetch gets a small document; any status but 200 is an error.
func (p *Proxy) fetch(ctx context.Context, client *http.Client, url string) ([]byte, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return nil, err
	}
	resp, err := client.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(io.LimitReader(resp.Body, maxQuery+1))
	switch {
	case resp.StatusCode != http.StatusOK:
		return nil, fmt.Errorf("GET %s answered %s", url, resp.Status)
	case err != nil:
		return nil, fmt.Errorf("GET %s: %w", url, err)
	case len(body) > maxQuery:
		return nil, fmt.Errorf("GET %s answered more than %d bytes", url, maxQuery)
	}
	return body, nil
}
