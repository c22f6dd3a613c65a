// Package chaos runs real agents in processes of their own under load and
// faults, and checks every byte and every report.
//
// Run is the driver. It is the router too: it tells P's and D's processes what
// to announce, offer, load and cancel, over their standard input, and they
// tell it what came of it. Between D and P are ways that it breaks
// (internal/faultnet), and it kills and stops the processes.
//
// The bytes are checked where they are (RunEngine). P fills blocks with a
// pattern that names transfer, region and position, and paints them over the
// moment the offer is reported; D checks them when the load is reported, paints
// them over, and finds its paint unchanged when it uses them next: what is read
// or written too late shows up.
//
// The bookkeeping (ledger) is apart from both: every accepted call must be
// reported, once.
package chaos
