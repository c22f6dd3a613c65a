// Package machine decides about all transfers of one agent: see package core, which has what a [Machine] is told and what it wants.
//
// The halves of the transfers are those of package core/half. This package stands above them. It takes what the engine says to the halves
// and their ends to the engine, and it alone knows that a transfer may go in parts, one for each pair of ranks.
//
// # The fans
//
// A transfer that goes in parts has a fan: on D a fan-in of its claim and then of its load, on P a fan-out of its offer. The fan has a
// state of its own. If the engine is to hear of its end, the fan makes one report of the parts'. Its tables have the notation of core/half's, and are functions too.
// "-" stands for no fan. Each part is a half of its own. What the engine says reaches each part that has not ended, as an event of the part.
//
// An event is a type of [core.Event], Divided or FanOut as in core/half, or one of three that a part tells: it has Ended, it is Lost, or it is
// Forgotten with all other parts, since early transfers gave way. Among the actions, PartFails is the event of each other part.
// The Report of a transfer that has no parts, and that of a demand, are of no row.
//
// The guards: last, no part is left; failed, the part has failed, as the first; told, the engine wants to hear of lost claims
// ([core.Options].ReportClaims); same and other, the load is from the claim's engine, or from another one; offered and unoffered, P's engine
// has offered the transfer, or has not.
//
// TestSim and TestTranscripts hold the machine to these tables as to those of core/half.
//
// Fan-ins of claims (D):
//
//	from   event           guard  to     actions
//	-      Divided         -      going
//	going  LoadRequest     same   -
//	going  LoadRequest     other  -
//	going  Lost            told   -      PartFails Report
//	going  Ended           last   -
//	going  Cancel Abandon  -      -
//
// Fan-ins of loads (D):
//
//	from           event                guard   to       actions
//	-              Divided LoadRequest  -       going
//	going          Ended Lost           failed  failing  PartFails
//	going failing  Ended                last    -        Report
//
// Fan-outs (P):
//
//	from       event         guard      to         actions
//	-          FanOut        unoffered  unoffered
//	-          FanOut        offered    offered
//	unoffered  OfferRequest  -          offered
//	unoffered  Forgotten     -          -
//	unoffered  Ended         last       -
//	offered    Ended         last       -          Report
package machine
