// Mutants proves that the simulator bites: it puts one deliberate defect after
// the other into the code, runs the simulator's seeds, and prints which seed and
// which check has found it. The tree is not changed (go test -overlay). It ends
// with status 1 if a defect is not found, or does not apply any more.
//
//	go run ./internal/mutants [-seeds 2000] [name ...]
package main

import (
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"text/tabwriter"
	"time"
)

func main() {
	seeds := flag.Int("seeds", 2000, "seeds of the simulator for each defect")
	flag.Parse()
	if err := run(*seeds, flag.Args()); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(seeds int, only []string) error {
	root, err := moduleRoot()
	if err != nil {
		return err
	}
	dir, err := os.MkdirTemp("", "kvconn-mutants-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	table := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', 0)
	fmt.Fprintln(table, "mutant\twhat it breaks\tseed\tseconds\tfound by")
	n, survived := 0, 0
	for _, m := range mutants {
		if len(only) > 0 && !slices.Contains(only, m.name) {
			continue
		}
		n++
		seed, found, took, err := m.hunt(root, dir, seeds)
		if err != nil {
			return fmt.Errorf("mutant %s: %w", m.name, err)
		}
		if found == "" {
			survived++
			seed, found = "-", "NOT FOUND"
		}
		fmt.Fprintf(os.Stderr, "%s: seed %s: %s\n", m.name, seed, found)
		fmt.Fprintf(table, "%s\t%s\t%s\t%.1f\t%s\n", m.name, m.breaks, seed, took.Seconds(), found)
	}
	if err := table.Flush(); err != nil {
		return err
	}
	if n == 0 {
		return fmt.Errorf("there is no mutant named %s", strings.Join(only, " "))
	}
	if survived > 0 {
		return fmt.Errorf("%d of %d mutants were not found in %d seeds", survived, n, seeds)
	}
	return nil
}

func moduleRoot() (string, error) {
	out, err := exec.Command("go", "env", "GOMOD").Output()
	if err != nil {
		return "", fmt.Errorf("go env GOMOD: %w", err)
	}
	return filepath.Dir(strings.TrimSpace(string(out))), nil
}

// apply returns the file with the defect in it.
func (m *mutant) apply(root string) (string, error) {
	b, err := os.ReadFile(filepath.Join(root, m.file))
	if err != nil {
		return "", err
	}
	if n := strings.Count(string(b), m.old); n != 1 {
		return "", fmt.Errorf("its old text stands %d times in %s, want once; it reads\n%s", n, m.file, m.old)
	}
	return strings.Replace(string(b), m.old, m.now, 1), nil
}

var failedSeed = regexp.MustCompile(`seed (\d+): (.*)`)

// hunt builds the simulator with the defect and runs it up to the first seed
// that fails.
func (m *mutant) hunt(root, dir string, seeds int) (seed, found string, took time.Duration, err error) {
	text, err := m.apply(root)
	if err != nil {
		return "", "", 0, err
	}
	changed, overlay, program := filepath.Join(dir, m.name+".go"), filepath.Join(dir, m.name+".json"), filepath.Join(dir, "sim.test")
	replace, err := json.Marshal(map[string]map[string]string{"Replace": {filepath.Join(root, m.file): changed}})
	if err == nil {
		err = errors.Join(os.WriteFile(changed, []byte(text), 0o644), os.WriteFile(overlay, replace, 0o644))
	}
	if err != nil {
		return "", "", 0, err
	}
	build := exec.Command("go", "test", "-c", "-overlay", overlay, "-o", program, "./core")
	build.Dir = root
	if out, err := build.CombinedOutput(); err != nil {
		return "", "", 0, fmt.Errorf("it does not build: %w\n%s", err, out)
	}
	began := time.Now()
	test := exec.Command(program, "-test.run", "^TestSim$", "-test.timeout", "5m", "-sim.seeds", fmt.Sprint(seeds), "-sim.out", dir)
	test.Dir = filepath.Join(root, "core")
	out, err := test.CombinedOutput()
	took = time.Since(began)
	if line := failedSeed.FindStringSubmatch(string(out)); line != nil {
		return line[1], line[2], took, nil
	}
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		return "", "", 0, err
	}
	return "", "", took, nil
}
