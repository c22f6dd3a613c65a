package proxy

import (
	"encoding/json"
	"fmt"
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
)

func parseContract(s string) (Contract, error) {
	switch c := Contract(s); c {
	case Mooncake, NIXL:
		return c, nil
	}
	return "", fmt.Errorf("proxy: contract %q: want %s or %s", s, Mooncake, NIXL)
}

// paramsName is the member that both contracts use. What the client sent under
// it is dropped: it would choose the address that D connects to.
const paramsName = "kv_transfer_params"

// toPrefill are the members that P's request gets.
func (c Contract) toPrefill(transferID string) []member {
	if c == NIXL {
		return []member{{paramsName, json.RawMessage(`{"do_remote_decode":true,"do_remote_prefill":false,` +
			`"remote_engine_id":null,"remote_block_ids":null,"remote_host":null,"remote_port":null}`)}}
	}
	return []member{{paramsName, rawParams(struct {
		DoRemoteDecode  bool   `json:"do_remote_decode"`
		DoRemotePrefill bool   `json:"do_remote_prefill"`
		TransferID      string `json:"transfer_id"`
	}{true, false, transferID})}}
}

// toDecode are the members that D's request gets; params are P's by the NIXL
// contract.
func (c Contract) toDecode(from target, transferID string, params json.RawMessage) []member {
	if c == NIXL {
		return []member{{paramsName, params}}
	}
	return []member{{paramsName, rawParams(struct {
		DoRemoteDecode      bool   `json:"do_remote_decode"`
		DoRemotePrefill     bool   `json:"do_remote_prefill"`
		RemoteBootstrapAddr string `json:"remote_bootstrap_addr"`
		RemoteEngineID      string `json:"remote_engine_id"`
		TransferID          string `json:"transfer_id"`
	}{false, true, from.server.bootstrap, from.engineID, transferID})}}
}

// rawParams marshals a struct of bools and strings, which cannot fail.
func rawParams(v any) json.RawMessage {
	raw, err := json.Marshal(v)
	if err != nil {
		panic(err)
	}
	return raw
}
