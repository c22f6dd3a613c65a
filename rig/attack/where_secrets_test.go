package attack

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"net"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"
)

// refused is what an agent says that does not open.
func refused(t testing.TB, cfg map[string]any) string {
	t.Helper()
	text, err := json.Marshal(cfg)
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), os.Args[0])
	cmd.Env = append(os.Environ(), victimVariable+"="+string(text))
	cmd.WaitDelay = bound
	out, err := cmd.CombinedOutput() // an agent that opens ends with its standard input
	if err == nil {
		t.Errorf("an agent opens with %s", text)
	}
	return string(out)
}

// guess tries words as the secret that a greeting proves.
func (g *greeted) guess(words []string, right string, proof int) (found string) {
	said := strings.Fields(g.greeting)[proof]
	for _, word := range words {
		mac := hmac.New(sha256.New, []byte(word))
		fmt.Fprintf(mac, "kvconn server %s ", right)
		mac.Write(g.bind)
		if base64.RawURLEncoding.EncodeToString(mac.Sum(nil)) == said {
			return word
		}
	}
	return ""
}

// short returns all words that have this number of small letters.
func short(letters int) (words []string) {
	words = []string{""}
	for range letters {
		var longer []string
		for _, w := range words {
			for c := 'a'; c <= 'z'; c++ {
				longer = append(longer, w+string(c))
			}
		}
		words = longer
	}
	return words
}

// TestSecretsThatAreGuessed: an unknown client that knows no secret hears what a prefill engine greets everybody with, and tries words
// until one would have made it. A token of four characters was found in 0.4 s. Now a secret that is so short is refused when the
// agent opens. An agent of a cluster, whose token may be short, tells nobody anything that its token has made.
func TestSecretsThatAreGuessed(t *testing.T) {
	words := short(3)
	for _, secret := range []struct{ key, word string }{
		{"nats_token", "kvc"}, {"nats_token", "fifteen-letters"}, {"join_token", "kvc"}, {"join_token", "fifteen-letters"},
	} {
		cfg := map[string]any{"role": "prefill", "engine_id": "p0", "transport": "tcp", "bootstrap_host": "127.0.0.1", "bootstrap_port": 0}
		cfg[secret.key] = secret.word
		if text := refused(t, cfg); !strings.Contains(text, secret.key) || !strings.Contains(text, "16") {
			t.Errorf("%s %q: %s", secret.key, secret.word, text)
		}
	}
	const long = "a-token-0123456789"
	p := start(t, map[string]any{"role": "prefill", "nats_token": long, "join_token": long + "-of-ranks"})
	g, err := newAttacker(t).greeted(p.boot)
	if err != nil {
		t.Fatal(err)
	}
	if g.guess([]string{long}, "ask", 1) != long || g.guess([]string{long + "-of-ranks"}, "join", 2) == "" {
		t.Errorf("the greeting %q is not what the attack takes it for: the attack itself has failed", g.greeting)
	}
	if found := g.guess(words, "ask", 1) + g.guess(words, "join", 2); found != "" {
		t.Errorf("the secret is %q", found)
	}
	got(t, "a token of 4 characters in 0.4 s, a join token of 3 in 10 ms (at 1a5364a)",
		"%d words tried, none found; an agent with a short one does not open", len(words))
}

// TestTokenOfACluster: unknown clients at all that agents of a cluster open, and a host to which a client sends the decode agent, hear
// nothing that the cluster's token has made.
func TestTokenOfACluster(t *testing.T) {
	s := newScenario(t, deployment{name: "cluster-token", cluster: true, token: "right"})
	p, d := s.start("prefill", nil), s.start("decode", nil)
	a := newAttacker(t)
	if g, err := a.greeted(p.boot); err == nil {
		t.Errorf("prefill greets an unknown client with %q", g.greeting)
	}
	c, err := net.DialTimeout("tcp", s.server.Addr(), bound)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(bound))
	b := make([]byte, 4096)
	if n, err := c.Read(b); err != nil || strings.Contains(string(b[:n]), "right") {
		t.Errorf("the NATS server says %q, %v", b[:n], err)
	}
	address, heard := a.host("kvconn - -\n", nil)
	for _, id := range []string{"named", "again"} { // when the second has ended, the first one's words are long out
		p.say("offer %s 4 4", id)
		d.say("load %s 20 4 %s", id, address)
		if l := d.report(id); l.Code != "ok" { // from the engine, which the cluster has
			t.Errorf("a load for which a client has named a host: %+v", l)
		}
	}
	select {
	case word := <-heard:
		t.Errorf("decode comes to the host, and says %q", word)
	default:
	}
	got(t, "not tried", "0 words that the token has made, and decode does not come to the host")
}
