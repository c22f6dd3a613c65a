// Package bootstrap is the HTTP side of the bootstrap port: where the ranks of
// a prefill engine register, and where routers and decode engines look them
// up. Requests and answers have the shapes of vLLM's Mooncake bootstrap
// server, so that routers written for it work unmodified. The port also has the
// routes of SGLang's bootstrap server.
//
// The package differs from Mooncake's server in three things that it lacks: the very same
// rank may register twice, a rank can be removed again, and every input is bounded.
package bootstrap
