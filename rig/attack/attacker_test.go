package attack

import (
	"bufio"
	"crypto/ed25519"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/base32"
	"encoding/base64"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/kvconn/kvconn/wire"
)

// attacker is a process that speaks kvconn's protocols as it likes. It has a key of its own,
// and the secrets that it is given.
type attacker struct {
	t      testing.TB
	public ed25519.PublicKey
	tls    *tls.Config
	at     string // the address that it comes from; "": any
}

func newAttacker(t testing.TB) *attacker {
	t.Helper()
	public, key, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour)}
	der, err := x509.CreateCertificate(rand.Reader, template, template, public, key)
	if err != nil {
		t.Fatal(err)
	}
	return &attacker{t: t, public: public, tls: &tls.Config{Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}},
		InsecureSkipVerify: true, MinVersion: tls.VersionTLS13, ClientAuth: tls.RequireAnyClientCert}}
}

func idOf(public ed25519.PublicKey) string {
	sum := sha256.Sum256(public)
	return base32.StdEncoding.EncodeToString(sum[:20])
}

// session is the attacker's connection to a control plane.
type session struct {
	a    *attacker
	conn net.Conn
	br   *bufio.Reader
	id   string // the attacker's
	n    int
}

// greeted is a connection to a bootstrap port that has said its greeting.
type greeted struct {
	conn     net.Conn
	br       *bufio.Reader
	bind     []byte
	greeting string
}

// knock opens a connection to a bootstrap port, and asks for the control plane. The caller closes it.
func (a *attacker) knock(boot string) (net.Conn, error) {
	d := net.Dialer{Timeout: bound}
	if a.at != "" {
		d.LocalAddr = &net.TCPAddr{IP: net.ParseIP(a.at)}
	}
	address, secure := strings.CutPrefix(boot, "https://")
	raw, err := d.Dial("tcp", strings.TrimPrefix(address, "http://"))
	if err != nil {
		return nil, err
	}
	if secure {
		raw = tls.Client(raw, &tls.Config{InsecureSkipVerify: true, MinVersion: tls.VersionTLS13})
	}
	_ = raw.SetDeadline(time.Now().Add(bound))
	_, err = io.WriteString(raw, "GET /nats HTTP/1.1\r\nHost: h\r\nConnection: Upgrade\r\nUpgrade: nats\r\n\r\n")
	return raw, err
}

func (a *attacker) greeted(boot string) (*greeted, error) {
	raw, err := a.knock(boot)
	if err != nil {
		return nil, err
	}
	a.t.Cleanup(func() { _ = raw.Close() })
	head := bufio.NewReader(raw)
	if resp, err := http.ReadResponse(head, nil); err != nil || resp.StatusCode != http.StatusSwitchingProtocols {
		return nil, fmt.Errorf("no upgrade: %v, %w", resp, err)
	}
	conn := tls.Client(&prefixed{raw, head}, a.tls)
	if err := conn.Handshake(); err != nil {
		return nil, err
	}
	state := conn.ConnectionState()
	g := &greeted{conn: conn, br: bufio.NewReader(conn)}
	if g.bind, err = state.ExportKeyingMaterial("EXPORTER-kvconn-proof", nil, 32); err == nil {
		g.greeting, err = g.br.ReadString('\n')
	}
	return g, err
}

// enter proves to a bootstrap port what a secret proves; right is "ask" or "join".
func (a *attacker) enter(boot, right, secret string) (*session, error) {
	g, err := a.greeted(boot)
	if err != nil {
		return nil, err
	}
	conn, br, bind := g.conn, g.br, g.bind
	method, proof := "open", "-"
	if secret != "" {
		mac := hmac.New(sha256.New, []byte(secret))
		fmt.Fprintf(mac, "kvconn client %s ", right)
		mac.Write(bind)
		method, proof = "token", base64.RawURLEncoding.EncodeToString(mac.Sum(nil))
	}
	fmt.Fprintf(conn, "%s %s - %s\n", right, method, proof)
	if word, err := br.ReadString('\n'); err != nil || word != "ok\n" {
		return nil, fmt.Errorf("not let in: %q, %w", word, err)
	}
	s := &session{a: a, conn: conn, br: br, id: idOf(a.public)}
	fmt.Fprint(conn, "CONNECT {}\r\nPING\r\n")
	for {
		line, err := br.ReadString('\n')
		if err != nil {
			return nil, err
		}
		if strings.HasPrefix(line, "PONG") {
			_ = conn.SetDeadline(time.Time{})
			return s, nil
		}
	}
}

// prefixed first reads the bytes that came with an HTTP head.
type prefixed struct {
	net.Conn
	r *bufio.Reader
}

func (p *prefixed) Read(b []byte) (int, error) { return p.r.Read(b) }

// publish sends a message that wants an answer at reply.
func (s *session) publish(subject, reply string, data []byte) error {
	_, err := fmt.Fprintf(s.conn, "PUB %s %s %d\r\n%s\r\n", subject, reply, len(data), data)
	return err
}

// request sends a message, and waits for its answer or for the server's error.
func (s *session) request(subject string, data []byte) ([]byte, error) {
	_, answer, err := s.answer(subject, data)
	return answer, err
}

// answer is request, with the answer's headers.
func (s *session) answer(subject string, data []byte) (headers string, answer []byte, err error) {
	s.n++
	in := fmt.Sprintf("_INBOX.%s.x.%d", s.id, s.n)
	fmt.Fprintf(s.conn, "SUB %s %d\r\n", in, s.n)
	if err := s.publish(subject, in, data); err != nil {
		return "", nil, err
	}
	_ = s.conn.SetReadDeadline(time.Now().Add(bound))
	for {
		line, err := s.br.ReadString('\n')
		if err != nil {
			return "", nil, err
		}
		f := strings.Fields(line)
		switch f[0] {
		case "PING":
			fmt.Fprint(s.conn, "PONG\r\n")
		case "-ERR":
			return "", nil, fmt.Errorf("%s", strings.TrimSpace(line))
		case "MSG", "HMSG":
			var n, head int
			fmt.Sscan(f[len(f)-1], &n)
			if f[0] == "HMSG" {
				fmt.Sscan(f[len(f)-2], &head)
			}
			b := make([]byte, n+2)
			if _, err := io.ReadFull(s.br, b); err != nil {
				return "", nil, err
			}
			if f[1] == in { // not a late answer to an earlier request
				fmt.Fprintf(s.conn, "UNSUB %d\r\n", s.n)
				return string(b[:head]), b[head:n], nil
			}
		}
	}
}

// ask sends an agent's message in somebody's name.
func (s *session) ask(to, from string, req *wire.Request) (*wire.Reply, error) {
	data, err := req.MarshalMsg(nil)
	if err != nil {
		return nil, err
	}
	answer, err := s.request("kvconn.v1.agent."+to+"."+from, data)
	if err != nil {
		return nil, err
	}
	rep := new(wire.Reply)
	return rep, wire.Decode(answer, rep)
}

func aHello() *wire.Request {
	h := &wire.Agent{Version: wire.Version, EngineID: "evil", Endpoints: []wire.Endpoint{{Transport: "tcp", Address: ":1", Encrypt: wire.EncryptMay}}}
	for i := range layers {
		h.Shapes = append(h.Shapes, wire.Shape{Name: fmt.Sprintf("layer.%d", i), BlockStride: blockBytes, BlockBytes: blockBytes, NumBlocks: numBlocks})
	}
	return &wire.Request{Kind: wire.KindHello, Hello: h}
}

// registered is the registry's entry of a rank.
func (s *session) registered(pp int) (*wire.Agent, error) {
	b, err := s.request(fmt.Sprintf("$JS.API.DIRECT.GET.KV_kvconn_ranks.$KV.kvconn_ranks.e%s.0.%d", base64.RawURLEncoding.EncodeToString([]byte("p0")), pp), nil)
	if err != nil {
		return nil, err
	}
	a := new(wire.Agent)
	return a, wire.Decode(b, a)
}
