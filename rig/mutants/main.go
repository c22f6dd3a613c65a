// Mutants proves that the simulator bites. It breaks the code at one named place after the
// other (internal/fault), runs the simulator's seeds, and prints which seed and which
// check has found it. If a defect is not found, or if the simulator fails without one, it
// ends with status 1.
//
//	go run ./rig/mutants [-seeds 2000] [name ...]
package main

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
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
	list := mutants
	if len(only) > 0 {
		list = nil
		for _, name := range only {
			i := slices.IndexFunc(mutants, func(m mutant) bool { return m.name == name })
			if i < 0 {
				return fmt.Errorf("there is no mutant named %s", name)
			}
			list = append(list, mutants[i])
		}
	}
	dir, err := os.MkdirTemp("", "kvconn-mutants-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	s, err := build(dir, "faults")
	if err != nil {
		return err
	}
	sound, err := s.hunt("", min(seeds, soundSeeds))
	switch {
	case err != nil:
		return err
	case sound.failed:
		return fmt.Errorf("the simulator fails without a defect: seed %s: %s", sound.seed, sound.by)
	}
	found, err := s.huntAll(list, seeds)
	if err != nil {
		return err
	}
	return tell(list, found, seeds)
}

// soundSeeds are enough to show that the code with its places for defects is sound
// while none is broken; more of them run in TestSim.
const soundSeeds = 200

// atOnce is how many defects are hunted side by side: many are found so soon that
// most of the time goes into the start and the end of their processes.
const atOnce = 2

// simulator is the simulator's test program; with the tag "faults" all defects are in it,
// and none is awake.
type simulator struct{ root, dir, program string }

func build(dir, tags string) (*simulator, error) {
	root, err := moduleRoot()
	if err != nil {
		return nil, err
	}
	s := &simulator{root: root, dir: dir, program: filepath.Join(dir, "sim.test")}
	cmd := exec.Command("go", "test", "-c", "-tags", tags, "-o", s.program, "./core/machine")
	cmd.Dir = root
	if out, err := cmd.CombinedOutput(); err != nil {
		return nil, fmt.Errorf("the simulator does not build: %w\n%s", err, out)
	}
	return s, nil
}

func moduleRoot() (string, error) {
	out, err := exec.Command("go", "env", "GOMOD").Output()
	if err != nil {
		return "", fmt.Errorf("go env GOMOD: %w", err)
	}
	return filepath.Dir(strings.TrimSpace(string(out))), nil
}

// finding is the result of a run of the simulator. If the run fails and names no seed, it
// has not found anything: by is then empty.
type finding struct {
	failed   bool
	seed, by string
	took     time.Duration
}

var failedSeed = regexp.MustCompile(`seed (\d+): (.*)`)

// hunt runs the simulator with a defect, or with none, up to the first seed that fails.
func (s *simulator) hunt(name string, seeds int) (finding, error) {
	began := time.Now()
	test := exec.Command(s.program, "-test.run", "^TestSim$", "-test.timeout", "5m", "-sim.seeds", fmt.Sprint(seeds), "-sim.out", s.dir)
	test.Dir = filepath.Join(s.root, "core", "machine")
	test.Env = append(os.Environ(), "KVCONN_FAULT="+name)
	out, err := test.CombinedOutput()
	f := finding{failed: err != nil, took: time.Since(began)}
	if line := failedSeed.FindStringSubmatch(string(out)); line != nil {
		f.seed, f.by = line[1], line[2]
	}
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		return f, fmt.Errorf("mutant %s: %w", name, err)
	}
	return f, nil
}

// huntAll hunts defects side by side.
func (s *simulator) huntAll(list []mutant, seeds int) ([]finding, error) {
	found, errs := make([]finding, len(list)), make([]error, len(list))
	next := make(chan int)
	var wg sync.WaitGroup
	for range atOnce {
		wg.Go(func() {
			for i := range next {
				found[i], errs[i] = s.hunt(list[i].name, seeds)
			}
		})
	}
	for i := range list {
		next <- i
	}
	close(next)
	wg.Wait()
	return found, errors.Join(errs...)
}

// tell prints the table; it is an error that a defect was not found.
func tell(list []mutant, found []finding, seeds int) error {
	table := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', 0)
	fmt.Fprintln(table, "mutant\twhat it breaks\tseed\tseconds\tfound by")
	survived := 0
	for i, m := range list {
		f := found[i]
		if f.by == "" {
			survived++
			f.seed, f.by = "-", "NOT FOUND"
		}
		fmt.Fprintf(table, "%s\t%s\t%s\t%.1f\t%s\n", m.name, m.breaks, f.seed, f.took.Seconds(), f.by)
	}
	if err := table.Flush(); err != nil {
		return err
	}
	if survived > 0 {
		return fmt.Errorf("%d of %d mutants were not found in %d seeds", survived, len(list), seeds)
	}
	return nil
}
