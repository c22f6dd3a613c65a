package proxy

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"strconv"
	"strings"
)

// serverInfo is what an SGLang server says of itself.
type serverInfo struct {
	Mode          string `json:"disaggregation_mode"`
	BootstrapPort int    `json:"disaggregation_bootstrap_port"`
	DPSize        int    `json:"dp_size"`
}

// maxDPSize bounds what a server says of its dp ranks.
const maxDPSize = 65536

// probeSGLang asks whether an SGLang server is up, and once for its ranks. An idle engine
// computes a token for /health, and a busy one answers with its next token, which a long
// prompt holds up. So /health is asked only until the server is up. From then on it is
// enough that the server answers.
func (p *Proxy) probeSGLang(ctx context.Context, s *server) ([]rank, error) {
	if _, up, _, ranks := s.state(); up {
		return ranks, p.answers(ctx, s.path("/model_info"))
	}
	if _, err := p.fetch(ctx, p.client, s.path("/health")); err != nil {
		return nil, err
	}
	var info serverInfo
	for _, path := range []string{"/server_info", "/get_server_info"} { // the second is its former name
		body, err := p.fetch(ctx, p.client, s.path(path))
		if err != nil {
			if ctx.Err() != nil {
				return nil, err
			}
			p.log.Debug("the server does not tell its mode and dp ranks", serverFields(s, err)...) // it may want a key
			continue
		}
		if err := json.Unmarshal(body, &info); err != nil {
			return nil, fmt.Errorf("GET %s: %w", s.path(path), err)
		}
		break
	}
	switch {
	case info.Mode != "" && info.Mode != s.role:
		return nil, fmt.Errorf("it runs with --disaggregation-mode %s, but is given as a %s server", info.Mode, s.role)
	case info.BootstrapPort < 0 || info.BootstrapPort > 65535 || info.DPSize < 0 || info.DPSize > maxDPSize:
		return nil, fmt.Errorf("it says that its bootstrap port is %d and its dp_size %d", info.BootstrapPort, info.DPSize)
	}
	s.found(info.BootstrapPort)
	if s.role == decodeRole || info.DPSize < 2 {
		return []rank{{dp: unranked}}, nil
	}
	ranks := make([]rank, info.DPSize)
	for i := range ranks {
		ranks[i].dp = i
	}
	return ranks, nil
}

// answers: a server that refuses the question lives too, for instance because it asks for a
// key.
func (p *Proxy) answers(ctx context.Context, url string) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	resp, err := p.client.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode >= 500 {
		return fmt.Errorf("GET %s answered %s", url, resp.Status)
	}
	return nil
}

// rankMembers are the members by which a client may choose dp ranks itself.
var rankMembers = []string{"routed_dp_rank", "data_parallel_rank", "disagg_prefill_dp_rank"}

// ranked reports whether the router has chosen one of several dp ranks of P, and the client
// none.
func (a *attempt) ranked() bool {
	if a.prefill.dp == unranked {
		return false
	}
	for _, name := range rankMembers {
		if v := a.fields.last(name); v != nil && string(v) != "null" {
			return false
		}
	}
	return true
}

// dpRank tells the engines which dp rank of P has the request: D need not ask for it.
func (a *attempt) dpRank(role string) (ours []member) {
	if !a.ranked() {
		return nil
	}
	k := json.RawMessage(strconv.Itoa(a.prefill.dp))
	if role == prefillRole {
		ours = []member{{"routed_dp_rank", k}}
	}
	return append(ours, member{"disagg_prefill_dp_rank", k})
}

// settleRoom takes a room that leads to the chosen rank. Engines without a member for ranks
// go by the room's number.
func (a *attempt) settleRoom() {
	_, _, _, ranks := a.prefill.server.state()
	room, err := strconv.ParseInt(a.transferID, 10, 64)
	if err != nil || !a.ranked() || a.prefill.dp >= len(ranks) {
		return
	}
	n := int64(len(ranks))
	a.transferID = strconv.FormatInt(room-room%n+int64(a.prefill.dp), 10)
}

// room is where P and D meet by the SGLang contract. Both engines give the requests of a
// batch this room and those that follow it.
func (a *attempt) room() []member {
	s := a.prefill.server
	host := s.base.Hostname()
	if strings.Contains(host, ":") {
		host = "[" + host + "]"
	}
	port := json.RawMessage("null") // P's default
	if n := s.bootstrapAt(); n != 0 {
		port = strconv.AppendInt(nil, int64(n), 10)
	}
	return []member{{"bootstrap_host", rawParams(host)}, {"bootstrap_port", port}, {"bootstrap_room", json.RawMessage(a.transferID)}}
}
