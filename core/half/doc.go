// Package half has the halves of transfers: D's claims and loads, P's offers. A half knows one peer, and not whether it is a part of a
// transfer between several ranks: who stands [Above] knows.
//
// # The states
//
// Each half is in one of the states below, which claim.go, load.go and offer.go explain.
// "-" stands for no half: before its begin and after its end. A row is mostly one call of
// claimTo, loadTo or offerTo. Settle tells who stands above how a half ends. An event is a type of [core.Event], or
// one of three that an event may bring about: FanOut (a D names the first part of a
// transfer), PartFails (another part of the same fan-in has failed), PeerGone (a P agent
// does not answer any more). A moment that has not passed in time is a MomentFailed too.
//
// An action with "?" happens in some of the cases only: the parts of a fan-in or
// fan-out have one Report together, and a peer that is gone, or that has said the end
// itself, is told nothing. Abandon is not in the tables: it ends a half in any state
// and only reports it. TestSim and TestTranscripts hold the machine to these tables.
// core/machine/testdata/table/untaken.txt has those of their rows that no seed of TestSim takes, each with the reason.
//
// Claims (D), of which claimPeerGone says what P's death makes of one:
//
//	from        event                            to          actions
//	-           ClaimRequest                     resolving   Resolve
//	-           ResolvedParts                    asked
//	-           ResolvedParts                    relocating  Resolve
//	resolving   Resolved                         asked
//	resolving   Resolved                         backoff
//	resolving   Resolved                         void
//	resolving   Resolved                         relocating  Resolve
//	resolving   LoadRequest                      -           Resolve
//	resolving   Cancel Close ResolvedParts       -
//	resolving   Resolved Tick                    -           Report?
//	backoff     Tick                             resolving   Resolve
//	backoff     Tick                             relocating  Resolve
//	backoff     LoadRequest                      -           Resolve
//	backoff     Cancel Close                     -
//	backoff     Tick PartFails                   -           Report?
//	asked       RenewReplied                     kept
//	asked       FinishMessage RenewReplied       void
//	asked       PeerGone                         relocating  Resolve
//	asked       PeerGone                         backoff
//	asked       PeerGone                         -           Report? Resolve? SendFinish?
//	asked       LoadRequest                      -           Resolve? SendFinish?
//	asked       Cancel Close                     -           SendFinish
//	asked       FinishMessage RenewReplied Tick  -           Report? SendFinish?
//	asked       PartFails                        -           SendFinish
//	kept        FinishMessage RenewReplied       void
//	kept        PeerGone                         void        SendFinish?
//	kept        PeerGone                         -           Report? SendFinish?
//	kept        LoadRequest                      -           Resolve? SendFinish?
//	kept        Cancel Close                     -           SendFinish
//	kept        FinishMessage RenewReplied Tick  -           Report? SendFinish?
//	kept        PartFails                        -           SendFinish
//	relocating  Resolved                         asked
//	relocating  Resolved                         backoff
//	relocating  Resolved                         void
//	relocating  LoadRequest                      -           Resolve
//	relocating  Cancel Close                     -
//	relocating  ResolvedParts                    -           Report?
//	relocating  Resolved                         -           Report? SendFinish?
//	relocating  Tick PartFails                   -           Report?
//	void        LoadRequest                      -           Resolve?
//	void        Cancel Close Tick                -
//
// Loads (D):
//
//	from        event                            to          actions
//	-           LoadRequest                      resolving   Resolve SendFinish?
//	-           LoadRequest                      relocating  Resolve
//	-           LoadRequest ResolvedParts        expecting   Expect
//	-           LoadRequest ResolvedParts        awaiting
//	-           LoadRequest ResolvedParts        ending      Expect Revoke SendFinish
//	resolving   Resolved                         expecting   Expect
//	resolving   Resolved                         awaiting
//	resolving   MomentFailed                     -           Report?
//	resolving   Resolved ResolvedParts           -           Report? SendFinish?
//	resolving   Cancel Close Remapped            -           Report
//	relocating  Resolved                         expecting   Expect
//	relocating  Resolved                         awaiting
//	relocating  MomentFailed                     -           Report?
//	relocating  Resolved ResolvedParts           -           Report? SendFinish?
//	relocating  Cancel Close Tick PartFails      -           Report?
//	relocating  Remapped                         -           Report?
//	awaiting    MomentPassed                     expecting   Expect
//	awaiting    PeerGone                         relocating  Resolve
//	awaiting    PeerGone RenewReplied            -           Report? SendFinish?
//	awaiting    FinishMessage                    -           Report?
//	awaiting    MomentFailed PartFails Remapped  -           Report? SendFinish
//	awaiting    Cancel Close Tick                -           Report? SendFinish
//	expecting   Expecting                        requesting  SendLoad
//	expecting   Expecting                        moving      Revoke
//	expecting   Expecting FinishMessage          ending      Revoke SendFinish?
//	expecting   RenewReplied                     ending      Revoke
//	expecting   Cancel Close PartFails Tick      ending      Revoke SendFinish
//	expecting   Remapped                         ending      Revoke SendFinish
//	expecting   Received                         -           Report? SendFinish
//	expecting   Received                         ending      Revoke SendFinish
//	requesting  LoadAnswered                     waiting
//	requesting  LoadAnswered                     moving      Revoke
//	requesting  LoadAnswered FinishMessage       ending      Revoke SendFinish?
//	requesting  RestartMessage                   restarting  Revoke
//	requesting  Received                         -           Report? SendFinish
//	requesting  Received                         ending      Revoke SendFinish
//	requesting  Cancel Close PartFails Tick      ending      Revoke SendFinish
//	requesting  Remapped                         ending      Revoke SendFinish
//	waiting     Received                         -           Report? SendFinish
//	waiting     Received                         ending      Revoke SendFinish
//	waiting     FinishMessage RenewReplied       ending      Revoke SendFinish?
//	waiting     RestartMessage RenewReplied      restarting  Revoke
//	waiting     PeerGone                         ending      Revoke SendFinish?
//	waiting     Cancel Close PartFails Tick      ending      Revoke SendFinish
//	waiting     Remapped                         ending      Revoke SendFinish
//	moving      Revoked                          relocating  Resolve
//	moving      Cancel Close FinishMessage       ending
//	moving      PartFails Remapped               ending
//	restarting  Revoked                          expecting   Expect
//	restarting  Cancel Close PartFails Remapped  ending      SendFinish
//	restarting  Tick                             ending      SendFinish
//	restarting  FinishMessage RenewReplied       ending
//	ending      Revoked                          -           Report?
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
