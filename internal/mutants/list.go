package main

// mutant is a deliberate defect: old, which stands once in file, becomes now.
type mutant struct {
	name, breaks string
	file         string
	old, now     string
}

const (
	loadFile  = "core/load.go"
	offerFile = "core/offer.go"
	peerFile  = "core/peer.go"
	coreFile  = "core/machine.go"
	wireFile  = "core/coretest/sim/transport.go"
)

var mutants = []mutant{
	{"no-fence", "a load is reported before its fence", loadFile,
		"\t\tm.fence(ld)\n\t}\n}\n\nfunc (m *Machine) fence",
		"\t\tm.act(Revoke{ID: ld.id})\n\t\tm.reportLoad(now, ld)\n\t}\n}\n\nfunc (m *Machine) fence"},
	{"no-fence-again", "a load starts over without a fence", loadFile,
		"\tld.again = true\n\tm.fence(ld)\n", "\tm.resolveAgain(ld)\n"},
	{"no-reap", "early loads are never reaped", offerFile,
		"deadline: now.Add(m.opt.EarlyLoad)}", "deadline: now.Add(1000 * m.opt.EarlyLoad)}"},
	{"word-alone", "P's word that all is sent ends the load well", peerFile,
		"if ld.sent++; ld.sent >= 3 {", "if ld.sent++; ld.sent >= 1 {\n\t\t\t\tm.endLoad(now, ld, OK, \"\", false)\n\t\t\treturn\n\t\t}\n\t\tif ld.sent >= 3 {"},
	{"no-renewal", "a renewal does not prolong the lease", offerFile,
		"\tif of.state != offerEarly && of.state != offerStopping {\n\t\tof.deadline = now.Add(m.lease(of))\n\t}\n", ""},
	{"never-renews", "D never renews", peerFile,
		"\t\t\tm.act(*r)\n", "\t\t\tp.asking, p.heard = false, now\n"},
	{"no-expiry", "an offer that nobody loads never expires", offerFile,
		"of.offered, of.deadline = now, now.Add(m.opt.Lease)", "of.offered, of.deadline = now, now.Add(1000*m.opt.Lease)"},
	{"no-finish", "P is not told that D has aborted a load", loadFile,
		"\t\tif tell {\n", "\t\tif tell && code != Cancelled {\n"},
	{"no-finish-of-claims", "P is not told that D has aborted a claim", loadFile,
		"if tell && ld.code == OK { // else P has ended it", "if tell && ld.code != OK {"},
	{"no-finish-from-p", "D is not told that P has aborted", offerFile,
		"\tif tell && of.peer != \"\" {", "\tif tell && of.peer != \"\" && code != Cancelled {"},
	{"no-tombstones", "what has ended is forgotten at once", coreFile,
		"\tt.byID[id] = tombstone{code: code, reason: reason, offered: offered}", "\tdelete(t.byID, id)\n\tt.order = nil"},
	{"second-load", "a second decode engine's load takes the first one's place", offerFile,
		"if of != nil && of.peer != \"\" && of.peer != l.Peer {", "if of != nil && of.peer != \"\" && of.peer != l.Peer && of.state != offerPrefill {"},
	{"second-claim", "a second decode engine's claim takes the first one's place", offerFile,
		"if claim && of.peer == \"\" {", "if claim && of.load == nil {"},
	{"claim-not-kept", "a claim does not prolong the lease", offerFile,
		"\tif of.state != offerEarly && of.state != offerStopping {\n\t\tof.deadline", "\tif of.state != offerEarly && of.state != offerStopping && !claim {\n\t\tof.deadline"},
	{"claim-not-renewed", "D sends a claim but once", peerFile,
		"if ld.known == \"\" || due(ld.peer) {", "if ld.known == \"\" {"},
	{"claim-for-ever", "a claim that no load follows never ends", peerFile,
		"if ld.claim && (!now.Before(ld.until) ||", "if ld.claim && (now.IsZero() ||"},
	{"claim-forgets-end", "what P has given up while it was claimed is forgotten", loadFile,
		"\tcase ld.code == OK:\n\t\tld.doom(code, reason)\n", ""},
	{"no-stop", "a write that is to end is not stopped, and reported while it runs", offerFile,
		"\t\tof.state = offerStopping\n\t\tm.act(StopWrite{ID: of.id})\n\t\treturn\n", ""},
	{"report-before-written", "an offer is reported when its write was told to stop", offerFile,
		"\t\tm.act(StopWrite{ID: of.id})\n\t\treturn\n", "\t\tm.act(StopWrite{ID: of.id})\n"},
	{"gone-unnoticed", "a peer that does not answer is asked for ever", peerFile,
		"return m.opt.PeerTimeout - 2*TickInterval", "return 1000 * m.opt.PeerTimeout"},
	{"no-probe", "P does not ask a D whose connections broke", peerFile,
		"\t\tm.probes[id] = &probe{since: now, asking: true}\n\t\tm.act(SendProbe{Peer: id})\n", ""},
	{"gone-at-once", "a D whose link is made anew counts as gone", peerFile,
		"p.absent < 2+int(m.absence(away)/TickInterval) {", "p.absent < 1 {"},
	{"gone-late", "P waits as long for a D that nobody listens as at its own server as for one in a cluster", peerFile,
		"	if away {\n		return m.patience()\n	}\n	return m.opt.PeerTimeout / 3\n", "	return m.patience()\n"},
	{"pause-is-silence", "the time in which a process did not run counts", peerFile,
		"\tif gap < maxGap {", "\tif gap < 1000*maxGap {"},
	{"stale-answer", "an answer to an earlier load of the same id counts", loadFile,
		"if ld == nil || ld.seq != seq || ld.state != loadResolving {", "if ld == nil || ld.state != loadResolving {"},
	{"stale-reply", "P's answer to an earlier load of the same id counts", loadFile,
		"if ld == nil || ld.seq != seq || ld.state != loadRequesting {", "if ld == nil || ld.state != loadRequesting {"},
	{"anybodys-finish", "any agent may end a transfer", offerFile,
		"\tif of != nil && of.peer != \"\" && of.peer != from {\n\t\treturn // not its transfer\n\t}\n", ""},
	{"unknown-is-sending", "P answers for transfers that it does not know", offerFile,
		"\tif of.peer != from || !claim && of.load == nil {\n\t\treturn Answer{Status: StatusUnknown}\n\t}\n",
		"\tif of.peer != from || !claim && of.load == nil {\n\t\treturn Answer{Status: StatusSending}\n\t}\n"},
	{"ended-is-sending", "P's answer hides that it has given a transfer up", offerFile,
		"\t\t\treturn Answer{StatusEnded, peerCode(t.code), t.reason}\n", "\t\t\treturn Answer{Status: StatusSending}\n"},
	{"to-the-successor", "a load that P had not answered goes on with the agent in P's place", loadFile,
		"ld.tried != peer && ld.since.Before(opened):", "ld.tried != peer && ld.since.IsZero():"},
	{"waits-for-successor", "a load waits for as long as a look-up takes for an agent in P's place", peerFile,
		"\t\t\tlate && ld.tried != \"\" &&", "\t\t\tlate && ld.tried == \"nobody\" &&"},
	{"given-twice", "an aborted load is reported again when P is found", loadFile,
		"\t\tm.dropClaim(ld)\n\t\tld.given = true\n", "\t\tm.dropClaim(ld)\n"},
	{"finish-before-written", "D's word that it has all frees blocks that are still read", offerFile,
		"\t\tof.landed = true // the transport's own word, with its figures, is about to come\n\t\treturn\n",
		"\t\tm.reportOffer(now, of, TransferStats{})\n\t\treturn\n"},
	{"old-grant", "a region key is used again after a restart", wireFile,
		"return fmt.Sprintf(\"%s/%d\", a.id, a.grants)", "return fmt.Sprintf(\"%s/%d\", a.host.name, a.grants)"},
	{"late-fence", "bytes land for a while after a revoke", wireFile,
		"\tif e := a.armed[id]; e != nil {\n\t\ta.forget(e)\n\t}", "\tif e := a.armed[id]; e != nil {\n\t\tdelete(a.armed, id)\n\t\ta.after(20*time.Millisecond, func() { delete(a.byGrant, e.grant) })\n\t}"},
	{"notification-alone", "the last frame ends the load, whatever is missing", wireFile,
		"\tcase e.got == len(e.dst):\n", "\tcase f.pos == len(e.dst)-1:\n"},
	{"early-completion", "the transport tells of the end before the last bytes", wireFile,
		"\tcase e.got == len(e.dst):\n", "\tcase e.got >= max(1, len(e.dst)-1):\n"},
}
