package attack

import (
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"
	"testing"
	"text/tabwriter"
	"time"
)

var (
	tableFile = flag.String("table", "", "file for the table of what each attack gets")
	disguises = flag.String("disguises", "", "file with what scripts/referee.sh says for the table")
)

// review is the commit that the figures "before" are of.
const review = "8d76f4d"

// row is what an attack got, and gets.
type row struct{ attack, before, now, after string }

var table []row

// got adds to the table what an attack gets now.
func got(t testing.TB, before, format string, args ...any) {
	r := row{attack: t.Name(), before: before, now: fmt.Sprintf(format, args...)}
	t.Logf("before (%s): %s; now: %s", review, r.before, r.now)
	table = append(table, r)
}

func writeTable() error {
	if *tableFile == "" {
		return nil
	}
	if *disguises != "" {
		now, err := os.ReadFile(*disguises)
		if errors.Is(err, fs.ErrNotExist) {
			now, err = []byte("NOT RUN: no FastAPI release could be installed"), nil
		}
		if err != nil {
			return err
		}
		table = append(table, row{"RouterDisguises", "FastAPI 0.121 read a client's bootstrap_host; X-Override-* reached decode", string(now), ""})
	}
	f, err := os.OpenFile(*tableFile, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644) // an attack that is made again has a table of its own below
	if err != nil {
		return err
	}
	w := tabwriter.NewWriter(f, 0, 0, 2, ' ', 0)
	fmt.Fprintf(w, "attack\tgot at %s\tgets now\tmemory a minute after\n", review)
	for _, r := range table {
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\n", strings.TrimPrefix(r.attack, "Test"), r.before, r.now, r.after)
	}
	if err := w.Flush(); err != nil {
		return err
	}
	return f.Close()
}

// honest are loads of an engine that does nothing wrong.
type honest struct {
	well, all int
	times     []time.Duration // from the call to the report
}

func (h *honest) median() time.Duration {
	slices.Sort(h.times)
	return h.times[len(h.times)/2]
}

// load makes one, and notes the memory of both sides.
func (h *honest) load(t testing.TB, p, d *victim, id string) {
	t.Helper()
	p.say("offer %s 4 4", id)
	began := time.Now()
	d.say("load %s 20 4 %s", id, p.from())
	l := d.report(id)
	h.all++
	h.times = append(h.times, time.Since(began))
	if l.Code == "ok" {
		h.well++
	} else {
		t.Logf("honest load %s: %+v", id, l)
	}
	p.watch()
	d.watch()
}

// before is so many of them while nobody attacks.
func before(t testing.TB, p, d *victim) *honest {
	t.Helper()
	h := &honest{}
	for i := range loadsBefore {
		h.load(t, p, d, fmt.Sprint("calm", i))
	}
	p.watch()
	d.watch()
	return h
}

const loadsBefore = 25

// slack is what a median may be longer by beside twice the one before: the machine runs the attack too.
const slack = 50 * time.Millisecond

// comparedWith holds the loads that were made during an attack to those before it.
func (h *honest) comparedWith(t testing.TB, calm *honest) string {
	t.Helper()
	if !raced && h.well*100 < h.all*99 { // under the race detector an agent is some ten times slower: a hello may take too long
		t.Errorf("%d of %d honest loads beside it went well", h.well, h.all)
	}
	if !raced && h.median() > 2*calm.median()+slack {
		t.Errorf("the median of the honest loads beside it is %v, before it was %v", h.median(), calm.median())
	}
	return fmt.Sprintf("%d of %d honest loads well, median %.1f ms (before the attack %.1f)", h.well, h.all, h.median().Seconds()*1000, calm.median().Seconds()*1000)
}

// went holds the loads that were made during an attack to their ends. How long they took is told only: the attacker works on this
// machine too.
func (h *honest) went(t testing.TB) string {
	t.Helper()
	if !raced && h.well != h.all { // under the race detector an agent is some ten times slower, as in comparedWith
		t.Errorf("%d of %d honest loads went well", h.well, h.all)
	}
	return fmt.Sprintf("%d of %d honest loads well, median %.1f ms", h.well, h.all, h.median().Seconds()*1000)
}

// growth holds a victim's memory to its bound.
func (v *victim) growth(t testing.TB) string {
	t.Helper()
	if !raced && v.peak-v.calm > 256 {
		t.Errorf("its memory grew from %.0f to %.0f MiB", v.calm, v.peak)
	}
	return fmt.Sprintf("memory %.0f to %.0f MiB", v.calm, v.peak)
}

// settling are victims that live on, to show that their memory comes back.
var settling []*victim

// settleKeeping is settle of a victim with which so many MiB may stay.
func settleKeeping(t testing.TB, keeps float64, v *victim) {
	v.keeps = keeps
	settle(t, v)
}

// settle lets victims live on after the attack's test.
func settle(t testing.TB, victims ...*victim) {
	for _, v := range victims {
		v.attack, v.over = t.Name(), time.Now()
		settling = append(settling, v)
	}
}
