package sim

import (
	"fmt"
	"strings"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/kv"
)

// transcript is the events and actions of the machines, in the form of core/machine/testdata.
type transcript []line

type line struct {
	agent  core.AgentID
	text   string
	prints string
}

// legible writes the ids of parts as transcripts do.
func legible(text string) string { return strings.ReplaceAll(text, "\x00", "~") }

// text is the transcript. With short it has only the lines that name the transfer, and the
// openings of the machines that the transfer concerns, without the ticks at which nothing
// happened.
func (t transcript) text(short bool, id core.TransferID) string {
	concerned := map[core.AgentID]bool{}
	names := func(l *line) bool {
		return !short || id == "" || strings.Contains(l.text+" ", " "+string(id)+" ") || strings.Contains(l.prints, " "+string(id)+" ") ||
			strings.Contains(l.text, string(id)+"~") || strings.Contains(l.prints, string(id)+"~")
	}
	for i := range t {
		if names(&t[i]) {
			concerned[t[i].agent] = true
		}
	}
	var b strings.Builder
	for i := range t {
		l := &t[i]
		word := strings.Fields(l.text)[1]
		if !concerned[l.agent] || !names(l) && word != "open" && word != "tick" && word != "down" && word != "close" && word != "abandon" {
			continue
		}
		if short && word == "tick" && l.prints == "" {
			continue
		}
		b.WriteString(l.text + "\n")
		if l.prints != "" {
			b.WriteString("----\n" + l.prints + "\n")
		}
	}
	return strings.TrimRight(b.String(), "\n") + "\n"
}

// told writes a line with the event and the machine's actions.
func (a *agent) told(actions []core.Action, format string, args ...any) {
	w := a.w
	if w.words == nil {
		return
	}
	var prints strings.Builder
	for _, act := range actions {
		prints.WriteString(w.words.Action(act) + "\n")
	}
	text := fmt.Sprintf("%s %s now=%v", a.id, fmt.Sprintf(format, args...), a.now())
	w.lines = append(w.lines, line{a.id, legible(text), legible(prints.String())})
}

// remark adds to what the last event printed.
func (a *agent) remark(text string) {
	if w := a.w; w.words != nil {
		w.lines[len(w.lines)-1].prints += text + "\n"
	}
}

// closeTranscript ends all machines, so that the transcript is whole.
func (w *world) closeTranscript() {
	if w.words == nil {
		return
	}
	for _, a := range w.all {
		a.told(a.m.Step(a.time(), core.Abandon{}), "abandon")
	}
}

// list writes block ids as transcripts have them.
func list[T any](ids []T) string { return strings.Trim(fmt.Sprint(ids), "[]") }

func groups(blocks [][]kv.BlockID) string {
	if len(blocks) == 0 {
		return ""
	}
	all := make([]string, len(blocks))
	for i, ids := range blocks {
		all[i] = list(ids)
	}
	return " blocks=[" + strings.Join(all, " | ") + "]"
}

func optional(key, value string) string {
	if value == "" {
		return ""
	}
	return " " + key + "=[" + value + "]"
}

func failure(err error) string {
	if err == nil {
		return ""
	}
	return optional("err", err.Error())
}

func absence(absent bool) string {
	if absent {
		return " absent=yes"
	}
	return ""
}
