"""The values that go in and out of an :class:`~kvconn.Agent`."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple, Sequence


class IndexKind(IntEnum):
    """What the block ids of a group stand for; a :class:`Region` has it. Both engines must mean the
    same.

    A group whose ids name entries of rings has the kind ``IndexKind.ring(n)``.
    """

    BLOCK = 0  #: a block of the prompt, one after the other
    ROW = 1  #: a row of a table that has one for each request
    SLOT = 2  #: a slot that holds the whole state of one request

    @staticmethod
    def ring(entries: int) -> int:
        """The kind of rings of so many entries, one ring after the other.

        What belongs to position p of the prompt lies in entry p modulo ``entries``.
        ``first_block`` is the position of the first id. After a ring's last entry
        comes its entry 0.
        """
        if not 0 < entries < 1 << 24:
            raise ValueError(f"a ring of {entries} entries: want 1 to {(1 << 24) - 1}")
        return 3 | entries << 8


class Memory(IntEnum):
    """Where a :class:`Region` lies. The two engines' regions may lie in different memory."""

    HOST = 0  #: memory that the processor reads and writes
    DEVICE = 1  #: CUDA device memory of this process; the agent finds out of which GPU


class Region(NamedTuple):
    """A memory range that holds a piece of every block of one KV cache group.

    Block ``i`` lies at ``address + i * block_stride`` and has ``block_bytes``
    bytes. All numbers are bytes and multiples of 4. The memory must stay
    allocated until the agent is closed. The two engines' regions belong together
    by group and name, whatever their order.

    The other fields say what lies where in a block. If all of them are 0, blocks
    are opaque: they are copied whole, between blocks of equal length. Otherwise
    item (token, head) lies at ``token * token_stride + head * head_stride`` and has
    ``block_bytes / (tokens * heads)`` bytes, as many as on the other side. Items lie
    densely, token after token (NHD) or head after head (HND); a latent has one head.
    The region has the heads from ``first_head`` on, of the model's ``total_heads``;
    if both are 0, it has all. Regions of a group may share a name if they hold
    different heads. They have equal ``tokens``. The two engines may have different
    orders and heads, and different numbers of tokens if one divides the other.

    ``index_kind`` says what the ids of the group stand for: a member of :class:`IndexKind`, or
    ``IndexKind.ring(n)``. All regions of a group, on both sides, have the same ``index_kind``.

    ``read_only`` says that nobody may write the memory, as with an array that numpy made
    read-only. An agent that loads refuses such a region. ``memory`` says where the region lies:
    a member of :class:`Memory`. ``device`` is torch's index of the GPU, by which
    :meth:`Agent.moment` finds torch's current stream; -1: not known.
    """

    name: str
    address: int
    block_stride: int
    block_bytes: int
    num_blocks: int
    group: int = 0
    tokens: int = 0
    heads: int = 0
    first_head: int = 0
    total_heads: int = 0
    token_stride: int = 0
    head_stride: int = 0
    index_kind: int = IndexKind.BLOCK
    read_only: bool = False
    memory: int = Memory.HOST
    device: int = -1


class Offer(NamedTuple):
    """Prefill's half of a transfer: these blocks hold it.

    ``block_ids`` has one sequence per KV cache group, in the prompt's order. ``first_block[g]`` is
    the position, in the prompt's blocks of group ``g``, of the first id; the offer does not hold
    the blocks before it (a sliding window). If ``first_block`` is empty, each position is 0. The
    blocks must stay unchanged until the completion. ``prompt`` is the :func:`~kvconn.fingerprint`
    of the prompt's tokens, 64 bits unsigned; 0: none is given. If offer and load give different
    ones, a router has mixed two requests up: both halves end with :attr:`Status.REFUSED`, and
    kvconn writes no byte. ``after`` is a moment of :meth:`Agent.moment`: before it has passed, the
    agent reads nothing of the blocks. 0: the blocks are written already.
    """

    transfer_id: str
    block_ids: Sequence[Sequence[int]]
    token: int = 0
    first_block: Sequence[int] = ()
    prompt: int = 0
    after: int = 0


class PartialOffer(NamedTuple):
    """A partial offer: blocks that are ready while prefill still works on the request.

    ``block_ids`` has, per KV cache group, the blocks that follow those of the partial offers
    before. ``first_block`` is as in :class:`Offer`; the agent reads it only with the first blocks
    of a group. ``ready[g]`` is how many blocks of the prompt, from its start, are ready in group
    ``g``. ``prompt`` is as in :class:`Offer`; give it in each partial offer, so that no block
    goes to a decode engine that asks for another prompt. A later partial offer with another
    fingerprint is an error. ``computing[g]`` counts as ``ready[g]`` does: so many blocks will be
    ready in a region when :attr:`Agent.written` says that the region is written. ``after`` is as
    in :class:`Offer`, for the blocks that are ready.
    """

    transfer_id: str
    block_ids: Sequence[Sequence[int]]
    ready: Sequence[int]
    first_block: Sequence[int] = ()
    prompt: int = 0
    computing: Sequence[int] = ()
    after: int = 0


class Claim(NamedTuple):
    """Decode's request to keep a transfer, which it will load as soon as it has blocks.

    ``bootstrap_addr`` is the prefill engine's ``http://host:port``, however many ranks the engine
    has; ``engine_id`` names one of its data-parallel ranks. With ``report_claims``, a claim whose
    load could only fail gets a completion, which has the claim's ``token``.
    """

    transfer_id: str
    bootstrap_addr: str
    engine_id: str
    token: int = 0


class Load(NamedTuple):
    """Decode's half of a transfer: put it into these blocks.

    ``bootstrap_addr`` is the prefill engine's ``http://host:port``, however many ranks the engine
    has: the agent finds out from which of them it loads, and there is one completion. ``engine_id``
    names one of the data-parallel ranks there. ``first_block[g]`` is the position, in the prompt's
    blocks of group ``g``, of the first block to load; if ``first_block`` is empty, each position is
    0. ``tokens[g]`` is the number of the prompt's tokens, from its start, that the agent copies. If
    ``tokens`` is empty or 0, or blocks are opaque, it copies as many as the blocks have room for. A
    load with no block id at all tells the prefill engine that decode needs nothing, and the prefill
    engine frees its blocks. The blocks belong to the transfer until its completion. ``prompt`` is
    as in :class:`Offer`, of the prompt whose cache decode wants; 0: whatever prefill has under this
    id. ``after`` is a moment of :meth:`Agent.moment`: before it has passed, the agent writes
    nothing into the blocks, since kernels that run may still read or write what the blocks held
    before. 0: no kernel does.
    """

    transfer_id: str
    bootstrap_addr: str
    engine_id: str
    block_ids: Sequence[Sequence[int]]
    first_block: Sequence[int] = ()
    token: int = 0
    tokens: Sequence[int] = ()
    prompt: int = 0
    after: int = 0


class Completion(NamedTuple):
    """How one half of a transfer ended; each accepted offer and load gets one.

    ``kind`` is one of:

    - "load" or "offer": the end of a load or an offer.
    - "demand", on a prefill engine with ``report_demands``: decode has blocks for an
      announced transfer, and asks for it from block ``blocks`` of group 0 on; or the
      transfer has ended, as ``code`` says.
    - "claim", on a decode engine with ``report_claims``: a load of the transfer could
      only fail. ``code`` says why, and is never 0.

    ``code`` is 0 or a :class:`~kvconn.Status`; ``reason`` says why in words. ``transfer_s`` is how
    long bytes were under way. A load by tcp also counts bytes of other loads from the same agent.
    Loads by tcp and local, and offers by tcp, leave out the time in which decode had all that
    prefill had computed. All others count from the first byte to the last. ``wait_s`` of a load is
    its time since the call, less ``transfer_s``. ``wait_s`` of an offer lasts until the sending
    begins.
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
