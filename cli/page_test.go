package cli

import (
	"flag"
	"fmt"
	"strings"
	"testing"

	"github.com/kvconn/kvconn/rig/docstest"
)

// TestCommandsPage: docs/configuration.md has each option of each command; the router's
// stand in docs/router.md.
func TestCommandsPage(t *testing.T) {
	var page strings.Builder
	for _, c := range commands() {
		if c.flags == nil {
			fmt.Fprintf(&page, "\n### kvconn %s\n\n%s: [its options](router.md).\n", c.name, c.meaning)
			continue
		}
		fmt.Fprintf(&page, "\n### kvconn %s\n\n%s\n\n| option | default | meaning |\n|---|---|---|\n", c.name, c.meaning)
		c.flags.VisitAll(func(f *flag.Flag) {
			value := ""
			if f.DefValue != "" {
				value = "`" + f.DefValue + "`"
			}
			fmt.Fprintf(&page, "| `--%s` | %s | %s |\n", f.Name, value, f.Usage)
		})
	}
	docstest.Check(t, "../docs/configuration.md", "commands", page.String())
}
