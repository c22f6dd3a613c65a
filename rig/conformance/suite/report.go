// A run of the suite is a process, and what it prints becomes a verdict.

package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// The verdicts of a run.
const (
	verdictPassed = "passed"
	verdictFailed = "failed"
	verdictNotRun = "not run"
)

const (
	suiteName = "suite"
	// limit is the longest that a run may take: on the double and on GPUs it takes half a minute.
	limit = 5 * time.Minute
	// maxKeptOutput is so much of what is said of a case, or after the last one, as is kept.
	maxKeptOutput = 4000
)

// result is what came of a run.
type result struct {
	Transport string    `json:"transport"`
	Memory    string    `json:"memory"`
	Verdict   string    `json:"verdict"`
	Reason    string    `json:"reason,omitempty"`
	Seconds   float64   `json:"seconds"`
	Cases     []outcome `json:"cases"`
}

// outcome is a case's.
type outcome struct {
	Case    string  `json:"case"`
	OK      bool    `json:"ok"`
	Seconds float64 `json:"seconds"`
	Reason  string  `json:"reason,omitempty"`
}

// line tells of a run in one line, and a line for each case that failed.
func (r result) line() string {
	text := fmt.Sprintf("%-7s %s, %s: %d cases, %.1f s", r.Verdict, r.Transport, r.Memory, len(r.Cases), r.Seconds)
	if r.Verdict == verdictNotRun {
		text = fmt.Sprintf("NOT RUN: %s, %s", r.Transport, r.Memory)
	}
	if r.Reason != "" {
		text += ": " + r.Reason
	}
	for _, c := range r.Cases {
		if !c.OK {
			text += fmt.Sprintf("\n        %s: %s", c.Case, c.Reason)
		}
	}
	return text
}

// inItsOwn performs a run in a process of its own.
func inItsOwn(k kind, devices int, cases string) result {
	r := result{Transport: k.transport, Memory: k.memory, Cases: []outcome{}}
	if devices < k.gpus {
		r.Verdict, r.Reason = verdictNotRun, fmt.Sprintf("%d GPUs are needed, and there is %d", k.gpus, devices)
		return r
	}
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	self, err := os.Executable()
	if err != nil {
		r.Verdict, r.Reason = verdictFailed, err.Error()
		return r
	}
	c := exec.CommandContext(ctx, self, "-run", k.name(), "-test.v=test2json", "-test.run", "^"+suiteName+"$/(?:"+cases+")")
	c.Cancel = func() error { return c.Process.Signal(syscall.SIGQUIT) } // its goroutines are told
	c.WaitDelay = 10 * time.Second
	out, in := io.Pipe()
	c.Stdout, c.Stderr = in, in
	begin := time.Now()
	go func() { in.CloseWithError(errors.Join(c.Run(), io.EOF)) }()
	cs, rest := parse(out)
	r.Seconds = time.Since(begin).Round(100 * time.Millisecond).Seconds()
	return r.judge(cs, rest, c.ProcessState.ExitCode(), ctx.Err() != nil)
}

// judge says what a process's cases, last words and status mean.
func (r result) judge(cases []outcome, rest string, status int, late bool) result {
	r.Cases = append(r.Cases, cases...)
	bad := 0
	for _, c := range r.Cases {
		if !c.OK {
			bad++
		}
	}
	r.Verdict = verdictFailed
	switch {
	case late:
		r.Reason = fmt.Sprintf("it has not ended within %v: %s", limit, rest)
	case status == notRun:
		r.Verdict, r.Reason = verdictNotRun, rest
	case bad > 0:
		r.Reason = fmt.Sprintf("%d of %d cases failed", bad, len(r.Cases))
	case status != 0:
		r.Reason = fmt.Sprintf("it ended with status %d: %s", status, rest)
	case len(r.Cases) == 0:
		r.Reason = "no case was run"
	default:
		r.Verdict = verdictPassed
	}
	return r
}

var (
	began = regexp.MustCompile(`^=== (?:RUN|NAME|CONT) +(\S+)$`)
	ended = regexp.MustCompile(`^ *--- (PASS|FAIL|SKIP): (\S+) \(([0-9.]+)s\)$`)
)

// mark stands before the lines of package testing's own. With it the end of a case is told at once, else at the end of all.
const mark = "\x16"

// parse reads what package testing says with -test.v=test2json. What a case says of itself, and what its parts say, is kept if it fails. A case that
// did not come to its end has failed. The rest is what belongs to no case, and what was said in a case without an end.
func parse(out io.Reader) (cases []outcome, rest string) {
	said, running := map[string]string{}, ""
	lines := bufio.NewReader(out)
	for {
		line, err := lines.ReadString('\n')
		if line = strings.ReplaceAll(strings.TrimRight(line, "\n"), mark, ""); line != "" {
			if m := began.FindStringSubmatch(line); m != nil {
				running = caseOf(m[1])
			} else if m := ended.FindStringSubmatch(line); m != nil {
				if c := caseOf(m[2]); c != "" && strings.Count(m[2], "/") == 1 {
					seconds, _ := strconv.ParseFloat(m[3], 64)
					o := outcome{Case: c, OK: m[1] == "PASS", Seconds: seconds}
					if !o.OK {
						o.Reason = strings.TrimSpace(said[c])
					}
					cases = append(cases, o)
					delete(said, c)
					running = ""
				}
			} else if line != "PASS" && line != "FAIL" {
				said[running] = keep(said[running], line)
			}
		}
		if err != nil {
			break
		}
	}
	if running != "" {
		cases = append(cases, outcome{Case: running, Reason: "it did not end: " + strings.TrimSpace(said[running])})
	}
	return cases, strings.TrimSpace(said[""])
}

// caseOf is the case to which a test of the suite belongs; none: "".
func caseOf(test string) string {
	parts := strings.Split(test, "/")
	if len(parts) < 2 {
		return ""
	}
	return strings.ReplaceAll(parts[1], "_", " ")
}

// keep appends a line. Of much text the begin is kept, where the cause stands.
func keep(text, line string) string {
	if len(text) >= maxKeptOutput {
		return text
	}
	text += line + "\n"
	return text[:min(len(text), maxKeptOutput)]
}
