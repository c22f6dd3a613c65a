// Package launch starts vLLM or SGLang servers that prefill and decode on this
// machine, with kvconn between them and the router before them, and stops all of it.
//
// Each server runs under a guard, a small process of its own: see Guard.
package launch
