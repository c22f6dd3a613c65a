"""Which hosts a client's request may have a decode engine ask: as the agent decides, case for case (node/allow_test.go)."""

from __future__ import annotations

import ipaddress

import pytest

from kvconn.sglang.allow import Allow, RefusedError

LISTS = {
    "none": Allow(),
    "cidr": Allow(["10.0.0.0/8", "fd12::/16"]),
    "names": Allow(["Prefill-1.", "*.cluster.local"]),
    "mixed": Allow(["prefill-1", "10.1.2.3"]),
    "all": Allow(["0.0.0.0/0", "::/0"]),
    "inside": Allow(["169.254.0.0/16", "fe80::/10", "10.0.0.0/8"]),
    "meta": Allow(["169.254.169.254", "224.1.2.3/32", "fd00:ec2::254"]),
}


@pytest.mark.parametrize(
    ("host", "found", "passes", "why"),
    [
        ("10.1.2.3", "", "none cidr mixed all inside", ""),
        ("127.0.0.1", "", "none all", ""),
        ("::1", "", "none all", ""),
        ("localhost", "127.0.0.1", "none all", ""),
        ("fd12::1", "", "none cidr all", ""),
        ("[2001:db8::1]", "", "none all", ""),
        ("PREFILL-1.", "192.168.9.9", "none names mixed all", ""),
        ("P.Cluster.Local.", "192.168.9.9", "none names all", ""),
        ("cluster.local", "192.168.9.9", "none all", ""),
        ("evilcluster.local", "192.168.9.9", "none all", ""),
        ("p.cluster.local.evil.com", "192.168.9.9", "none all", ""),
        ("other", "10.1.2.3", "none cidr mixed all inside", ""),
        ("prefill-1", "169.254.169.254", "meta", "metadata"),
        ("p.cluster.local", "fe80::1%eth0", "inside", "link-local"),
        ("::ffff:169.254.169.254", "", "meta", "metadata"),
        ("[::ffff:a9fe:a9fe]", "", "meta", "metadata"),
        ("64:ff9b::a9fe:a9fe", "", "", "metadata"),
        ("2002:a9fe:a9fe::1", "", "", "metadata"),
        ("::169.254.169.254", "", "", "metadata"),
        ("fd00:ec2::254", "", "meta", "metadata"),
        ("100.100.100.200", "", "", "metadata"),
        ("fe80::1%eth0", "", "inside", "link-local"),
        ("169.254.1.1", "", "inside", "link-local"),
        ("224.1.2.3", "", "meta", "multicast"),
        ("0.1.2.3", "", "", "unspecified"),
        ("::", "", "", "unspecified"),
        ("255.255.255.255", "", "", "broadcast"),
        ("240.0.0.1", "", "", "reserved"),
        ("0x7f.0.0.1", "", "", "four decimal"),
        ("0xa9fea9fe", "", "", "four decimal"),
        ("2852039166", "", "", "four decimal"),
        ("127.1", "", "", "four decimal"),
        ("10.1.2.3.", "", "", "four decimal"),
        ("010.1.2.3", "", "", "four decimal"),
        ("", "", "", "not a host name"),
        ("a..b", "", "", "not a host name"),
        ("user:pass@10.1.2.3", "", "", "not a host name"),
        ("10.1.2.3/x?y=", "", "", "not a host name"),
        ("10.1.2.3%eth0", "", "", "not a host name"),
        ("\uff11\uff16\uff19.254.169.254", "", "", "not a host name"),
        ("h\n", "", "", "not a host name"),
        ("a." * 200 + "b", "", "", "not a host name"),
    ],
)
def test_allow_list(host: str, found: str, passes: str, why: str) -> None:
    for name, allow in LISTS.items():
        try:
            allow.host(host)
            if found:
                allow.found(host, [found])
        except RefusedError as error:
            assert name not in passes.split(), (name, str(error))
            assert "bootstrap_allow" in str(error) and (name != "none" or why in str(error)), str(error)
        else:
            try:
                literal = bool(ipaddress.ip_address(host.strip("[]")))
            except ValueError:
                literal = False
            assert name in passes.split() or not (literal or found or why), (name, host)
