// A transcript is run command by command, and its file is compared with what was printed.

package coretest

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

var rewrite = flag.Bool("rewrite", false, "write what transcripts print now back into their files; the diff is the review")

// Command is one line of a transcript: words, and key=value or key=[a value
// with spaces]. A word in double quotes is a Go string.
type Command struct {
	Line  string
	Pos   string // file:line
	Words []string
	keys  map[string]string
	asked map[string]bool
}

// Value is the value of key, or def.
func (c *Command) Value(key, def string) string {
	c.asked[key] = true
	if v, ok := c.keys[key]; ok {
		return v
	}
	return def
}

// Word is the i-th word, or "".
func (c *Command) Word(i int) string {
	if i < len(c.Words) {
		return c.Words[i]
	}
	return ""
}

// RunTranscripts runs every file that matches glob as a subtest. In a file a
// command stands on a line of its own; "----" and what it prints, up to an
// empty line, follow it. Commands without output have neither. start makes the
// state of one file: run performs a command and returns what it prints, end is
// called after the last one.
func RunTranscripts(t *testing.T, glob string, start func(t *testing.T) (run func(*Command) string, end func())) {
	files, err := filepath.Glob(glob)
	if err != nil || len(files) == 0 {
		t.Fatalf("no transcripts at %s (%v)", glob, err)
	}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".txt"), func(t *testing.T) {
			b, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			run, end := start(t)
			got, err := replay(file, string(b), run)
			if err != nil {
				t.Fatal(err)
			}
			end()
			switch {
			case got == string(b):
			case *rewrite:
				if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
					t.Fatal(err)
				}
			default:
				t.Errorf("%s (go test -rewrite writes it anew)", firstDiff(file, string(b), got))
			}
		})
	}
}

// replay returns the file as it would have to be.
func replay(file, text string, run func(*Command) string) (string, error) {
	var out strings.Builder
	lines := strings.Split(strings.TrimRight(text, "\n"), "\n")
	for i := 0; i < len(lines); i++ {
		line := strings.TrimSpace(lines[i])
		if line == "" || line[0] == '#' {
			out.WriteString(lines[i] + "\n")
			continue
		}
		c, err := parse(line)
		if err != nil {
			return "", fmt.Errorf("%s:%d: %w", file, i+1, err)
		}
		c.Pos = fmt.Sprintf("%s:%d", file, i+1)
		if i+1 < len(lines) && lines[i+1] == "----" { // skip what it printed
			for i++; i+1 < len(lines) && lines[i+1] != ""; i++ {
			}
			i++
		}
		printed := strings.TrimRight(run(c), "\n")
		for k := range c.keys {
			if !c.asked[k] {
				return "", fmt.Errorf("%s: %q takes no %s=", c.Pos, line, k)
			}
		}
		out.WriteString(line + "\n")
		if printed != "" {
			out.WriteString("----\n" + printed + "\n")
			for i+1 < len(lines) && lines[i+1] == "" {
				i++
			}
			if i+1 < len(lines) {
				out.WriteString("\n")
			}
		} else if i < len(lines) && lines[i] == "" {
			out.WriteString("\n")
		}
	}
	return out.String(), nil
}

func parse(line string) (*Command, error) {
	c := &Command{Line: line, keys: map[string]string{}, asked: map[string]bool{}}
	for rest := line; rest != ""; rest = strings.TrimLeft(rest, " ") {
		if rest[0] == '"' {
			q, err := strconv.QuotedPrefix(rest)
			if err != nil {
				return nil, err
			}
			s, _ := strconv.Unquote(q)
			c.Words = append(c.Words, s)
			rest = rest[len(q):]
			continue
		}
		end := strings.IndexByte(rest, ' ')
		if open := strings.Index(rest, "=["); open >= 0 && (end < 0 || open < end) {
			stop := strings.IndexByte(rest, ']')
			if stop < 0 {
				return nil, fmt.Errorf("no ] in %q", rest)
			}
			c.keys[rest[:open]] = rest[open+2 : stop]
			rest = rest[stop+1:]
			continue
		}
		if end < 0 {
			end = len(rest)
		}
		if k, v, ok := strings.Cut(rest[:end], "="); ok {
			c.keys[k] = v
		} else {
			c.Words = append(c.Words, rest[:end])
		}
		rest = rest[end:]
	}
	return c, nil
}

func firstDiff(file, want, got string) string {
	w, g := strings.Split(want, "\n"), strings.Split(got, "\n")
	for i := range max(len(w), len(g)) {
		a, b := at(w, i), at(g, i)
		if a != b {
			from := max(0, i-3)
			return fmt.Sprintf("%s:%d: the transcript has\n\t%s\nbut it is\n\t%s\nafter\n\t%s", file, i+1, a, b,
				strings.Join(slices.Clone(g[from:min(i, len(g))]), "\n\t"))
		}
	}
	return file + ": equal"
}

func at(lines []string, i int) string {
	if i < len(lines) {
		return lines[i]
	}
	return "(end of file)"
}
