// Package half has the halves of transfers: D's claims and loads, P's offers. A half knows one peer. It does not know what its id is
// made of, nor which halves are parts of one transfer between several ranks. [Above] knows both: it is core/machine. The package also has
// what all halves know of a peer: when D renews them at a P agent, and whether a D agent is gone.
//
// # The states
//
// Each half is in one of the states below, which claim.go, asked.go, load.go and offer.go explain. A peer has states too: a P agent
// at D (renew.go), and a D agent at P (probe.go). "-" stands for no half, before its begin and after its end, or for a peer of which
// nothing is known. A row is mostly one call of claimTo, loadTo, offerTo, peerTo or probeTo. Settle tells [Above] how a half
// ends. An event is a type of [core.Event], or one of seven that follow from such an event: Divided (P was found to have several
// ranks, and the claim or load goes on as one half for each), FanOut (a D names the first part of a transfer), Idle (the last half of
// D's side has ended, or the last one of P's), Lost (the engine is told of a lost claim), PartFails (a part of the same fan-in has
// failed), PeerGone (a P agent does not answer any more), Turn (D looks at a P agent: with each Tick, with the first claim that the
// agent has not heard of, when connections break, and when the agent has answered and more is due). If
// a moment has not passed in time, this is a MomentFailed too.
//
// The tables are functions: the state, the event and the guard decide the next state and all actions. [Guard] names the cases; "-" says that
// there is but one. A row may have several states and events; "any" is each state but "-", and "=" the state from which the row goes. An event
// may take a half through several rows, one after the other. If an event has no row, the half stays in its state and wants nothing. Such an
// event may still change what a later guard asks for: which D an offer has, with its load or claim, and until when. Two of the actions are
// what the half tells [Above]. Ended: it has ended. Lost: it cannot succeed any more; a load then ends when its fence has returned. KeepFinish
// makes a pending finish: P is being looked up, and will be told. SendFinish+ is one SendFinish for each rank that was found. After
// ResolvedParts each rank that was found counts as one Resolved. The tables leave out Await, Yield, Report and answers. A half wants
// Await if it is the first that waits for a moment. A step wants Yield if it has ended as many offers as it may, until Resume.
// How much an account holds of what all peers share (greedy.go) is an amount, and decides which offers end.
//
// The guards of peers ask for times and amounts: when the next renewal is due, since when a peer is silent, and for how many ticks
// a D agent was absent.
//
// TestSim and TestTranscripts hold the machine to these tables and to those of core/machine.
// core/machine/testdata/table/untaken.txt has those rows that no seed of TestSim takes, each with the reason.
//
// Claims (D):
//
//	from                                         event                        guard         to             actions
//	-                                            ClaimRequest                 -             resolving      Resolve
//	-                                            Divided                      resolving     resolving
//	-                                            Divided                      relocating    relocating
//	resolving                                    Resolved                     found         asked
//	resolving                                    Resolved                     not-found     backoff
//	relocating                                   Resolved                     found         asked-again
//	relocating                                   Resolved                     not-found     backoff-again
//	relocating                                   Resolved                     replaced      void           Lost
//	resolving relocating                         Resolved                     unusable      void           Lost
//	resolving relocating                         ResolvedParts                -             -
//	backoff                                      Tick                         due           resolving      Resolve
//	backoff-again                                Tick                         due           relocating     Resolve
//	asked asked-again kept                       RenewReplied                 kept          kept
//	asked asked-again kept                       RenewReplied                 over          void           Lost
//	asked asked-again kept                       FinishMessage                failed        void           Lost
//	asked                                        PeerGone                     -             relocating     Forget Resolve
//	asked-again                                  PeerGone                     retried       backoff-again
//	asked-again kept                             PeerGone                     silent        void           Lost SendFinish
//	asked-again kept                             PeerGone                     absent        void           Lost
//	relocating backoff-again                     Tick                         no-successor  =              Lost
//	asked asked-again kept resolving relocating  Tick                         told          =              Lost
//	backoff backoff-again                        Tick                         told          =              Lost
//	asked asked-again kept                       Tick                         expired       -              Ended SendFinish
//	resolving relocating                         Tick                         expired       -              Ended KeepFinish
//	backoff backoff-again void                   Tick                         expired       -              Ended
//	any                                          LoadRequest                  same          -
//	asked asked-again kept                       LoadRequest                  other         -              Ended SendFinish
//	resolving relocating                         LoadRequest                  other         -              Ended KeepFinish
//	backoff backoff-again void                   LoadRequest                  other         -              Ended
//	asked asked-again kept                       Cancel Close Lost PartFails  -             -              Ended SendFinish
//	resolving relocating                         Cancel Lost                  -             -              Ended KeepFinish
//	relocating                                   PartFails                    -             -              Ended KeepFinish
//	resolving relocating                         Close                        -             -              Ended
//	backoff backoff-again void                   Cancel Close Lost            -             -              Ended
//	backoff-again void                           PartFails                    -             -              Ended
//	any                                          Abandon                      -             -
//
// Pending finishes (D), each of a claim or load that has ended while P was looked up:
//
//	from  event                             guard       to    actions
//	-     Cancel Close LoadRequest Lost     -           kept
//	-     MomentFailed PartFails            -           kept
//	-     Remapped Tick                     -           kept
//	kept  Resolved                          found       -     SendFinish
//	kept  Resolved                          unresolved  -
//	kept  ResolvedParts                     -           -     SendFinish+
//	kept  ClaimRequest LoadRequest Divided  -           -
//	kept  Close Abandon                     -           -
//
// Loads (D):
//
//	from                          event                            guard         to          actions
//	-                             LoadRequest                      fresh         resolving   Resolve
//	-                             LoadRequest                      resolving     resolving   Resolve
//	-                             LoadRequest                      relocating    relocating  Resolve
//	-                             LoadRequest                      void          -           Ended
//	-                             LoadRequest                      empty         -           Ended SendFinish
//	-                             LoadRequest                      moment        awaiting
//	-                             LoadRequest                      ready         expecting   Expect
//	-                             Divided                          resolving     resolving
//	-                             Divided                          relocating    relocating
//	resolving relocating          ResolvedParts                    -             -
//	resolving relocating          Resolved                         empty         -           Ended SendFinish
//	resolving relocating          Resolved                         moment        awaiting
//	resolving relocating          Resolved                         ready         expecting   Expect
//	resolving relocating          Resolved                         unresolved    -           Ended
//	relocating                    Resolved                         replaced      -           Ended
//	relocating                    Tick                             no-successor  -           Ended
//	awaiting                      MomentPassed                     ready         expecting   Expect
//	awaiting                      PeerGone                         first         relocating  Resolve
//	awaiting                      PeerGone                         silent        -           Ended SendFinish
//	awaiting                      PeerGone                         absent        -           Ended
//	expecting                     Expecting                        armed         requesting  SendLoad
//	expecting                     Expecting                        outdated      moving      Forget Revoke
//	expecting                     Expecting                        broken        ending      Lost Revoke SendFinish
//	requesting                    LoadAnswered                     accepted      waiting
//	requesting                    LoadAnswered                     absent        moving      Forget Revoke
//	requesting                    LoadAnswered                     hello         moving      Forget Revoke
//	requesting                    LoadAnswered                     absent-again  ending      Lost Revoke
//	requesting                    LoadAnswered                     hello-again   ending      Lost Revoke
//	requesting                    LoadAnswered                     refused       ending      Lost Revoke
//	requesting                    LoadAnswered                     unanswered    ending      Lost Revoke SendFinish
//	requesting waiting            RestartMessage                   restart       restarting  Revoke
//	waiting                       RenewReplied                     restart       restarting  Revoke
//	waiting                       RenewReplied                     unnamed       ending      Lost Revoke SendFinish
//	waiting                       RenewReplied                     unknown       ending      Lost Revoke
//	waiting                       RenewReplied                     missing       ending      Lost Revoke
//	waiting                       PeerGone                         silent        ending      Lost Revoke SendFinish
//	waiting                       PeerGone                         absent        ending      Lost Revoke
//	expecting requesting waiting  Received                         whole         -           Ended SendFinish
//	expecting requesting waiting  Received                         broken        ending      Lost Revoke SendFinish
//	moving                        Revoked                          -             relocating  Resolve
//	restarting                    Revoked                          ready         expecting   Expect
//	ending                        Revoked                          -             -           Ended
//	awaiting                      RenewReplied                     over          -           Ended
//	expecting waiting             RenewReplied                     over          ending      Lost Revoke
//	restarting                    RenewReplied                     over          ending      Lost
//	awaiting                      FinishMessage                    failed        -           Ended
//	expecting requesting waiting  FinishMessage                    failed        ending      Lost Revoke
//	moving restarting             FinishMessage                    failed        ending      Lost
//	awaiting                      Tick                             late          -           Ended SendFinish
//	expecting requesting waiting  Tick                             late          ending      Lost Revoke SendFinish
//	expecting                     Tick                             held          ending      Lost Revoke SendFinish
//	restarting                    Tick                             held          ending      Lost SendFinish
//	resolving relocating          MomentFailed                     -             -           Ended KeepFinish
//	awaiting                      MomentFailed                     -             -           Ended SendFinish
//	resolving relocating          Cancel Close Remapped            -             -           Ended KeepFinish
//	relocating                    PartFails                        -             -           Ended KeepFinish
//	awaiting                      Cancel Close PartFails Remapped  -             -           Ended SendFinish
//	expecting requesting waiting  Cancel Close PartFails Remapped  -             ending      Lost Revoke SendFinish
//	moving                        Cancel Close PartFails Remapped  -             ending      Lost
//	restarting                    Cancel Close PartFails Remapped  -             ending      Lost SendFinish
//	any                           Abandon                          -             -           Ended
//
// Offers (P):
//
//	from                          event                                   guard         to                actions
//	-                             Announce OfferRequest PartialOffer      -             prefill
//	-                             LoadMessage RenewMessage                -             early
//	-                             FanOut                                  new           early
//	-                             FanOut                                  growing       prefill
//	-                             FanOut                                  moment        awaiting
//	-                             FanOut                                  ready         ready
//	prefill awaiting ready        FanOut                                  divided       -
//	early prefill awaiting ready  FanOut                                  over          -                 Ended
//	early                         Announce PartialOffer                   -             prefill
//	early prefill                 OfferRequest                            ready         ready
//	early prefill                 OfferRequest                            moment        awaiting
//	partial                       OfferRequest                            moment        finishing
//	awaiting                      MomentPassed                            ready         ready
//	ready                         LoadMessage MomentPassed OfferRequest   fits          sending           Write
//	ready                         LoadMessage MomentPassed OfferRequest   misfits       -                 Ended SendFinish
//	partial                       OfferRequest                            fits          sending           Write
//	finishing                     MomentPassed                            fits          sending           Write
//	prefill                       LoadMessage MomentPassed PartialOffer   grown         partial           Write
//	prefill                       LoadMessage MomentPassed PartialOffer   misfits       -                 Ended SendFinish
//	awaiting                      LoadMessage MomentPassed                grown         finishing         Write
//	awaiting                      LoadMessage MomentPassed                misfits       -                 Ended SendFinish
//	partial                       MomentPassed PartialOffer               grown         partial           Write
//	partial                       MomentPassed OfferRequest PartialOffer  misfits       ending            SendFinish StopWrite
//	finishing                     MomentPassed                            grown         finishing         Write
//	finishing                     MomentPassed                            misfits       ending            SendFinish StopWrite
//	partial finishing sending     Written                                 whole         -                 Ended
//	partial finishing sending     Written                                 broken        -                 Ended SendFinish
//	partial finishing sending     Written                                 not-expected  refused           SendFinish
//	partial                       Written                                 other-way     prefill           SendRestart
//	finishing                     Written                                 other-way     awaiting          SendRestart
//	sending                       Written                                 other-way     ready             SendRestart
//	ending ending-withdrawn       Written                                 -             -                 Ended
//	partial                       Withdraw                                restart       withdrawing       StopWrite
//	partial                       Withdraw                                whole         ending-withdrawn  StopWrite
//	ending                        Withdraw                                -             ending-withdrawn
//	withdrawing                   Written                                 growing       prefill           SendRestart
//	withdrawing                   Written                                 moment        awaiting          SendRestart
//	withdrawing                   Written                                 ready         ready             SendRestart
//	early                         FinishMessage LoadMessage RenewMessage  forgotten     -
//	early                         FinishMessage LoadMessage RenewMessage  wanted        -                 Ended SendFinish
//	early                         FinishMessage LoadMessage RenewMessage  unwanted      -                 Ended
//	early prefill awaiting ready  FinishMessage                           over          -                 Ended
//	partial finishing sending     FinishMessage                           over          ending            StopWrite
//	withdrawing                   FinishMessage                           over          ending-withdrawn
//	early prefill awaiting ready  ProbeReplied                            absent        -                 Ended
//	partial finishing sending     ProbeReplied                            absent        ending            StopWrite
//	withdrawing                   ProbeReplied                            absent        ending-withdrawn
//	early prefill awaiting ready  Cancel Close Tick                       wanted        -                 Ended SendFinish
//	early awaiting ready          Tick                                    unwanted      -                 Ended
//	early prefill awaiting ready  Cancel Close                            unwanted      -                 Ended
//	prefill awaiting ready        Remapped                                wanted        -                 Ended SendFinish
//	prefill awaiting ready        Remapped                                unwanted      -                 Ended
//	prefill awaiting              MomentFailed                            wanted        -                 Ended SendFinish
//	prefill awaiting              MomentFailed                            unwanted      -                 Ended
//	partial finishing sending     Cancel Close Remapped Tick              -             ending            SendFinish StopWrite
//	partial finishing             MomentFailed                            -             ending            SendFinish StopWrite
//	withdrawing                   Cancel Close MomentFailed Remapped      -             ending-withdrawn  SendFinish
//	refused                       Cancel Close FinishMessage LoadMessage  -             -                 Ended
//	refused                       ProbeReplied Remapped Tick              -             -                 Ended
//	any                           Abandon                                 -             -                 Ended
//
// P agents (D), each of which has claims or loads waiting for it:
//
//	from                                 event                          guard     to            actions
//	-                                    LoadAnswered Resolved Revoked  -         resting
//	resting                              Resolved                       -         fresh
//	asking                               Resolved                       -         asking-fresh
//	resting fresh                        Turn                           due       asking        SendRenew
//	fresh                                Turn                           new       asking        SendRenew
//	fresh                                Turn                           empty     resting
//	resting fresh                        Turn                           unneeded  -
//	any                                  Turn                           silent    -             Forget
//	asking                               RenewReplied                   last      resting
//	asking-fresh                         RenewReplied                   last      fresh
//	resting                              RenewReplied                   more      asking
//	fresh                                RenewReplied                   more      asking-fresh
//	any                                  RenewReplied                   silent    -             Forget
//	any                                  RenewReplied                   absent    -             Forget
//	any                                  Idle                           -         -
//
// D agents (P), each of which has offers and has lost its connections:
//
//	from                                 event         guard       to             actions
//	-                                    PeerDown      -           asking         SendProbe
//	resting                              Tick          due         asking         SendProbe
//	absent                               Tick          due         asking-absent  SendProbe
//	resting absent                       Tick          late        -
//	resting absent                       Tick          unneeded    -
//	asking resting asking-absent absent  ProbeReplied  unanswered  resting
//	asking resting asking-absent absent  ProbeReplied  absent      absent
//	asking-absent absent                 ProbeReplied  gone        gone
//	asking resting asking-absent absent  ProbeReplied  answered    -
//	gone                                 ProbeReplied  -           -
//	any                                  Idle          -           -
package half
