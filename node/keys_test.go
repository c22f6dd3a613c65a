package node

import (
	"encoding/json"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/kvconn/kvconn/rig/docstest"
)

// TestKeys: each key of a Config is in the table once, and each default of the table
// is what a Config without that key has.
func TestKeys(t *testing.T) {
	var fields, names []string
	for i := range reflect.TypeFor[Config]().NumField() {
		fields = append(fields, reflect.TypeFor[Config]().Field(i).Tag.Get("json"))
	}
	b, err := json.Marshal(DefaultConfig())
	if err != nil {
		t.Fatal(err)
	}
	var values map[string]any
	if err := json.Unmarshal(b, &values); err != nil {
		t.Fatal(err)
	}
	for _, g := range Keys() {
		for _, k := range g.Keys {
			names = append(names, k.Name)
			if (k.Default == nil) != (k.Without != "") || !strings.HasSuffix(k.Meaning, ".") {
				t.Errorf("%s has default %v, %q, meaning %q", k.Name, k.Default, k.Without, k.Meaning)
			}
			if got := values[k.Name]; k.Default != nil && jsonText(t, got) != jsonText(t, k.Default) {
				t.Errorf("%s is %v by default, want %v", k.Name, got, k.Default)
			}
		}
	}
	slices.Sort(fields)
	slices.Sort(names)
	if !slices.Equal(fields, names) {
		t.Errorf("the table has the keys %v, a Config %v", names, fields)
	}
}

func jsonText(t *testing.T, v any) string {
	t.Helper()
	b, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return strings.Trim(string(b), `"`)
}

// TestConfigurationPage: the tables of docs/configuration.md are what Keys says.
func TestConfigurationPage(t *testing.T) {
	var page strings.Builder
	for _, g := range Keys() {
		fmt.Fprintf(&page, "\n### %s\n\n| key | default | unit | meaning |\n|---|---|---|---|\n", g.Title)
		for _, k := range g.Keys {
			value := k.Without
			if k.Default != nil {
				value = "`" + jsonText(t, k.Default) + "`"
			}
			fmt.Fprintf(&page, "| `%s` | %s | %s | %s |\n", k.Name, value, k.Unit, k.Meaning)
		}
	}
	docstest.Check(t, "../docs/configuration.md", "keys", page.String())
}
