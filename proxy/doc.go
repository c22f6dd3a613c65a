// Package proxy is the prefill/decode router. It chooses a prefill and a decode
// server for each completion request, sends the request to both with the
// parameters by which they find each other, answers what the decode server
// answers, and tries others where these fail before they have answered.
//
// It speaks the contracts of vLLM's Mooncake and NIXL connectors, and of SGLang: see
// Contract.
package proxy
