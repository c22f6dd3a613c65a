// Package conformance holds the driver double to the facts that program/ checks against any CUDA driver, and docs/gpu.md to what it says.
//
// program/ is C, since a machine with a GPU need not have Go: `make gpu-kit` packs it. What real drivers say lies in real/, a JSON a run.
package conformance
