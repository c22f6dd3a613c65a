// Package proxy is the prefill/decode router. It chooses a prefill and a decode server for
// each completion request, sends the request to both with the parameters by which they
// find each other, and passes the decode server's answer on. If one of the two fails
// before it has answered, the router tries other servers.
//
// The router speaks the contracts of vLLM's Mooncake and NIXL connectors, and of
// SGLang: see Contract.
package proxy
