package rig

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"unicode"
)

// replaced is a word that the field does not use for what it named here, with the word that has replaced it. It may not come back
// as a part of a name that is declared in these folders: an identifier, a file's name, a metric, a log field. A folder stands for
// those below it too, and a word for its plural. docs/design/decisions.md tells readers of most of these, and of some that no test can hold.
type replaced struct {
	word, by string
	folders  []string
}

var (
	bus       = []string{"natsbus"}
	decisions = []string{"core"}
	sameHost  = []string{"local"}
	suite     = []string{"rig/coretest"}
	streams   = []string{"tcp"}
	transfers = []string{"tcp", "rdma", "cuda", "devices"}
	ours      = []string{"natsbus", "tcp", "rdma", "bootstrap", "cuda", "devices"}
)

var names = []replaced{
	{"answerer", "responder", bus},
	{"arrows", "fileDependencies", []string{"rig/filedeps", "kv", "natsbus", "node"}},
	{"asker", "requester", bus},
	{"asker", "rpcClient", []string{"node"}},
	{"barred", "restricted", []string{"node"}},
	{"beside", "baseline", []string{"cli"}},
	{"beside", "comparedWith or honestLoad", []string{"rig/attack/figures_test.go", "rig/attack/hostilep_frames_test.go"}},
	{"beside", "contended", []string{"rig/chaos/slow.go"}},
	{"blip", "reset", []string{"rig/chaos"}},
	{"board", "rankListing", []string{"node"}},
	{"board", "signalHub", suite},
	{"breadth", "streamTuner", streams},
	{"claim", "response (of a handshake), covered (positions)", []string{"local", "tcp"}},
	{"crowd", "the clients or agents that are meant", ours},
	{"crowded", "queueFull (metric queue_full), or the victim of an eviction", ours},
	{"deaf", "stalled", ours},
	{"deaf", "unresponsive (no answer) or stalled (does not read)", []string{"node", "rig/chaos"}},
	{"disguise", "smuggling, findEncoded", []string{"proxy"}},
	{"endings", "completions", []string{"node"}},
	{"entrance", "clientHandshake", ours},
	{"evil", "attacker", ours},
	{"far", "remote", []string{"rdma/conn.go", "rdma/connect.go"}},
	{"far", "DeviceMemory", []string{"rig/testdouble/engine"}},
	{"far", "DeviceMemory", []string{"rig/coretest", "rig/conformance/suite"}},
	{"far", "otherGPU", []string{"cuda/pairs.go", "cuda/queue.go", "cuda/region.go"}},
	{"far", "peerMemory", sameHost},
	{"far", "source", []string{"cli/bench_local.go", "cli/synthetic"}},
	{"farewell", "pendingFinish", decisions},
	{"farewell", "drainTimeout, or TLS's close_notify", bus},
	{"forgetful", "unknownSession", ours},
	{"former", "previous", ours},
	{"former", "previousPeer", decisions},
	{"gate", "authenticator", ours},
	{"gate", "limiter", []string{"node"}},
	{"gate", "onChunk, or a validity page", suite},
	{"gate", "validityPage", sameHost},
	{"gift", "writePart", ours},
	{"giveback", "memrelease", []string{"internal"}},
	{"given", "inUse, or Payload of a WriteOp", []string{"core", "node/renew.go"}},
	{"given", "sendRanges", []string{"tcp/send_ranges.go"}},
	{"given", "positions, offered or released, by what is meant", []string{"rig/coretest/sim"}},
	{"goodbye", "deregisterTime", []string{"node"}},
	{"greet", "hello, authenticate or prove, by which side of a handshake it is", ours},
	{"greet", "handshake", sameHost},
	{"greet", "hello", suite},
	{"greeted", "hello", ours},
	{"greeting", "hello or handshake", ours},
	{"greeting", "pending", sameHost},
	{"greets", "hello", ours},
	{"growth", "pendingBlocks", decisions},
	{"guest", "joined", bus},
	{"guest", "joinedRank", []string{"node"}},
	{"guests", "joinedRanks", []string{"node"}},
	{"halves", "lockedMachine (the type), machine (fields)", []string{"node"}},
	{"inlet", "commandFilter", ours},
	{"intruder", "attacker", ours},
	{"keeper", "confirmedBy", decisions},
	{"keeper", "releaser", []string{"internal/memrelease"}},
	{"landing", "receivePlan", []string{"node"}},
	{"landing", "destination", sameHost},
	{"longs", "longQueue, or long requests", ours},
	{"look", "memoryCheck, check or poll", []string{"node/memorycheck.go", "node/step.go"}},
	{"losses", "connectionLoss", suite},
	{"mark", "requestTag, magic or separator", bus},
	{"mend", "reconnect", ours},
	{"mends", "reconnecting", ours},
	{"midst", "midTransfer", suite},
	{"nick", "shortName", bus},
	{"obey", "run", []string{"cli/synthetic", "rig/chaos"}},
	{"order", "command", []string{"cli/synthetic"}},
	{"order", "command", []string{"rig/coretest/remote.go", "rig/coretest/remote_process.go"}},
	{"orders", "callOrder", suite},
	{"outlet", "clientWriter", ours},
	{"patience", "timeout, or grace", []string{"natsbus", "tcp", "bootstrap"}},
	{"patrol", "watchdog", ours},
	{"patrol", "watchdog", sameHost},
	{"question", "query", bus},
	{"questions", "queries", bus},
	{"reach", "access", sameHost},
	{"reaches", "peerAccess", sameHost},
	{"registry", "agentMemory", []string{"rdma"}},
	{"renewal", "Remapping, or remapping", []string{"cuda", "devices", "rdma"}},
	{"scene", "scenario", []string{"rig/attack"}},
	{"slate", "recordBuffer", ours},
	{"span", "interval", []string{"internal/intervals", "local/receive.go", "local/write.go", "tcp/receive.go", "tcp/write.go"}},
	{"speaker", "messageSender", []string{"node"}},
	{"stir", "compact", []string{"internal/memrelease"}},
	{"storm", "stress", ours},
	{"strange", "invalid", ours},
	{"stranger", "unauthenticated, unknown or attacker, by what is meant", ours},
	{"stranger", "pending, unauthenticated or unmet, by what is meant", sameHost},
	{"stranger", "unknown or mismatched", suite},
	{"strangers", "pendingConns, or unauthenticated", ours},
	{"stretch", "sendRange, stripeRange", transfers},
	{"stretch", "planRange, spaceRange", sameHost},
	{"stretches", "ranges", sameHost},
	{"thief", "attacker", ours},
	{"told", "roleProbe", []string{"proxy/roleprobe.go"}},
	{"trouble", "Impairment", []string{"rig/faultnet"}},
	{"trouble", "planFault", suite},
	{"troubled", "underFault", []string{"rig/chaos"}},
	{"twin", "fake", suite},
	{"twinned", "fakeAgent", []string{"node"}},
	{"vain", "tooEarly", transfers},
	{"way", "Relay", []string{"rig/faultnet"}},
	{"way", "copyMethod, access or transport", sameHost},
	{"welcome", "authenticate", bus},
	{"welcome", "challenge", sameHost},
	{"welcome", "helloReply", streams},
	{"welcome", "takeHello", suite},
}

var (
	fieldName = regexp.MustCompile(`^[a-z][a-z0-9]*([_-][a-z0-9]+)*$`)
)

// TestNames: no replaced word is a part of a name.
func TestNames(t *testing.T) {
	seen, set := map[string]bool{}, token.NewFileSet()
	for _, row := range names {
		for _, folder := range row.folders {
			if _, err := os.Stat(filepath.Join("..", folder)); err != nil {
				t.Errorf("the row of %q: %v", row.word, err)
			}
		}
	}
	err := filepath.WalkDir("..", func(file string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name, _ := filepath.Rel("..", file)
		name = filepath.ToSlash(name)
		rows := rowsOf(name)
		if e.IsDir() {
			if base := e.Name(); name != "." && (strings.HasPrefix(base, ".") || base == "testdata" || base == "build") {
				return fs.SkipDir
			}
			return nil
		}
		if len(rows) == 0 {
			return nil
		}
		held := func(where, name string) {
			parts := wordsOf(name)
			for _, row := range rows {
				if (slices.Contains(parts, row.word) || slices.Contains(parts, row.word+"s")) && !seen[where+name] {
					seen[where+name] = true
					t.Errorf("%s: the name %s has the word %q, which was replaced: take %s", where, name, row.word, row.by)
				}
			}
		}
		held(name, strings.TrimSuffix(path.Base(name), path.Ext(name)))
		switch path.Ext(name) {
		case ".go":
			f, err := parser.ParseFile(set, file, nil, parser.SkipObjectResolution)
			if err != nil {
				return err
			}
			ast.Inspect(f, func(n ast.Node) bool {
				for _, id := range declared(n) {
					held(name+":"+strconv.Itoa(set.Position(id.Pos()).Line), id.Name)
				}
				if text, ok := n.(*ast.BasicLit); ok && text.Kind == token.STRING {
					if s, err := strconv.Unquote(text.Value); err == nil && fieldName.MatchString(s) {
						held(name+":"+strconv.Itoa(set.Position(text.Pos()).Line), s)
					}
				}
				return true
			})
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

// TestWordsOfNames: names are split where the field's readers split them.
func TestWordsOfNames(t *testing.T) {
	for name, want := range map[string]string{"newGate": "new gate", "gate": "gate", "TestTLSGate": "test tls gate", "queue_full": "queue full", "bus-long-queue": "bus long queue",
		"maxN2Gates": "max n2 gates", "delegate": "delegate", "ID": "id"} {
		if got := strings.Join(wordsOf(name), " "); got != want {
			t.Errorf("%s is split into %q, want %q", name, got, want)
		}
	}
}

// rowsOf are the rows that a file is held to.
func rowsOf(file string) (rows []replaced) {
	for _, row := range names {
		for _, folder := range row.folders {
			if file == folder || strings.HasPrefix(file, folder+"/") {
				rows = append(rows, row)
				break
			}
		}
	}
	return rows
}

// declared are the names that a node declares. A name that is only used is another package's, or is found where it is declared.
func declared(n ast.Node) (names []*ast.Ident) {
	add := func(list ...ast.Expr) {
		for _, e := range list {
			if id, ok := e.(*ast.Ident); ok {
				names = append(names, id)
			}
		}
	}
	switch n := n.(type) {
	case *ast.FuncDecl:
		names = append(names, n.Name)
	case *ast.TypeSpec:
		names = append(names, n.Name)
	case *ast.ValueSpec:
		names = append(names, n.Names...)
	case *ast.Field:
		names = append(names, n.Names...)
	case *ast.AssignStmt:
		if n.Tok == token.DEFINE {
			add(n.Lhs...)
		}
	case *ast.RangeStmt:
		if n.Tok == token.DEFINE {
			add(n.Key, n.Value)
		}
	}
	return names
}

// wordsOf splits a name at capitals, lines and dots, in small letters. A run of capitals is one word, but for the last if a small
// letter follows it.
func wordsOf(name string) (words []string) {
	var word []rune
	end := func() {
		if len(word) > 0 {
			words, word = append(words, strings.ToLower(string(word))), nil
		}
	}
	text := []rune(name)
	for i, c := range text {
		switch {
		case c == '_' || c == '-' || c == '.':
			end()
			continue
		case unicode.IsUpper(c) && i > 0 && (!unicode.IsUpper(text[i-1]) || i+1 < len(text) && unicode.IsLower(text[i+1])):
			end()
		}
		word = append(word, c)
	}
	end()
	return words
}
