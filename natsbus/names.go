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

// subject is where an agent hears another. It names both: a client may send only to
// subjects that end with the id that it has proved.
func subject(to, from core.AgentID) string {
	if to == hostID {
		return joinRoot + string(from)
	}
	return agentRoot + string(to) + "." + string(from)
}

const (
	agentRoot = "kvconn.v1.agent."
	joinRoot  = "kvconn.v1.join."
	inboxRoot = "_INBOX."
)

// senderOf is the agent that a subject was sent from.
func senderOf(subj string) core.AgentID {
	return core.AgentID(subj[strings.LastIndexByte(subj, '.')+1:])
}

// hostID is the id under which a rank that joins asks the server's agent for its
// registration: the rank knows that agent's address only.
const hostID core.AgentID = "bootstrap"

// clientName begins the name under which an agent connects; its id follows.
const clientName = "kvconn "

// inboxOf is what the subjects of the answers to an agent begin with.
func inboxOf(id core.AgentID) string { return inboxRoot + string(id) }

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
