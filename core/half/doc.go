// Package half has the halves of transfers: D's claims and loads, P's offers. A half knows one peer, and not whether it is a part of a
// transfer between several ranks: who stands [Above] knows.
//
// # The states
//
// Each half is in one of the states below, which claim.go, farewell.go, load.go and offer.go explain.
// "-" stands for no half: before its begin and after its end. A row is mostly one call of
// claimTo, loadTo or offerTo. Settle tells who stands above how a half ends. An event is a type of [core.Event], or
// one of five that an event may bring about: Divided (what was found to have several ranks goes on as one half for
// each), FanOut (a D names the first part of a transfer), Lost (the engine is told of a lost claim), PartFails (a
// part of the same fan-in has failed), PeerGone (a P agent does not answer any more). A moment that has not passed in time is a
// MomentFailed too.
//
// The tables of claims, farewells and loads are functions: the state, the event and the guard decide the next state and all actions.
// [Guard] names the cases, "-" where there is but one. A row may have several states and events; "any" is each state but "-", and "="
// the state from which the row goes. What has no row changes nothing and wants nothing. Among the actions, Ended and Lost are what the
// half tells who stands above: it has ended, or it cannot succeed any more and, if it is a load, is to end when its fence has
// returned. Farewell makes a farewell: P is being looked up, and is told then. SendFinish+ is one for each rank that was found. After
// ResolvedParts each rank that was found counts as one Resolved. Await, SendRenew, SendProbe, Yield, answers, and the Forget of PeerGone are
// of no row.
//
// In the table of offers an action with "?" happens in some of the cases only: the parts of a fan-out have one Report
// together, and a peer that is gone, or that has said the end itself, is told nothing. Abandon is not in it: it ends an offer
// in any state and only reports it. TestSim and TestTranscripts hold the machine to all tables.
// core/machine/testdata/table/untaken.txt has those of their rows that no seed of TestSim takes, each with the reason.
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
//	resolving relocating                         Resolved                     refused       void           Lost
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
//	resolving relocating                         Tick                         expired       -              Ended Farewell
//	backoff backoff-again void                   Tick                         expired       -              Ended
//	any                                          LoadRequest                  same          -
//	asked asked-again kept                       LoadRequest                  other         -              Ended SendFinish
//	resolving relocating                         LoadRequest                  other         -              Ended Farewell
//	backoff backoff-again void                   LoadRequest                  other         -              Ended
//	asked asked-again kept                       Cancel Close Lost PartFails  -             -              Ended SendFinish
//	resolving relocating                         Cancel Lost                  -             -              Ended Farewell
//	relocating                                   PartFails                    -             -              Ended Farewell
//	resolving relocating                         Close                        -             -              Ended
//	backoff backoff-again void                   Cancel Close Lost            -             -              Ended
//	backoff-again void                           PartFails                    -             -              Ended
//	any                                          Abandon                      -             -
//
// Farewells (D), each of a claim or load that has ended while P was looked up:
//
//	from  event                             guard      to    actions
//	-     Cancel Close LoadRequest Lost     -          kept
//	-     MomentFailed PartFails            -          kept
//	-     Remapped Tick                     -          kept
//	kept  Resolved                          found      -     SendFinish
//	kept  Resolved                          not-found  -
//	kept  ResolvedParts                     -          -     SendFinish+
//	kept  ClaimRequest LoadRequest Divided  -          -
//	kept  Close Abandon                     -          -
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
//	resolving relocating          Resolved                         refused       -           Ended
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
//	resolving relocating          MomentFailed                     -             -           Ended Farewell
//	awaiting                      MomentFailed                     -             -           Ended SendFinish
//	resolving relocating          Cancel Close Remapped            -             -           Ended Farewell
//	relocating                    PartFails                        -             -           Ended Farewell
//	awaiting                      Cancel Close PartFails Remapped  -             -           Ended SendFinish
//	expecting requesting waiting  Cancel Close PartFails Remapped  -             ending      Lost Revoke SendFinish
//	moving                        Cancel Close PartFails Remapped  -             ending      Lost
//	restarting                    Cancel Close PartFails Remapped  -             ending      Lost SendFinish
//	any                           Abandon                          -             -           Ended
//
// Offers (P):
//
//	from              event                               to                actions
//	-                 Announce PartialOffer FanOut        prefill
//	-                 LoadMessage RenewMessage FanOut     early
//	-                 OfferRequest FanOut                 ready
//	-                 OfferRequest FanOut                 awaiting
//	-                 FanOut                              partial           Write
//	-                 FanOut                              finishing         Write
//	-                 FanOut                              sending           Write
//	early             Announce PartialOffer               prefill
//	early             PartialOffer                        partial           Write
//	early             OfferRequest                        ready
//	early             OfferRequest                        awaiting
//	early             OfferRequest                        sending           Write
//	early             OfferRequest PartialOffer           -                 Report? SendFinish
//	early             Cancel Close Tick                   -                 SendFinish?
//	early             LoadMessage RenewMessage            -                 SendFinish?
//	early             FinishMessage                       -                 SendFinish?
//	early             ProbeReplied                        -
//	prefill           LoadMessage PartialOffer            partial           Write
//	prefill           OfferRequest                        ready
//	prefill           OfferRequest                        awaiting
//	prefill           MomentPassed                        partial           Write
//	prefill           MomentPassed                        -                 Report? SendFinish
//	prefill           MomentFailed                        -                 Report? SendFinish?
//	prefill           OfferRequest                        sending           Write
//	prefill           OfferRequest                        -                 Report? SendFinish
//	prefill           LoadMessage PartialOffer            -                 Report? SendFinish
//	prefill           Cancel Close Remapped Tick          -                 Report? SendFinish?
//	prefill           FanOut FinishMessage ProbeReplied   -                 Report?
//	awaiting          MomentPassed                        ready
//	awaiting          MomentPassed                        sending           Write
//	awaiting          MomentPassed LoadMessage            finishing         Write
//	awaiting          MomentPassed LoadMessage            -                 Report? SendFinish
//	awaiting          MomentFailed Cancel Close Tick      -                 Report? SendFinish?
//	awaiting          Remapped                            -                 Report? SendFinish?
//	awaiting          FanOut FinishMessage ProbeReplied   -                 Report?
//	partial           OfferRequest                        sending           Write
//	partial           OfferRequest                        finishing
//	partial           MomentPassed MomentFailed           ending            SendFinish StopWrite
//	partial           OfferRequest PartialOffer           ending            SendFinish StopWrite
//	partial           Withdraw                            withdrawing       StopWrite
//	partial           Withdraw                            ending-withdrawn  StopWrite
//	partial           Written                             -                 Report? SendFinish?
//	partial           Written                             prefill           SendRestart
//	partial           Written                             refused           SendFinish
//	partial           Cancel Close Remapped Tick          ending            SendFinish StopWrite
//	partial           FinishMessage ProbeReplied          ending            StopWrite
//	finishing         MomentPassed                        sending           Write
//	finishing         MomentPassed MomentFailed           ending            SendFinish StopWrite
//	finishing         Written                             -                 Report? SendFinish?
//	finishing         Written                             awaiting          SendRestart
//	finishing         Written                             refused           SendFinish
//	finishing         Cancel Close Remapped Tick          ending            SendFinish StopWrite
//	finishing         FinishMessage ProbeReplied          ending            StopWrite
//	ready             LoadMessage                         sending           Write
//	ready             LoadMessage                         -                 Report? SendFinish
//	ready             Cancel Close Remapped Tick          -                 Report? SendFinish?
//	ready             FanOut FinishMessage ProbeReplied   -                 Report?
//	sending           Written                             -                 Report? SendFinish?
//	sending           Written                             ready             SendRestart
//	sending           Written                             refused           SendFinish
//	sending           Cancel Close Remapped Tick          ending            SendFinish StopWrite
//	sending           FinishMessage ProbeReplied          ending            StopWrite
//	withdrawing       Written                             prefill           SendRestart
//	withdrawing       Written                             ready             SendRestart
//	withdrawing       Written                             awaiting          SendRestart
//	withdrawing       MomentFailed                        ending-withdrawn  SendFinish
//	withdrawing       Cancel Close Remapped               ending-withdrawn  SendFinish
//	withdrawing       FinishMessage ProbeReplied          ending-withdrawn
//	ending            Withdraw                            ending-withdrawn
//	ending            Written                             -                 Report?
//	ending-withdrawn  Written                             -                 Report?
//	refused           FinishMessage LoadMessage Tick      -                 Report?
//	refused           Cancel Close Remapped ProbeReplied  -                 Report?
package half
