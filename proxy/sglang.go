// What is SGLang's own: how a server is asked, how a dp rank is told, and the room where P and D meet.

package proxy

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
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

// maxInfo bounds what is read of a server's word on its model and its role.
const maxInfo = 1 << 20

// otherRole is the reason not to use a server in the role in which it is given.
type otherRole struct{ has, given string }

func (e *otherRole) Error() string {
	return fmt.Sprintf("its disaggregation_mode is %s, but it is given as a %s server", e.has, e.given)
}

// probeSGLang asks whether an SGLang server is up in its role, and once for its ranks. For /health an idle engine
// computes a token, and a busy one answers with its next token, which a long
// prompt holds up. So the router asks for /health only until the server is up. From then on the server
// counts as up as long as it answers the question for its role.
func (p *Proxy) probeSGLang(ctx context.Context, s *server) (ranks []rank, role string, err error) {
	question := s.roleProbe.begin()
	if role, err = p.roleOf(ctx, s); err != nil {
		return nil, "", err
	}
	s.roleProbe.answer(question, role)
	switch {
	case role != "" && role != s.role:
		return nil, role, &otherRole{role, s.role}
	case role == "" && s.other != nil:
		return nil, "", fmt.Errorf("GET %s does not tell its role, and it is given as a prefill and as a decode server", s.path("/model_info"))
	case s.hasRoleChanged() && s.roleProbe.stoppedReporting(role): // /server_info would tell the first one
		return nil, "", fmt.Errorf("GET %s does not tell its role any more, and it was not %s at last", s.path("/model_info"), s.role)
	}
	if _, up, _, ranks := s.state(); up {
		return ranks, role, nil
	}
	if _, err := p.fetch(ctx, p.client, s.path("/health")); err != nil {
		return nil, "", err
	}
	ranks, err = p.ranksOf(ctx, s, role)
	return ranks, role, err
}

// ranksOf asks a server for its bootstrap port and its ranks. If the server does not tell the role that it has now, ranksOf also asks for
// the role with which it began.
func (p *Proxy) ranksOf(ctx context.Context, s *server, role string) ([]rank, error) {
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
	case role == "" && info.Mode != "" && info.Mode != s.role: // Mode is the role with which the server began
		return nil, &otherRole{info.Mode, s.role}
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

// roleOf asks a server for its role, which may change while the server runs. The role is empty if the server does not say it.
// If a server refuses the request, for instance because it wants a key, that is no error: the server lives.
func (p *Proxy) roleOf(ctx context.Context, s *server) (string, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, s.path("/model_info"), nil)
	if err != nil {
		return "", err
	}
	resp, err := p.client.Do(req)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(io.LimitReader(resp.Body, maxInfo))
	switch {
	case resp.StatusCode >= 500:
		return "", fmt.Errorf("GET %s answered %s", req.URL, resp.Status)
	case resp.StatusCode != http.StatusOK:
		return "", nil
	case err != nil:
		return "", fmt.Errorf("GET %s: %w", req.URL, err)
	}
	var info serverInfo
	_ = json.Unmarshal(body, &info) // other servers say other things there
	return info.Mode, nil
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
