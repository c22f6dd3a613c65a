// Package machine decides about all transfers of one agent. Package core says what a [Machine] is told and what it wants.
//
// The halves of the transfers are those of package core/half. This package tells the halves what the engine says, and the engine how they
// end. It alone knows that a transfer may go in parts, one for each pair of ranks.
//
// # The fans
//
// A transfer that goes in parts has a fan: on D a fan-in of its claim and then of its load, on P a fan-out of its offer. The fan has a state
// of its own. If the engine is to hear of the transfer's end, the fan joins the reports of the parts to one. The tables of fans have the
// notation of core/half's, and are functions too. "-" stands for no fan. Each part is a half of its own. What the engine says reaches each
// part that has not ended, as an event of the part.
//
// An event is a type of [core.Event], Divided or FanOut as in core/half, or one of three that a part tells its fan: it has Ended, it is Lost,
// or it is Forgotten with all other parts, since the early transfer gave way. Among the actions, PartFails is an event for each other part.
// The tables leave out the Report of a transfer that has no parts, and that of a demand.
//
// The guards are last (no part is left), failed (the part is the first that has failed), told (the engine wants to hear of lost claims:
// [core.Options].ReportClaims), same and other (the load names the engine that the claim named, or another one), offered and unoffered (P's
// engine has offered the transfer, or has not).
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
