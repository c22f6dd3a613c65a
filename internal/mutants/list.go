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
		"\tm.fence(ld)\n}\n\n// Received",
		"\tld.again = false\n\tld.state, ld.peer = loadResolving, \"\"\n\tm.act(Resolve{ID: ld.id, Seq: ld.seq, From: ld.from, Fresh: true})\n}\n\n// Received"},
	{"no-reap", "early loads are never reaped", offerFile,
		"deadline: now.Add(m.opt.EarlyLoad)}", "deadline: now.Add(1e4 * m.opt.EarlyLoad)}"},
	{"notification-alone", "P's word that all is sent ends the load well", peerFile,
		"if ld.sent++; ld.sent >= 3 {", "if ld.sent++; ld.sent >= 1 {\n\t\t\t\tm.endLoad(now, ld, OK, \"\")\n\t\t\t\tcontinue\n\t\t\t}\n\t\t\tif ld.sent >= 3 {"},
	{"no-renewal", "a renewal does not prolong the lease", offerFile,
		"\t\tif of.state != offerEarly && of.state != offerStopping {\n\t\t\tof.deadline = now.Add(of.load.Lease)\n\t\t}\n", ""},
	{"never-renews", "D never renews", peerFile,
		"m.act(SendRenew{Peer: id, IDs: waiting[id]})", "p.asking = false"},
	{"no-expiry", "an offer that nobody loads never expires", offerFile,
		"of.offered, of.deadline = now, now.Add(m.opt.Lease)", "of.offered, of.deadline = now, now.Add(1e4*m.opt.Lease)"},
	{"no-finish", "P is not told that D has aborted", loadFile,
		"if code != PeerLost && code != PeerCancelled {", "if code != PeerLost && code != PeerCancelled && code != Cancelled {"},
	{"no-finish-from-p", "D is not told that P has aborted", offerFile,
		"\tif tell && of.load != nil {", "\tif tell && of.load != nil && code != Cancelled {"},
	{"no-tombstones", "what has ended is forgotten at once", coreFile,
		"\tt.byID[id] = tombstone{code, reason, offered}", "\tdelete(t.byID, id)\n\tt.order = nil"},
	{"second-load", "a second decode engine's load takes the first one's place", offerFile,
		"\t\treturn Refused, fmt.Sprintf(\"transfer %q is being loaded by decode agent %s already\", string(l.ID), of.load.Peer)\n",
		"\t\tif of.state == offerEarly {\n\t\t\tm.earlyBlocks += countBlocks(l.Blocks) - countBlocks(of.load.Blocks)\n\t\t}\n\t\tof.load = &l\n\t\treturn OK, \"\"\n"},
	{"no-stop", "a write that is to end is not stopped, and reported while it runs", offerFile,
		"\t\tof.state = offerStopping\n\t\tm.act(StopWrite{ID: of.id})\n\t\treturn\n", ""},
	{"report-before-written", "an offer is reported when its write was told to stop", offerFile,
		"\t\tm.act(StopWrite{ID: of.id})\n\t\treturn\n", "\t\tm.act(StopWrite{ID: of.id})\n"},
	{"gone-unnoticed", "a peer that does not answer is asked for ever", peerFile,
		"if absent || p.suspect || silent >= m.opt.PeerTimeout {", "if silent < 0 {"},
	{"stale-answer", "an answer to an earlier load of the same id counts", loadFile,
		"if ld == nil || ld.seq != seq || ld.state != loadResolving {", "if ld == nil || ld.state != loadResolving {"},
	{"stale-reply", "P's answer to an earlier load of the same id counts", loadFile,
		"if ld == nil || ld.seq != seq || ld.state != loadRequesting {", "if ld == nil || ld.state != loadRequesting {"},
	{"anybodys-finish", "any agent may end a transfer", offerFile,
		"\tif of != nil && of.load != nil && of.load.Peer != from {\n\t\treturn // not its transfer\n\t}\n", ""},
	{"unknown-is-sending", "P answers for transfers that it does not know", offerFile,
		"\t\tof := m.offers[id]\n\t\tif of == nil {\n", "\t\tout[i] = StatusSending\n\t\tof := m.offers[id]\n\t\tif of == nil {\n"},
	{"given-twice", "an aborted load is reported again when P is found", loadFile,
		"\t\tld.given = true\n", ""},
	{"finish-before-written", "D's word that it has all frees blocks that are still read", offerFile,
		"\t\tof.landed = true // the transport's own word, with its figures, is about to come\n\t\treturn\n",
		"\t\tm.reportOffer(now, of, TransferStats{})\n\t\treturn\n"},
	{"old-grant", "a region key is used again after a restart", wireFile,
		"return fmt.Sprintf(\"%s/%d\", a.id, a.grants)", "return fmt.Sprintf(\"%s/%d\", a.host.name, a.grants)"},
	{"late-fence", "bytes land for a while after a revoke", wireFile,
		"\tif e := a.armed[id]; e != nil {\n\t\ta.forget(e)\n\t}", "\tif e := a.armed[id]; e != nil {\n\t\tdelete(a.armed, id)\n\t\ta.after(20*time.Millisecond, func() { delete(a.byGrant, e.grant) })\n\t}"},
	{"early-completion", "the transport tells of the end before the last bytes", wireFile,
		"case e.got == len(e.dst):", "case e.got >= max(1, len(e.dst)-1):"},
}
