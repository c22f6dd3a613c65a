// Command licences collects the licences of all that a program links: those of its
// modules, those of parts of a module that have their own, and Go's.
//
//	go run ./rig/licences INTO PACKAGE
//
// INTO, which is replaced as a whole, gets a folder for each module path, and one
// named go. A module without a licence is an error. GO names another go command.
package main

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
)

func main() {
	if len(os.Args) != 3 {
		fmt.Fprintln(os.Stderr, "usage: licences INTO PACKAGE")
		os.Exit(2)
	}
	if err := run(os.Args[1], os.Args[2]); err != nil {
		fmt.Fprintln(os.Stderr, "licences:", err)
		os.Exit(1)
	}
}

// linked is a package of go list -deps.
type linked struct {
	Dir      string
	Standard bool
	Module   *module
}

type module struct {
	Path, Dir string
	Main      bool
}

func run(into, program string) error {
	listed, err := output("list", "-deps", "-json=Dir,Standard,Module", program)
	if err != nil {
		return err
	}
	var packages []linked
	for dec := json.NewDecoder(bytes.NewReader(listed)); ; {
		var p linked
		if err := dec.Decode(&p); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			return err
		}
		packages = append(packages, p)
	}
	root, err := output("env", "GOROOT")
	if err != nil {
		return err
	}
	return collect(into, strings.TrimSpace(string(root)), packages)
}

// licenceOfGo is the folder that has Go's licence. Some packages of Go leave it out of
// its root; then it is that of golang.org/x/sys, which comes with Go and has the same
// text.
func licenceOfGo(goroot string) string {
	if _, err := os.Stat(filepath.Join(goroot, "LICENSE")); err == nil {
		return goroot
	}
	return filepath.Join(goroot, "src", "cmd", "vendor", "golang.org", "x", "sys")
}

func output(args ...string) ([]byte, error) {
	cmd := exec.Command(cmp.Or(os.Getenv("GO"), "go"), args...)
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("go %s: %w", strings.Join(args, " "), err)
	}
	return out, nil
}

// collect copies the licences of Go and of the packages' modules. If it fails, into
// stays as it was.
func collect(into, goroot string, packages []linked) error {
	fresh, err := os.MkdirTemp(filepath.Dir(filepath.Clean(into)), ".licences-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(fresh)
	if err := os.Chmod(fresh, 0o755); err != nil {
		return err
	}
	if err := collectInto(fresh, goroot, packages); err != nil {
		return err
	}
	if err := os.RemoveAll(into); err != nil {
		return err
	}
	return os.Rename(fresh, into)
}

func collectInto(into, goroot string, packages []linked) error {
	// The folders whose licences hold for what is linked, by module.
	of := licenceOfGo(goroot)
	folders := map[module]map[string]bool{{Path: "go", Dir: of}: {of: true}}
	for _, p := range packages {
		if p.Standard || p.Module == nil || p.Module.Main {
			continue
		}
		m := *p.Module
		if folders[m] == nil {
			folders[m] = map[string]bool{}
		}
		for dir := p.Dir; ; dir = filepath.Dir(dir) {
			folders[m][dir] = true
			if dir == m.Dir {
				break
			}
			if len(dir) <= len(m.Dir) {
				return fmt.Errorf("%s is not below its module's folder, %s", p.Dir, m.Dir)
			}
		}
	}
	for m, dirs := range folders {
		licensed := false
		for dir := range dirs {
			found, err := copyNotices(dir, m, filepath.Join(into, filepath.FromSlash(m.Path)))
			if err != nil {
				return err
			}
			licensed = licensed || found
		}
		if !licensed {
			return fmt.Errorf("%s has no licence in %s", m.Path, m.Dir)
		}
	}
	return nil
}

var (
	licence = regexp.MustCompile(`(?i)^(un)?(licen[cs]e|copying)([.-].*)?$`)
	notice  = regexp.MustCompile(`(?i)^(notice|patents|copyright)([.-].*)?$`)
	source  = regexp.MustCompile(`\.(go|s|c|h|py|sh)$`)
)

// copyNotices copies the notices in one folder of a module, and says whether a licence is
// among them.
func copyNotices(dir string, m module, into string) (licensed bool, err error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return false, err
	}
	for _, e := range entries {
		name := e.Name()
		if e.IsDir() || source.MatchString(name) || !licence.MatchString(name) && !notice.MatchString(name) {
			continue
		}
		text, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			return false, err
		}
		below, err := filepath.Rel(m.Dir, dir)
		if err != nil {
			return false, err
		}
		to := filepath.Join(into, below, name)
		if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
			return false, err
		}
		if err := os.WriteFile(to, text, 0o644); err != nil {
			return false, err
		}
		licensed = licensed || licence.MatchString(name)
	}
	return licensed, nil
}
