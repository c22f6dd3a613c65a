// This agent's port answers SGLang's GET /route from the ranks that are registered
// there: with their sizes, and with their route_info.

package node

import (
	"encoding/json"
	"fmt"
	"net"
	"net/url"
	"strconv"

	"github.com/kvconn/kvconn/bootstrap"
	"github.com/kvconn/kvconn/wire"
)

// sizeKeys are not allowed in a rank's route_info.
var sizeKeys = []string{"attn_tp_size", "attn_cp_size", "dp_size", "pp_size"}

// checkRouteInfo reads a rank's route_info, of a configuration or of the network.
func checkRouteInfo(text []byte) (map[string]json.RawMessage, error) {
	var info map[string]json.RawMessage
	if len(text) == 0 {
		return nil, nil
	}
	if len(text) > wire.MaxRouteInfo {
		return nil, fmt.Errorf("it has %d bytes, the limit is %d: make it shorter", len(text), wire.MaxRouteInfo)
	}
	if err := json.Unmarshal(text, &info); err != nil {
		return nil, fmt.Errorf("%.100q is no JSON object: %w", text, err)
	}
	for _, key := range sizeKeys {
		if info[key] != nil {
			return nil, fmt.Errorf("its member %q is not allowed, since tp_size, dp_size and pp_size say it: remove the member", key)
		}
	}
	return info, nil
}

// rankListing shows the ranks that are registered here, by GET /query and GET /route.
type rankListing struct {
	table   *bootstrap.Table
	address func() string // where the port is reached
}

// addSelf adds this agent's own rank.
func (b *rankListing) addSelf(self *wire.Agent) error {
	r, err := b.routeOf(self)
	if err != nil {
		return err
	}
	if err := b.table.Register(b.entryOf(self)); err != nil {
		return err
	}
	b.table.Routes().Join(r)
	return nil
}

// entryOf is an agent's line in GET /query.
func (b *rankListing) entryOf(a *wire.Agent) bootstrap.Registration {
	return bootstrap.Registration{EngineID: a.EngineID, DPRank: a.DPRank, TPRank: a.TPRank, PPRank: a.PPRank, Addr: b.address()}
}

// routeOf is an agent's line in GET /route.
func (b *rankListing) routeOf(a *wire.Agent) (bootstrap.Rank, error) {
	given, err := checkRouteInfo(a.RouteInfo)
	if err != nil {
		return bootstrap.Rank{}, fmt.Errorf("%s: route_info: %w", rankText(a), err)
	}
	n := ranksOf(a)
	r := bootstrap.Rank{
		Place: bootstrap.Place{DP: a.DPRank, TP: a.TPRank, PP: a.PPRank},
		Sizes: bootstrap.Sizes{DP: dpSizeOf(a), CP: 1, TP: n.TP, PP: n.PP},
		Info:  map[string]json.RawMessage{},
	}
	if a.BlockTokens > 0 {
		r.Info["page_size"] = json.RawMessage(strconv.Itoa(a.BlockTokens))
	}
	if a.DType != "" {
		r.Info["kv_cache_dtype"], _ = json.Marshal(a.DType)
	}
	for key, v := range given {
		r.Info[key] = v
	}
	r.Host, r.Port = b.dataAddress(a)
	return r, nil
}

// dataAddress is where an agent takes data connections, else where its port is.
func (b *rankListing) dataAddress(a *wire.Agent) (host string, port int) {
	if at, err := url.Parse(b.address()); err == nil {
		host = at.Hostname()
		port, _ = strconv.Atoi(at.Port())
	}
	for _, e := range a.Endpoints {
		if e.Transport != viaTCP {
			continue
		}
		if h, text, err := net.SplitHostPort(e.Address); err == nil {
			if n, err := strconv.Atoi(text); err == nil {
				port = n
			}
			if h != "" { // else the same host as the port's
				host = h
			}
		}
	}
	return host, port
}
