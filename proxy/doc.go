// Package proxy is the prefill/decode router. It mints a transfer id for each
// completion request, sends the request to a prefill server and to a decode
// server at the same time with the parameters by which they find each other,
// and answers what the decode server answers.
//
// It speaks the contract of vLLM's Mooncake connector: see prefillBody and
// decodeBody.
package proxy
