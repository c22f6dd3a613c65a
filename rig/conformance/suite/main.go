// Kvgpu-suite holds kvconn's transports to all that a transport promises, with memory on the GPUs of this machine: the same cases as in
// kvconn's tests, in memory that is filled and compared by the CUDA driver's own copies. So it is the same program on the tests' driver
// double and on a real driver (KVCONN_LIBCUDA names it, else libcuda.so.1). It prints JSON. The status is 1 if a case fails, 2 if there is
// no driver or no GPU.
//
//	kvgpu-suite                               all runs; each is a process of its own, so that none ends another
//	kvgpu-suite -only 'host' -cases ordered   the runs and the cases of which the name has this
package main

import (
	"cmp"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvconn/kvconn/rig/coretest"
	"github.com/kvconn/kvconn/rig/testdouble"
	"github.com/kvconn/kvconn/rig/testdouble/engine"
)

// Exit statuses. notRun is that of a run that this machine cannot have.
const (
	failed   = 1
	noDevice = 2
	notRun   = 75
)

// library is where the driver is found, as in kvconn itself.
const library = "KVCONN_LIBCUDA"

// said is the program's JSON.
type said struct {
	Library    string       `json:"library"`
	Double     bool         `json:"double"`
	Driver     int          `json:"driver"`
	Date       string       `json:"date"`
	Device     string       `json:"device"`
	Devices    int          `json:"devices"`
	Runs       []result     `json:"runs"`
	DoubleOnly []doubleOnly `json:"double_only"`
}

func main() {
	testing.Init()
	only := flag.String("only", "", "the runs whose name has this")
	cases := flag.String("cases", "", "the cases whose name matches this")
	one := flag.String("run", "", "this run, in this process")
	folder := flag.String("join", "", "prints one JSON of the files in this folder that the arguments name; kvconn's commit comes by stdin; tells by stderr what they say was not run")
	flag.Parse()
	if *folder != "" {
		out, missed, err := join(*folder, flag.Args(), os.Stdin)
		if len(missed) > 0 {
			fmt.Fprintln(os.Stderr, "What this machine could not run or answer, which is no failure:")
		}
		for _, m := range missed {
			fmt.Fprintln(os.Stderr, m)
		}
		if err == nil {
			_, err = os.Stdout.Write(out)
		}
		if err != nil {
			fmt.Fprintf(os.Stderr, "kvgpu-suite: %v\n", err)
			os.Exit(failed)
		}
		return
	}
	_ = os.Setenv(library, cmp.Or(os.Getenv(library), "libcuda.so.1"))
	if *one != "" {
		os.Exit(runHere(*one))
	}
	s, err := machine()
	if err != nil {
		fmt.Fprintf(os.Stderr, "kvgpu-suite: %v\n", err)
		os.Exit(noDevice)
	}
	s.Runs, s.DoubleOnly = runAll(s, *only, *cases), onTheDouble
	out := json.NewEncoder(os.Stdout)
	out.SetIndent("", " ")
	if err := out.Encode(s); err != nil {
		fmt.Fprintf(os.Stderr, "kvgpu-suite: %v\n", err)
		os.Exit(failed)
	}
	if len(s.Runs) == 0 {
		fmt.Fprintf(os.Stderr, "kvgpu-suite: no run has %q in its name\n", *only)
		os.Exit(failed)
	}
	for _, r := range s.Runs {
		if r.Verdict == verdictFailed {
			os.Exit(failed)
		}
	}
}

// machine looks at the driver and its GPUs.
func machine() (s said, err error) {
	defer func() {
		if bad := recover(); bad != nil { // as testdouble.Program tells of what it cannot do
			err = fmt.Errorf("%v: NOT RUN: there is no CUDA driver with a GPU", bad)
		}
	}()
	e := engine.New(testdouble.Program{}, 0)
	s = said{Library: os.Getenv(library), Double: e.Double(), Date: time.Now().UTC().Format(time.DateOnly)}
	s.Driver = int(int32(e.Out("cuDriverGetVersion")))
	s.Devices, s.Device = devicesOf(e), e.Name()
	if s.Double {
		s.Library = "driver double"
	}
	// Each run has the context to itself.
	e.Bare("cuDevicePrimaryCtxRelease_v2", 0)
	return s, nil
}

func devicesOf(e *engine.Engine) int { return int(int32(e.Out("cuDeviceGetCount"))) }

// runAll runs them one after the other. On the double, which has no speed that matters, all are at once.
func runAll(s said, only, cases string) []result {
	var chosen []kind
	for _, k := range kinds() {
		if strings.Contains(k.name(), only) {
			chosen = append(chosen, k)
		}
	}
	results := make([]result, len(chosen))
	atOnce := make(chan struct{}, 1)
	if s.Double {
		atOnce = make(chan struct{}, len(chosen))
	}
	var all sync.WaitGroup
	for i, k := range chosen {
		atOnce <- struct{}{}
		all.Go(func() {
			defer func() { <-atOnce }()
			results[i] = inItsOwn(k, s.Devices, cases)
			fmt.Fprintln(os.Stderr, results[i].line())
		})
	}
	all.Wait()
	return results
}

// runHere runs the cases of one run, which the flags of package testing choose.
func runHere(name string) int {
	for _, k := range kinds() {
		if k.name() != name {
			continue
		}
		if reason := k.missing(); reason != nil {
			fmt.Fprintln(os.Stderr, reason)
			return notRun
		}
		f := k.fixture()
		suite := testing.InternalTest{Name: suiteName, F: func(t *testing.T) { coretest.TransportSuite(t, f) }}
		testing.Main(regexp.MatchString, []testing.InternalTest{suite}, nil, nil) // does not return
	}
	fmt.Fprintf(os.Stderr, "kvgpu-suite: there is no run %q\n", name)
	return failed
}
