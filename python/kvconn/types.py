"""The values that go in and out of an :class:`~kvconn.Agent`."""

from __future__ import annotations

from typing import NamedTuple, Sequence


class Region(NamedTuple):
    """A memory range that holds a piece of every block of one KV cache group.

    Block ``i`` lies at ``address + i * block_stride`` and has ``block_bytes``
    bytes. All numbers are bytes and multiples of 4. The memory must stay
    allocated until the agent is closed. Both engines register the same names in
    the same order.
    """

    name: str
    address: int
    block_stride: int
    block_bytes: int
    num_blocks: int
    group: int = 0


class Offer(NamedTuple):
    """Prefill's half of a transfer: these blocks hold it.

    ``block_ids`` has one sequence per KV cache group, in the prompt's order
    from its first block. The blocks must stay unchanged until the completion.
    """

    transfer_id: str
    block_ids: Sequence[Sequence[int]]
    token: int = 0


class Claim(NamedTuple):
    """Decode's word that it will load a transfer as soon as it has blocks.

    ``bootstrap_addr`` is the prefill engine's ``http://host:port``.
    """

    transfer_id: str
    bootstrap_addr: str
    engine_id: str


class Load(NamedTuple):
    """Decode's half of a transfer: put it into these blocks.

    ``bootstrap_addr`` is the prefill engine's ``http://host:port``.
    ``first_block[g]`` is the position, in the prompt's blocks of group ``g``,
    of the first one to load; empty means 0. With no block id at all the prefill
    engine is told that nothing is needed, and frees its blocks. The blocks
    belong to the transfer until its completion.
    """

    transfer_id: str
    bootstrap_addr: str
    engine_id: str
    block_ids: Sequence[Sequence[int]]
    first_block: Sequence[int] = ()
    token: int = 0


class Completion(NamedTuple):
    """How one half of a transfer ended; each accepted offer and load gets one.

    ``kind`` is "load" or "offer". ``code`` is 0 or a :class:`~kvconn.Status`;
    ``reason`` says why in words. ``wait_s`` runs from the call to the first
    byte, ``transfer_s`` from the first byte to the last.
    """

    transfer_id: str
    kind: str
    code: int
    reason: str
    bytes: int
    blocks: int
    segments: int
    wait_s: float
    transfer_s: float
    transport: str
    token: int = 0

    @property
    def ok(self) -> bool:
        """Whether the transfer ended well."""
        return self.code == 0
