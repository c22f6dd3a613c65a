package proxy

import (
	"crypto/rand"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
)

// Contract is how a router tells P and D of each other.
type Contract string

// The contracts.
const (
	// Mooncake sends the request to P and D at the same time, with a transfer id
	// by which D finds P's blocks.
	Mooncake Contract = "mooncake"
	// NIXL sends it to P first, and P's kv_transfer_params to D as they are.
	NIXL Contract = "nixl"
	// SGLang sends the same request to P and D at the same time, with P's
	// bootstrap address and a room where they meet.
	SGLang Contract = "sglang"
)

func parseContract(s string) (Contract, error) {
	if c := Contract(s); slices.Contains([]Contract{Mooncake, NIXL, SGLang}, c) {
		return c, nil
	}
	return "", fmt.Errorf("proxy: contract %q: want %s, %s or %s", s, Mooncake, NIXL, SGLang)
}

// paramsName is the member that tells vLLM's engines of a transfer.
const paramsName = "kv_transfer_params"

// pairKeyName is a member beside SGLang's bootstrap_host. Routers other than ours set it.
const pairKeyName = "bootstrap_pair_key"

// reserved are the members that only the router may set: they choose the address that D
// connects to.
func (c Contract) reserved() []string {
	if c == SGLang {
		return []string{paramsName, "bootstrap_host", "bootstrap_port", "bootstrap_room", pairKeyName}
	}
	return []string{paramsName}
}

// endpoints are the paths of requests that go to P and D.
func (c Contract) endpoints() []string {
	if c == SGLang {
		return []string{"/v1/completions", "/v1/chat/completions", "/generate"}
	}
	return []string{"/v1/completions", "/v1/chat/completions"}
}

// newTransferID names an attempt. Anybody who knows the name can ask P for the blocks.
func (c Contract) newTransferID() string {
	if c != SGLang {
		return "xfer-" + newUUID()
	}
	var b [8]byte
	_, _ = rand.Read(b[:]) // never fails: it ends the program instead
	// One of the 63 bits stays free: the requests of a batch get this room and those that
	// follow.
	return strconv.FormatUint(binary.BigEndian.Uint64(b[:])>>2, 10)
}

// prefillBody is P's request.
func (c Contract) prefillBody(a *attempt) pieces {
	switch c {
	case NIXL:
		return a.fields.oneToken([]member{{paramsName, json.RawMessage(`{"do_remote_decode":true,"do_remote_prefill":false,` +
			`"remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null}`)}})
	case SGLang:
		return a.fields.with(append(a.room(), a.dpRank(prefillRole)...), paramsName, pairKeyName) // P knows by its mode that it prefills
	default:
		return a.fields.oneToken([]member{{paramsName, rawParams(struct {
			DoRemoteDecode  bool   `json:"do_remote_decode"`
			DoRemotePrefill bool   `json:"do_remote_prefill"`
			TransferID      string `json:"transfer_id"`
		}{true, false, a.transferID})}})
	}
}

// decodeBody is D's request; params are P's by the NIXL contract, nil if P gave
// none.
func (c Contract) decodeBody(a *attempt, params json.RawMessage) pieces {
	if a.short { // an engine of kvconn's counts such a prompt apart from those that name no transfer by mistake
		return a.fields.with([]member{{paramsName, rawParams(struct {
			Alone bool `json:"kvconn_alone"`
		}{true})}})
	}
	if a.alone() {
		return a.fields.with(nil, paramsName)
	}
	switch c {
	case NIXL:
		if params == nil {
			return a.fields.with(nil, paramsName)
		}
		return a.fields.with([]member{{paramsName, params}})
	case SGLang:
		return a.fields.with(append(a.room(), a.dpRank(decodeRole)...), paramsName, pairKeyName)
	default:
		return a.fields.with([]member{{paramsName, rawParams(struct {
			DoRemoteDecode      bool   `json:"do_remote_decode"`
			DoRemotePrefill     bool   `json:"do_remote_prefill"`
			RemoteBootstrapAddr string `json:"remote_bootstrap_addr"`
			RemoteEngineID      string `json:"remote_engine_id"`
			TransferID          string `json:"transfer_id"`
		}{false, true, a.prefill.server.bootstrap, a.prefill.engineID, a.transferID})}})
	}
}

// rawParams marshals bools and strings, which cannot fail.
func rawParams(v any) json.RawMessage {
	raw, err := json.Marshal(v)
	if err != nil {
		panic(err)
	}
	return raw
}
