// The names in NATS: subjects that name who asks whom, keys of the registry, and what they are checked for.

package natsbus

import (
	"crypto/ed25519"
	"crypto/rand"
	"encoding/base32"
	"encoding/base64"
	"fmt"
	"strconv"
	"strings"

	"github.com/nats-io/nkeys"

	"github.com/kvconn/kvconn/core"
)

// The registry is one stream, whose subjects are its keys.
const (
	bucket  = "kvconn_ranks"
	stream  = "KV_" + bucket
	subtree = "$KV." + bucket + "."
)

// legalID says whether an id may be a part of a NATS subject: 1 to 64 letters, digits, _ and -.
// Each message is looked at.
func legalID(id string) bool {
	for i := range len(id) {
		c := id[i]
		if (c < 'A' || c > 'Z') && (c < 'a' || c > 'z') && (c < '0' || c > '9') && c != '_' && c != '-' {
			return false
		}
	}
	return len(id) >= 1 && len(id) <= maxAgentID
}

const maxAgentID = 64

// subject is the subject at which one agent hears another. It names both of them: a client may
// publish only to subjects that end with the id that it has proved.
func subject(to, from core.AgentID) string {
	if to == hostID {
		return joinRoot + string(from)
	}
	return agentRoot + tokens(to) + "." + tokens(from)
}

// tokens writes an id as it stands in a subject. If an agent has an nkey in a cluster, its id is two
// tokens: the nkey, to which the cluster's permissions can restrict a user, and the agent.
func tokens(id core.AgentID) string { return strings.Replace(string(id), keySeparator, ".", 1) }

// keySeparator stands between the two.
const keySeparator = "-"

const (
	agentRoot = "kvconn.v1.agent."
	joinRoot  = "kvconn.v1.join."
	inboxRoot = "_INBOX."
)

// senderOf is the agent that sent to a subject of agent to.
func senderOf(subj string, to core.AgentID) (core.AgentID, error) {
	from, joins := strings.CutPrefix(subj, joinRoot)
	if !joins {
		from = after(subj, agentRoot, tokens(to), ".")
	}
	if key, instance, two := strings.Cut(from, "."); two && !strings.Contains(from, keySeparator) {
		from = key + keySeparator + instance
	} else if strings.Contains(from, keySeparator) { // the permissions of no key hold it
		return "", fmt.Errorf("subject %.200q names no sender", subj)
	}
	if !legalID(from) {
		return "", fmt.Errorf("subject %.200q names no sender", subj)
	}
	return core.AgentID(from), nil
}

// ownInbox says whether the subject that a message names for its answer is one at which
// its sender listens. An agent may publish where others may not, so nobody must be able to
// make it answer at another subject.
func ownInbox(reply string, from core.AgentID) bool {
	if strings.HasPrefix(reply, importedReply) { // a cluster's server has put it in place of the sender's subject
		return true
	}
	return after(reply, inboxRoot, tokens(from), ".") != reply
}

// after is what follows parts in a text. If the text does not begin with them, it is the text itself.
func after(text string, parts ...string) string {
	rest := text
	for _, p := range parts {
		var ok bool
		if rest, ok = strings.CutPrefix(rest, p); !ok {
			return text
		}
	}
	return rest
}

// importedReply begins the subjects by which nats-server brings answers from one account
// to another. They are random, and lead to the sender's own account.
const importedReply = "_R_."

// hostID is the id under which a rank that joins asks the server's agent for its
// registration: the rank knows that agent's address only.
const hostID core.AgentID = "bootstrap"

// clientName begins the name under which an agent connects; its id follows.
const clientName = "kvconn "

// inboxOf is what the subjects of the answers to an agent begin with.
func inboxOf(id core.AgentID) string { return inboxRoot + tokens(id) }

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

// clusterKey is a rank's key in a cluster's registry. If the engine is an nkey's, the nkey is a token of its own in the key, so that
// the cluster's permissions can restrict a user to it.
func clusterKey(engine string, tp, pp int) string {
	owner, rest := engineOwner(engine)
	if owner == "" {
		return rankKey(engine, tp, pp)
	}
	return subtree + owner + "." + strings.TrimPrefix(rankKey(rest, tp, pp), subtree)
}

// engineOwner splits an engine id into the nkey with which it begins and the rest. If it begins with no nkey, owner is empty. In a
// cluster an id with an nkey belongs to that nkey's user.
func engineOwner(engine string) (owner, rest string) {
	if len(engine) < nkeyChars || publicOf(engine[:nkeyChars]) == nil {
		return "", engine
	}
	return engine[:nkeyChars], engine[nkeyChars:]
}

const nkeyChars = 56 // of a public nkey

// publicOf is the ed25519 key of a public nkey of a user; nil if that is none. nkeys itself does not ask for the length, and passes
// over line ends.
func publicOf(nkey string) ed25519.PublicKey {
	if len(nkey) != nkeyChars {
		return nil
	}
	public, err := nkeys.Decode(nkeys.PrefixByteUser, []byte(nkey))
	if err != nil || len(public) != ed25519.PublicKeySize {
		return nil
	}
	return public
}

// keyOwner is the nkey that a key of a cluster's registry names; "" if it names none.
func keyOwner(key string) string {
	owner, _, _ := strings.Cut(strings.TrimPrefix(key, subtree), ".")
	if publicOf(owner) == nil {
		return ""
	}
	return owner
}

// keyName is a key in a form for readers.
func keyName(key string) string {
	owner, under := keyOwner(key), strings.TrimPrefix(key, subtree)
	if owner != "" {
		under = strings.TrimPrefix(under, owner+".")
	}
	engine, rank, _ := strings.Cut(under, ".")
	raw, err := base64.RawURLEncoding.DecodeString(strings.TrimPrefix(engine, "e"))
	if err != nil || strconv.Quote(rank) != `"`+rank+`"` { // another host's registry may say anything
		return fmt.Sprintf("%.300q", key)
	}
	return fmt.Sprintf("%q rank %s", owner+string(raw), rank)
}
