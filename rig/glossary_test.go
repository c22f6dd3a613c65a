package rig

import (
	"go/ast"
	"go/parser"
	"maps"
	"os"
	"path"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// means says which types are called by a word of the glossary, or by two or three words of which the last are such. These types have
// the glossary's meaning. Each is the thing itself, one side's record of the thing, or what one side says of it.
var means = map[string][]string{
	"engine":        {"bootstrap.Engine", "launch.engine", "launch.sglangEngine", "launch.vllmEngine"},
	"rank":          {"bootstrap.Rank", "kv.Rank", "kv.Ranks", "node.joinedRank", "node.joinedRanks", "proxy.rank"},
	"agent":         {"node.Agent", "wire.Agent"},
	"peer":          {"core/half.peer", "node.peer", "tcp.inPeer", "tcp.outPeer"},
	"transfer":      {"tcp.doneTransfer"},
	"machine":       {"core/machine.Machine", "node.lockedMachine"},
	"half":          {"node.half"},
	"offer":         {"core.PartialOffer", "core/half.Offer"},
	"partial offer": {"core.PartialOffer"},
	"withdraw":      {"core.Withdraw"},
	"claim":         {"core/half.claim"},
	"load":          {"core.AnswerLoad", "core.SendLoad", "core/half.load", "wire.Load"},
	"moment":        {"core.Moment"},
	"revoke":        {"core.Revoke"},
	"completion":    {"node.completions"},
	"tombstone":     {"core/half.Tombstone", "core/half.Tombstones"},
	"fan in":        {"core/machine.loadFanIn"},
	"fan out":       {"core/machine.fanOut"},
	"selection":     {"kv.Selection"},
	"region":        {"cuda.Region", "kv.Region", "rdma.keyedRegion"},
	"layout":        {"kv.Layout"},
	"match":         {"kv.Match"},
	"mapping":       {"kv.mapping"},
	"plan":          {"kv.Plan", "node.receivePlan"},
	"grant":         {"rdma.grant", "rdma.grants"},
	"ticket":        {"wire.Ticket"},
	"control plane": {"node.controlPlane"},
	"link":          {"natsbus.link"},
	"session":       {"natsbus.keySessions", "natsbus.requesterSession", "natsbus.requesterSessions", "natsbus.responderSession", "natsbus.responderSessions", "natsbus.sealSession"},
	"transport":     {"core.Transport", "local.Transport", "node.commonTransport", "node.transports", "rdma.Transport", "tcp.Transport"},
	"stream":        {"tcp.inStream", "tcp.outStream"},
	"lane":          {"rdma.lane"},
	"path":          {"rdma.path"},
	"room":          {"bootstrap.room", "bootstrap.rooms"},
}

// meansElse are types that such a word calls something else, with the reason. No package has both meanings of a word.
var meansElse = map[string]string{
	"cuda.Peer":                      "the memory of the agent at the other end, opened by CUDA",
	"cuda.Transfer":                  "the copies of one transfer in one direction",
	"cuda.mapping":                   "CUDA's word: memory mapped by a handle",
	"hostmem.mapping":                "the kernel's word: a line of /proc/PID/maps",
	"local.link":                     "a socket between two agents of one host",
	"local.outLink":                  "the same on P's side",
	"proxy.load":                     "how busy a server is: the word of load balancers",
	"rdma.laneOffer":                 "a message of the handshake between queue pairs",
	"rdma/internal/verbs.Completion": "libibverbs' word: how a posted request has ended",
	"rdma/internal/verbs.Transport":  "libibverbs' word: enum ibv_transport_type",
}

// glossaryWord is a cell of the glossary's first column.
var glossaryWord = regexp.MustCompile(`(?m)^\| ([^|]+?) \|`)

// glossary are the words of ARCHITECTURE.md, as parts of names.
func glossary(t *testing.T) (words [][]string) {
	t.Helper()
	text, err := os.ReadFile("../ARCHITECTURE.md")
	if err != nil {
		t.Fatal(err)
	}
	_, section, _ := strings.Cut(string(text), "## Words")
	section, _, _ = strings.Cut(section, "\n## ")
	for _, cell := range glossaryWord.FindAllStringSubmatch(section, -1) {
		if cell[1] == "word" || strings.HasPrefix(cell[1], "---") {
			continue
		}
		for _, word := range regexp.MustCompile(`[,;] `).Split(cell[1], -1) {
			word, _, _ = strings.Cut(word, " (")
			words = append(words, strings.FieldsFunc(word, func(c rune) bool { return c == ' ' || c == '-' }))
		}
	}
	return words
}

// TestGlossary: a type whose name ends with a word of the glossary has the glossary's meaning, or is known to have another one. A new
// type of such a name goes into one of the two lists, or gets another name.
func TestGlossary(t *testing.T) {
	words := glossary(t)
	if len(words) < 30 {
		t.Fatalf("the glossary has %d words", len(words))
	}
	seen, elsewhere := map[string]bool{}, map[string]bool{} // "word type"; type
	for name, f := range productFiles(t, parser.SkipObjectResolution) {
		for _, d := range f.Decls {
			decl, ok := d.(*ast.GenDecl)
			if !ok {
				continue
			}
			for _, s := range decl.Specs {
				spec, ok := s.(*ast.TypeSpec)
				if !ok {
					continue
				}
				of, parts := path.Dir(name)+"."+spec.Name.Name, wordsOf(spec.Name.Name)
				for _, word := range words {
					if !endsWith(parts, word) {
						continue
					}
					text := strings.Join(word, " ")
					seen[text+" "+of] = true
					switch reason, other := meansElse[of]; {
					case other && reason != "":
						elsewhere[of] = true
						for _, with := range means[text] {
							if strings.TrimSuffix(with, path.Ext(with)) == path.Dir(name) {
								t.Errorf("%s and %s are of one package, and %q means two things there", of, with, text)
							}
						}
					case !slices.Contains(means[text], of):
						t.Errorf("the type %s is called by the glossary's word %q: if it has that meaning, means must list it; if not, give it another name, or list it in meansElse with the reason", of, text)
					}
				}
			}
		}
	}
	for word, types := range means {
		for _, of := range types {
			if !seen[word+" "+of] {
				t.Errorf("means has %s for %q: there is no such word, or no such type", of, word)
			}
			if meansElse[of] != "" {
				t.Errorf("%s is in both lists", of)
			}
		}
	}
	for _, of := range slices.Sorted(maps.Keys(meansElse)) {
		if !elsewhere[of] {
			t.Errorf("meansElse has %s: there is no such type, no word of the glossary is in its name, or it has no reason", of)
		}
	}
}

// endsWith says whether a name's last words are these, or their plural.
func endsWith(name, words []string) bool {
	from := len(name) - len(words)
	if from < 0 {
		return false
	}
	last := len(words) - 1
	return slices.Equal(name[from:len(name)-1], words[:last]) && (name[len(name)-1] == words[last] || name[len(name)-1] == words[last]+"s")
}
