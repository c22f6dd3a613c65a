// Package node puts the parts together: an [Agent] is one open kvconn instance,
// one rank of one engine in one process. The C API, the command and Go programs
// open it.
//
// Open starts the control plane (with the bootstrap port, on a prefill engine's
// first rank), RegisterKVCaches gives the memory and makes the agent findable.
// Then the engine announces and offers transfers, or loads them; each accepted
// offer and load ends in exactly one report, which GetFinished returns.
//
// No call waits for the network but Open, RegisterKVCaches and Close, and these
// are bounded. All methods may be called from any goroutine.
package node
