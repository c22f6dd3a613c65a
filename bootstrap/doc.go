// Package bootstrap is the HTTP side of the bootstrap port: where the ranks of
// a prefill engine register, and where routers and decode engines look them
// up. Requests and answers have the shapes of vLLM's Mooncake bootstrap
// server, so that routers written for it work unmodified; beside them are the
// routes of SGLang's bootstrap server.
//
// It differs from that server where the original falls short: registering the very same
// rank twice is fine, a rank can be taken out again, and every input is bounded.
package bootstrap
