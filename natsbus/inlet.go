package natsbus

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"

	"github.com/kvconn/kvconn/wire"
)

// maxCommand bounds a line of a client's side of the NATS protocol: its CONNECT is the
// longest.
const maxCommand = 8 << 10

// maxReplySubject bounds the subject of an answer: two ids and what nats.go adds.
const maxReplySubject = 256

// inlet passes a client's side of the NATS protocol on to the embedded server, command by
// command. Permissions limit the subjects that a client uses. They do not limit the
// subjects that a client names for answers. By these it could write through the agent
// that answers.
type inlet struct {
	from    *bufio.Reader
	to      *bufio.Writer
	connect string // what the server is told in place of the client's CONNECT
	inbox   string // subjects of answers begin with it, and with a dot
	window  *window

	greeted bool
}

// run passes commands on until the client or the server ends, or a command is not allowed.
func (in *inlet) run() error {
	for {
		if in.from.Buffered() == 0 {
			if err := in.to.Flush(); err != nil {
				return err
			}
		}
		line, err := in.line()
		if err != nil {
			return err
		}
		if err := in.command(line); err != nil {
			return err
		}
	}
}

// errProtocol ends a client that sends what no agent sends.
var errProtocol = errors.New("it sends what no kvconn agent sends")

func (in *inlet) line() ([]byte, error) {
	line, err := in.from.ReadSlice('\n')
	if errors.Is(err, bufio.ErrBufferFull) {
		return nil, fmt.Errorf("%w: a line of more than %d bytes", errProtocol, maxCommand)
	}
	return line, err
}

func (in *inlet) command(line []byte) error {
	text := bytes.TrimSuffix(bytes.TrimSuffix(line, []byte("\n")), []byte("\r"))
	for _, c := range text {
		if c < ' ' || c == 0x7f {
			return fmt.Errorf("%w: %.60q", errProtocol, line)
		}
	}
	verb, rest, _ := strings.Cut(string(text), " ")
	if !in.greeted {
		if verb != "CONNECT" {
			return fmt.Errorf("%w: %.60q in place of CONNECT", errProtocol, line)
		}
		in.greeted = true
		_, err := in.to.WriteString(in.connect)
		return err
	}
	args := strings.Fields(rest)
	switch {
	case (verb == "PING" || verb == "PONG") && len(args) == 0,
		verb == "SUB" && (len(args) == 2 || len(args) == 3),
		verb == "UNSUB" && (len(args) == 1 || len(args) == 2):
		_, err := in.to.WriteString(strings.Join(append([]string{verb}, args...), " ") + "\r\n")
		return err
	case verb == "PUB" && (len(args) == 2 || len(args) == 3):
		return in.publish(args)
	}
	return fmt.Errorf("%w: %.60q", errProtocol, line) // HPUB too: headers steer the server
}

// publish passes a message on. Only an answer may go without a subject for answers.
func (in *inlet) publish(args []string) error {
	subj, reply := args[0], ""
	if len(args) == 3 {
		reply = args[1]
	}
	size, err := strconv.ParseUint(args[len(args)-1], 10, 31)
	if err != nil || size > wire.MaxMessage {
		return fmt.Errorf("%w: a message of %.20q bytes, at most %d are carried", errProtocol, args[len(args)-1], wire.MaxMessage)
	}
	switch answers := strings.HasPrefix(subj, inboxRoot); {
	case !literal(subj), answers && reply != "":
		return fmt.Errorf("%w: a message to %.80q", errProtocol, subj)
	case !answers && (!strings.HasPrefix(reply, in.inbox+".") || !literal(reply) || len(reply) > maxReplySubject):
		return fmt.Errorf("%w: a request to %.80q wants its answer at %.80q", errProtocol, subj, reply)
	}
	if err := in.to.Flush(); err != nil { // answers to earlier requests may make room
		return err
	}
	done, err := in.window.open(reply, int64(size))
	if err != nil {
		return err
	}
	defer done()
	if _, err := fmt.Fprintf(in.to, "PUB %s %d\r\n", strings.TrimSuffix(subj+" "+reply, " "), size); err != nil {
		return err
	}
	if _, err := io.CopyN(in.to, in.from, int64(size)); err != nil {
		return err
	}
	var end [2]byte
	if _, err := io.ReadFull(in.from, end[:]); err != nil {
		return err
	}
	if string(end[:]) != "\r\n" {
		return fmt.Errorf("%w: a message longer than it says", errProtocol)
	}
	_, err = in.to.Write(end[:])
	return err
}

// literal says whether a subject has no wildcards.
func literal(subj string) bool { return !strings.ContainsAny(subj, "*>") }
