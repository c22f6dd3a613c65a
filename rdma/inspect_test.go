package rdma

import (
	"encoding/json"
	"errors"
	"net/netip"
	"strings"
	"testing"

	"github.com/kvconn/kvconn/rdma/internal/verbs"
)

func entry(index int, kind verbs.GIDType, address, netdev string) verbs.GID {
	return verbs.GID{Index: index, Type: kind, GID: netip.MustParseAddr(address).As16(), NetDev: netdev}
}

// TestInspectPort: doctor tells the state of a port, and what the port lacks.
func TestInspectPort(t *testing.T) {
	roce := []verbs.GID{entry(0, verbs.GIDRoCEv1, "fe80::1", "eth0"), entry(1, verbs.GIDRoCEv2, "fe80::1", "eth0"),
		entry(2, verbs.GIDRoCEv1, "::ffff:10.0.0.1", "eth0"), entry(3, verbs.GIDRoCEv2, "::ffff:10.0.0.1", "eth0")}
	active := verbs.Port{Number: 1, State: verbs.PortActive, LinkLayer: verbs.LinkEthernet, ActiveMTU: 4096, Speed: 100e9}
	down, armed, ib, noLID := active, active, active, active
	down.State, armed.State = verbs.PortDown, verbs.PortArmed
	ib.LinkLayer, ib.LID = verbs.LinkInfiniBand, 7
	noLID.LinkLayer = verbs.LinkInfiniBand
	for what, c := range map[string]struct {
		port    verbs.Port
		gids    []verbs.GID
		err     error
		index   int
		address string // "": it cannot be used
		problem string
		first   int // index of the GID that is listed first
	}{
		"RoCE":                   {active, roce, nil, -1, "10.0.0.1 (RoCE v2, private, eth0)", "", 3},
		"a forced index":         {active, roce, nil, 1, "rdma_gid_index demands", "", 3},
		"an index that is none":  {active, roce, nil, 9, "", "no GID with index 9", 3},
		"no address":             {active, nil, nil, -1, "", "give the port's network interface an IP address", -1},
		"down":                   {down, roce, nil, -1, "", "is down", 3},
		"armed":                  {armed, roce, nil, -1, "", "armed: is a subnet manager", 3},
		"InfiniBand":             {ib, []verbs.GID{entry(0, verbs.GIDInfiniBand, "fe80::2:c903:1", "")}, nil, -1, "LID 7", "", 0},
		"InfiniBand, no LID":     {noLID, nil, nil, -1, "", "subnet manager", -1},
		"a table that is denied": {active, nil, errors.New("denied"), -1, "", "denied", -1},
	} {
		cfg := DefaultConfig()
		cfg.GIDIndex = c.index
		r := inspectPort(&cfg, "mlx5_0", c.port, c.gids, c.err)
		if r.waits != (what == "down" || what == "armed") {
			t.Errorf("%s: it is waited for: %v", what, r.waits)
		}
		if r.Usable != (c.address != "") || !strings.Contains(r.Address, c.address) || !strings.Contains(r.Problem, c.problem) || (r.Problem == "") != r.Usable {
			t.Errorf("%s: %+v", what, r)
		}
		if len(r.GIDs) != len(c.gids) || c.first >= 0 && r.GIDs[0].Index != c.first {
			t.Errorf("%s: GIDs %+v", what, r.GIDs)
		}
	}
}

// On any machine Inspect says something that can be acted on.
func TestInspectThisMachine(t *testing.T) {
	r := Inspect(DefaultConfig())
	if r.Available == (r.Problem != "") {
		t.Errorf("available %v, problem %q", r.Available, r.Problem)
	}
	if r.Memlock.Why == "" || !r.Memlock.Unlimited && r.Memlock.Remedy == "" {
		t.Errorf("memlock %+v", r.Memlock)
	}
	text, err := json.Marshal(r)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%s", text)
	cfg := DefaultConfig()
	cfg.Devices = []string{"no_such_device"}
	if wrong := Inspect(cfg); wrong.Available || wrong.Problem == "" {
		t.Errorf("with a device that is not there: %+v", wrong)
	}
}
