package proxy

import (
	"fmt"
	"strings"
	"testing"

	"github.com/kvconn/kvconn/rig/docstest"
)

// TestRouterPage: docs/router.md and the usage have each option.
func TestRouterPage(t *testing.T) {
	usage := Usage()
	var page strings.Builder
	page.WriteString("| option | default | meaning |\n|---|---|---|\n")
	for _, o := range Options() {
		value := ""
		if o.Default != "" {
			value = "`" + o.Default + "`"
		}
		fmt.Fprintf(&page, "| `%s` | %s | %s |\n", strings.TrimSpace(o.Name+" "+o.Value), value, o.Meaning)
		if !strings.Contains(usage, "  "+o.Name+" "+o.Value) {
			t.Errorf("the usage has no %s %s", o.Name, o.Value)
		}
	}
	docstest.Check(t, "../docs/router.md", "options", page.String())
}
