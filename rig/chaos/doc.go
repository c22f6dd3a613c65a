// Package chaos runs real agents in processes of their own under load and
// faults, and checks every byte and every report.
//
// Run is the driver, and the router too. It tells P's and D's processes over their
// standard input what to announce, offer, load and cancel, and they tell it the results.
// Between D and P are relays that the driver breaks (rig/faultnet), and it kills and
// stops the processes.
//
// The bytes are checked where they are (RunEngine). P fills blocks with a pattern that
// names transfer, region and position, and paints them over the moment the offer is
// reported. D checks them when the load is reported, and paints them over; when it uses
// them next, it must find its paint unchanged. So bytes that are read or written too late
// show up.
//
// The bookkeeping (ledger) is apart from both: every accepted call must be
// reported, once.
package chaos
