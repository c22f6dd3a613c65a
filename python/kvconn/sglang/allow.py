"""Which hosts may be asked: a bootstrap address comes from a client's request.

The agent decides by the same rules which hosts it contacts itself. The entries are those of ``bootstrap_allow``. The agent
has read the entries before, and has refused wrong ones.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Sequence
from typing import Union

Address = Union[ipaddress.IPv4Address, ipaddress.IPv6Address]

_LABEL = re.compile(r"[a-z0-9_-]{1,63}\Z")
_NUMBER = re.compile(r"[0-9]*\Z|0x[0-9a-f]*\Z")  # C libraries read 0x7f.1 and 2130706433 as addresses


def _nets(*texts: str) -> list[ipaddress.IPv4Network | ipaddress.IPv6Network]:
    return [ipaddress.ip_network(text) for text in texts]


# Narrow classes come first, so that an entry for all of link-local does not allow a cloud's metadata address.
_REFUSED = (
    (
        "a cloud's metadata address",
        _nets(
            *("169.254.169.254", "169.254.170.2", "169.254.170.23", "100.100.100.200", "168.63.129.16", "192.0.0.192"),
            *("fd00:ec2::254", "fd00:ec2::23", "fd20:ce::254"),
        ),
    ),
    ("the broadcast address", _nets("255.255.255.255")),
    ("link-local", _nets("169.254.0.0/16", "fe80::/10")),
    ("multicast", _nets("224.0.0.0/4", "ff00::/8")),
    ("unspecified", _nets("0.0.0.0/8", "::/128")),
    ("reserved", _nets("240.0.0.0/4")),
)
# Ranges of IPv6 addresses that carry an IPv4 address, with its position in their bytes.
_CARRIERS = list(zip(_nets("64:ff9b::/96", "64:ff9b:1::/48", "2002::/16", "::/96", "::ffff:0:0:0/96"), (12, 12, 2, 12, 12)))


class RefusedError(Exception):
    """A host that may not be contacted; the message says why."""


class RouteError(Exception):
    """The prefill engine cannot be used; the message says why."""


class Allow:
    def __init__(self, entries: Iterable[str] = ()) -> None:
        entries = list(entries)
        self._any = not entries
        self._names: set[str] = set()
        self._ends: list[str] = []
        self._within: list[ipaddress.IPv4Network | ipaddress.IPv6Network] = []
        for entry in entries:
            try:
                self._within.append(ipaddress.ip_network(entry.strip("[]")))
            except ValueError:
                name = entry.lower().rstrip(".")
                if name.startswith("*."):
                    self._ends.append(name[1:])
                else:
                    self._names.add(name)

    def host(self, host: str) -> None:
        """Decides about a host before anything is sent or resolved; raises RefusedError."""
        name, address = self._read(host)
        if address is not None:
            self._decide(host, address, False)
        elif not self._any and not self._within and not self._named(name):
            raise _refused(host, "it is not in the list")

    def found(self, host: str, addresses: Sequence[str]) -> None:
        """Decides about the addresses that a name was resolved to; raises RefusedError."""
        named = self._named(self._read(host)[0])
        for address in addresses:
            self._decide(host, _without_zone(ipaddress.ip_address(address)), named)

    def _read(self, host: str) -> tuple[str, Address | None]:
        try:
            return "", _without_zone(ipaddress.ip_address(host.removeprefix("[").removesuffix("]")))
        except ValueError:
            pass
        name = host.lower().removesuffix(".")
        labels = name.split(".")
        if len(host) > 254 or not all(_LABEL.match(label) for label in labels):
            raise _refused(host[:300], "it is not a host name")
        if _NUMBER.match(labels[-1]):
            raise _refused(host, "it is not an IPv4 address of four decimal numbers")
        return name, None

    def _named(self, name: str) -> bool:
        return bool(name) and (name in self._names or any(name.endswith(end) and len(name) > len(end) for end in self._ends))

    def _decide(self, host: str, address: Address, named: bool) -> None:
        address = getattr(address, "ipv4_mapped", None) or address
        for each in (*_carried(address), address):
            what = self._class(each)
            if what:
                raise _refused(host, f"{address} is {what}")
        if not self._any and not named and not any(address in net for net in self._within):
            raise _refused(host, f"{address} is not in the list")

    def _class(self, address: Address) -> str | None:
        """The refused class of an address, unless an entry within that class holds it."""
        for what, nets in _REFUSED:
            for net in nets:
                if address in net:
                    return None if any(address in own and own.prefixlen >= net.prefixlen for own in self._within) else what
        return None


def _without_zone(address: Address) -> Address:
    return type(address)(int(address))


def _carried(address: Address) -> list[ipaddress.IPv4Address]:
    if address.version == 4 or address == ipaddress.IPv6Address("::1"):
        return []
    return [ipaddress.IPv4Address(address.packed[at : at + 4]) for net, at in _CARRIERS if address in net]


def _refused(host: str, why: str) -> RefusedError:
    return RefusedError(f"host {host!r} is refused: {why}; bootstrap_allow says which hosts may be contacted")
