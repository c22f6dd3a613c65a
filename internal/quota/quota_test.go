package quota

import (
	"net"
	"net/netip"
	"testing"
)

func TestAddressOf(t *testing.T) {
	for text, want := range map[string]string{
		"10.1.2.3:5":               "10.1.2.3/32",
		"[::ffff:10.1.2.3]:5":      "10.1.2.3/32", // as a listener on :: hears it
		"[2001:db8:1:2:3:4:5:6]:5": "2001:db8:1:2::/64",
		"[fe80::1%lo]:5":           "fe80::/64",
	} {
		ap, err := netip.ParseAddrPort(text)
		if err != nil {
			t.Fatal(err)
		}
		if got := AddressOf(net.TCPAddrFromAddrPort(ap)); got.String() != want {
			t.Errorf("%s counts under %v, want %s", text, got, want)
		}
	}
	for _, a := range []net.Addr{nil, &net.UnixAddr{}, &net.TCPAddr{}} {
		if got := AddressOf(a); got.IsValid() {
			t.Errorf("%#v counts under %v", a, got)
		}
	}
}

// TestOver: a place goes from who has the most to who has at least two fewer, so that no two take it from each
// other in turn.
func TestOver(t *testing.T) {
	a, b, c := netip.MustParsePrefix("10.0.0.1/32"), netip.MustParsePrefix("10.0.0.2/32"), netip.MustParsePrefix("10.0.0.3/32")
	n := Counts{}
	if _, ok := n.Over(a); ok {
		t.Error("nobody has a place, and one gives one up")
	}
	n.Add(b, 1)
	if _, ok := n.Over(a); ok {
		t.Error("who has one place gives it to who has none")
	}
	n.Add(b, 1)
	n.Add(c, 2)
	if most, ok := n.Over(a); !ok || most != 2 {
		t.Errorf("%v, %v", most, ok)
	}
	n.Add(c, 1)
	if most, ok := n.Over(a); !ok || most != 3 {
		t.Errorf("%v, %v", most, ok)
	}
	if _, ok := n.Over(b); ok {
		t.Error("3 to 2 is no reason")
	}
	n.Add(b, -2)
	n.Add(c, -3)
	if len(n) != 0 {
		t.Errorf("%v is left", n)
	}
}
