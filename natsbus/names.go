package natsbus

import (
	"crypto/rand"
	"encoding/base32"
	"encoding/base64"
	"fmt"
	"regexp"
	"strconv"
	"strings"

	"github.com/kvconn/kvconn/core"
)

// The registry is one stream, whose subjects are its keys.
const (
	bucket  = "kvconn_ranks"
	stream  = "KV_" + bucket
	subtree = "$KV." + bucket + "."
)

// An AgentID is a part of a NATS subject.
var legalID = regexp.MustCompile(`^[A-Za-z0-9_-]{1,64}$`)

func subject(id core.AgentID) string { return "kvconn.v1.agent." + string(id) }

// hostID is the id under which a rank that joins asks the server's agent for its
// registration: the rank knows that agent's address only.
const hostID core.AgentID = "bootstrap"

// clientName begins the name under which an agent connects; its id and the
// prefix of its inboxes follow.
const clientName = "kvconn"

// parseClientName returns the subjects of a client's id and inboxes.
func parseClientName(name string) (id, inbox string, ok bool) {
	parts := strings.Split(name, " ")
	if len(parts) != 3 || parts[0] != clientName || !legalID.MatchString(parts[1]) || !legalID.MatchString(parts[2]) {
		return "", "", false
	}
	return subject(core.AgentID(parts[1])), inboxPrefix(parts[2]), true
}

func inboxPrefix(random string) string { return "_INBOX." + random }

func randomName() string {
	var b [20]byte
	rand.Read(b[:])
	return base32.StdEncoding.EncodeToString(b[:])
}

// rankKey encodes any engine id, since a key has letters, digits and a few other
// characters. A key has no dp rank: each dp rank is an engine with an id of its own.
func rankKey(engine string, tp, pp int) string {
	return subtree + "e" + base64.RawURLEncoding.EncodeToString([]byte(engine)) + rankSuffix(tp, pp)
}

func rankSuffix(tp, pp int) string {
	return fmt.Sprintf(".%d.%d", tp, pp)
}

// keyName is a key in a form for readers.
func keyName(key string) string {
	engine, rank, _ := strings.Cut(strings.TrimPrefix(key, subtree), ".")
	raw, err := base64.RawURLEncoding.DecodeString(strings.TrimPrefix(engine, "e"))
	if err != nil || strconv.Quote(rank) != `"`+rank+`"` { // a stranger's registry may say anything
		return fmt.Sprintf("%.300q", key)
	}
	return fmt.Sprintf("%q rank %s", raw, rank)
}
