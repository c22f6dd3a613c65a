// A client's commands are read one by one, and one that no agent sends ends the client.

package natsbus

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"strconv"

	"github.com/kvconn/kvconn/internal/fault"
	"github.com/kvconn/kvconn/wire"
)

// maxCommand bounds a line of a client's side of the NATS protocol: its CONNECT is the
// longest.
const maxCommand = 2 << 10

// writeSize is how much of a client's is passed on to the server at a time. These buffers are small since each of some
// thousand clients has one.
const writeSize = 1 << 10

// maxReplySubject bounds the subject of an answer: two ids and what nats.go adds.
const maxReplySubject = 256

// commandFilter passes a client's side of the NATS protocol on to the embedded server, command by
// command. Permissions limit the subjects that a client uses. They do not limit the
// subjects that a client names for answers. By these it could write through the agent
// that answers.
type commandFilter struct {
	from    *bufio.Reader
	to      *bufio.Writer
	connect string // what the server is told in place of the client's CONNECT
	inbox   string // subjects of answers begin with it, and with a dot
	window  *window

	connected bool
	args      [4][]byte // of the command that is being read; another word is one too many
}

// run passes commands on until the client or the server ends, or a command is not allowed.
func (in *commandFilter) run() error {
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

func (in *commandFilter) line() ([]byte, error) {
	line, err := in.from.ReadSlice('\n')
	if errors.Is(err, bufio.ErrBufferFull) {
		return nil, fmt.Errorf("%w: a line of more than %d bytes", errProtocol, maxCommand)
	}
	return line, err
}

func (in *commandFilter) command(line []byte) error {
	text := bytes.TrimSuffix(bytes.TrimSuffix(line, []byte("\n")), []byte("\r"))
	for _, c := range text {
		if c < ' ' || c == 0x7f {
			return fmt.Errorf("%w: %.60q", errProtocol, line)
		}
	}
	verb, rest, _ := bytes.Cut(text, space)
	if !in.connected {
		if string(verb) != "CONNECT" {
			return fmt.Errorf("%w: %.60q in place of CONNECT", errProtocol, line)
		}
		in.connected = true
		_, err := in.to.WriteString(in.connect)
		return err
	}
	args := appendFields(in.args[:0], rest)
	switch v := string(verb); {
	case (v == "PING" || v == "PONG") && len(args) == 0,
		v == "SUB" && (len(args) == 2 || len(args) == 3),
		v == "UNSUB" && (len(args) == 1 || len(args) == 2):
		_, err := fmt.Fprintf(in.to, "%s\r\n", bytes.Join(append([][]byte{verb}, args...), space))
		return err
	case v == "PUB" && (len(args) == 2 || len(args) == 3):
		return in.publish(args)
	}
	return fmt.Errorf("%w: %.60q", errProtocol, line) // HPUB too: headers steer the server
}

// publish passes a message on. Only an answer may go without a subject for answers.
func (in *commandFilter) publish(args [][]byte) error {
	subj, reply := args[0], ""
	if len(args) == 3 {
		reply = string(args[1])
	}
	size, err := strconv.ParseUint(string(args[len(args)-1]), 10, 31)
	if err != nil || size > wire.MaxMessage {
		return fmt.Errorf("%w: a message of %.20q bytes, at most %d are carried", errProtocol, args[len(args)-1], wire.MaxMessage)
	}
	switch answers := begins(subj, inboxRoot); {
	case !literal(subj), answers && reply != "":
		return fmt.Errorf("%w: a message to %.80q", errProtocol, subj)
	case fault.On("bus-reply-free"):
	case !answers && (after(reply, in.inbox, ".") == reply || !literal(args[1]) || len(reply) > maxReplySubject):
		return fmt.Errorf("%w: a request to %.80q wants its answer at %.80q", errProtocol, subj, reply)
	}
	if err := in.to.Flush(); err != nil { // answers to earlier requests may make room
		return err
	}
	query := begins(subj, "$JS.")
	if query && size > maxQuerySize {
		return fmt.Errorf("%w: a query of %d bytes to the registry, at most %d are carried", errProtocol, size, maxQuerySize)
	}
	done, err := in.window.open(reply, int64(size), query)
	if err != nil {
		return err
	}
	defer done()
	// An error of the buffer shows at the next write too.
	_, _ = in.to.WriteString("PUB ")
	_, _ = in.to.Write(subj)
	if reply != "" {
		_ = in.to.WriteByte(' ')
		_, _ = in.to.WriteString(reply)
	}
	_ = in.to.WriteByte(' ')
	_, _ = in.to.Write(strconv.AppendUint(in.to.AvailableBuffer(), size, 10))
	_, _ = in.to.WriteString("\r\n")
	if whole := int(size) + len(lineEnd); whole <= in.from.Size() {
		message, err := in.from.Peek(whole)
		if err != nil {
			return err
		}
		if string(message[size:]) != lineEnd {
			return errLonger
		}
		if _, err := in.to.Write(message); err != nil {
			return err
		}
		_, err = in.from.Discard(whole)
		return err
	}
	if _, err := io.CopyN(in.to, in.from, int64(size)); err != nil {
		return err
	}
	var end [2]byte
	if _, err := io.ReadFull(in.from, end[:]); err != nil {
		return err
	}
	if string(end[:]) != lineEnd {
		return errLonger
	}
	_, err = in.to.Write(end[:])
	return err
}

const lineEnd = "\r\n"

var errLonger = fmt.Errorf("%w: a message is longer than its announced size", errProtocol)

// literal says whether a subject has no wildcards.
func literal(subj []byte) bool { return !bytes.ContainsAny(subj, "*>") }

func begins(text []byte, with string) bool {
	return len(text) >= len(with) && string(text[:len(with)]) == with
}

// appendFields appends the words of a text to out.
func appendFields(out [][]byte, text []byte) [][]byte {
	for {
		text = bytes.TrimLeft(text, " ")
		if len(text) == 0 {
			return out
		}
		var word []byte
		word, text, _ = bytes.Cut(text, space)
		out = append(out, word)
	}
}
