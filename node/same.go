// Two engines exchange caches only if they have the same model, weights and facts.

package node

import (
	"cmp"
	"fmt"
	"maps"
	"slices"

	"github.com/kvconn/kvconn/core"
	"github.com/kvconn/kvconn/wire"
)

// maxFacts, maxFactName and maxFact are wire's limits of an Agent's MustMatch.
const maxFacts, maxFactName, maxFact = 16, 64, 256

func (c *Config) checkFacts() error {
	if len(c.MustMatch) > maxFacts {
		return fmt.Errorf("%w: config key \"must_match\" has %d names, want at most %d", core.ErrInvalid, len(c.MustMatch), maxFacts)
	}
	for name, value := range c.MustMatch {
		if name == "" || len(name) > maxFactName || len(value) > maxFact {
			return fmt.Errorf("%w: config key \"must_match\" has %.64q with a value of %d bytes, want a name of 1 to %d bytes and a value of at most %d",
				core.ErrInvalid, name, len(value), maxFactName, maxFact)
		}
	}
	return nil
}

// facts are MustMatch as peers are told, in the order of their names.
func (c *Config) facts() []wire.Fact {
	var facts []wire.Fact
	for _, name := range slices.Sorted(maps.Keys(c.MustMatch)) {
		facts = append(facts, wire.Fact{Name: name, Value: c.MustMatch[name]})
	}
	return facts
}

// sameModel: engines that know their weights compare them, under whatever names; others
// compare names.
func sameModel(p, d *wire.Agent) error {
	switch {
	case p.Fingerprint == d.Fingerprint:
		if p.Fingerprint == "" && p.Model != "" && d.Model != "" && p.Model != d.Model {
			return fmt.Errorf("model %.80q at the prefill engine, %.80q at the decode engine", p.Model, d.Model)
		}
		return nil
	case p.Fingerprint == "" || d.Fingerprint == "":
		return fmt.Errorf("%s at the prefill engine, %s at the decode engine: set \"model\" in both configurations or in neither", modelText(p), modelText(d))
	}
	return fmt.Errorf("%s at the prefill engine, %s at the decode engine: their weights or configurations differ", modelText(p), modelText(d))
}

func modelText(a *wire.Agent) string {
	return fmt.Sprintf("model %.40q with fingerprint %s", a.Model, cmp.Or(a.Fingerprint, "none"))
}

// sameFacts names the first fact that differs.
func sameFacts(p, d *wire.Agent) error {
	at := func(a *wire.Agent) map[string]string {
		m := map[string]string{}
		for _, f := range a.MustMatch {
			m[f.Name] = f.Value
		}
		return m
	}
	ours, theirs := at(p), at(d)
	names := maps.Clone(ours)
	maps.Copy(names, theirs)
	for _, name := range slices.Sorted(maps.Keys(names)) {
		if x, y := cmp.Or(ours[name], "none"), cmp.Or(theirs[name], "none"); x != y {
			return fmt.Errorf("%s %.80q at the prefill engine, %.80q at the decode engine", name, x, y)
		}
	}
	return nil
}
