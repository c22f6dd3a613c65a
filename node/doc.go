// Package node puts the parts together: an [Agent] is one open kvconn instance,
// one rank of one engine in one process. The C API, the command and Go programs
// open it.
//
// Open starts the control plane, with the bootstrap port on a prefill engine's
// first rank. RegisterKVCaches gives the agent its memory; from then on peers
// find a prefill agent. Then the engine announces and offers transfers, or
// loads them. Each accepted offer and load ends in exactly one report, which
// GetFinished returns.
//
// Only Open, RegisterKVCaches and Close wait for the network, each for a
// bounded time. All methods may be called from any goroutine.
package node
