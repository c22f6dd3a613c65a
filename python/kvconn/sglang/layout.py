"""SGLang's KV cache, metadata rows and states as regions of blocks.

Group 0 is the KV cache, in pages. A group for each component of the state follows. The last group has the auxiliary rows
(first token, logprobs …): a row is a block. SGLang gives bare addresses. Its pool knows the layers (pools.py), and the numbers
of heads tell what a page holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvconn import IndexKind, Region

from . import kinds, pools

# The position after the last index of a state whose indices end with the prompt.
_END = 1 << 18
_PAGES = ("k", "v", "kv")  # the parts that SGLang sends as the KV cache
# The parts that SGLang sends as a state, by the state's type. Of the parts of "mamba" the pool also has the shapes.
_PARTS = {
    "mamba": ("conv", "temporal"),
    "swa": _PAGES,
    "dsa": ("index",),
    "dsa_tail": ("tail_k", "tail_score"),
    "block_scale": ("k_scale", "v_scale"),
    "block_scale_swa": ("k_scale", "v_scale"),
}


@dataclass(frozen=True)
class Heads:
    """Which KV heads of the model this rank has: SGLang deals them out evenly, or several ranks have the same one."""

    here: int
    total: int
    tp_rank: int
    tp_size: int

    @property
    def first(self) -> int:
        return self.tp_rank * self.total // self.tp_size

    @property
    def known(self) -> bool:
        return self.here > 0 and self.here == max(1, self.total // self.tp_size)


class Layout:
    """The regions, and the block ids of a request by group."""

    def __init__(self, args: Any, pool: Any, draft: Any, heads: Heads, stages: int = 1) -> None:
        """stages: the number of stages of the engine's pipeline."""
        self.page_size = args.page_size
        self.state_types = [getattr(kind, "value", str(kind)) for kind in args.state_types]
        self._kinds = [kinds.state(kind) for kind in self.state_types]
        self.aux_group = 1 + len(self.state_types)
        self.regions: list[Region] = []
        self._heads = heads
        self._pool = pool
        self._owners = pools.owners(pool)
        self._drafts = pools.owners(draft) if draft is not None else {}
        if self._drafts and stages > 1:
            raise ValueError(
                f"kvconn: a draft model is not carried with --pp-size {stages}: each stage would have a cache of all of its layers"
            )
        self._ring = 0  # entries of a request's ring
        missing = dict(self._owners)
        for number, (what, group) in enumerate(self._buffers(args)):
            for address, length, item in group:
                if item:  # else the pool leaves this buffer out
                    self._add(number, what, address, length, item)
                    missing.pop(address, None)
        if missing:
            owner = next(iter(missing.values()))
            raise ValueError(f"kvconn: SGLang has not handed over {owner.part} of layer {owner.layer} of its {type(pool).__name__}")
        self._rows(args)
        groups = {region.group for region in self.regions}
        for group, what in enumerate(("the KV cache", *(f"the state {kind!r}" for kind in self.state_types), "auxiliary rows")):
            if group not in groups:
                raise ValueError(f"kvconn: no layer of this rank has {what}: set --pp-size so that each stage has a layer with it")
        self.pages = min(region.num_blocks for region in self.regions if region.group == 0)
        self.page_bytes = sum(region.block_bytes for region in self.regions if region.group == 0)

    def _buffers(self, args: Any) -> list[tuple[str, Any]]:
        states = zip(self.state_types, args.state_data_ptrs, args.state_data_lens, args.state_item_lens)
        return [
            ("layer", zip(args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens)),
            *((kind, zip(*buffers)) for kind, *buffers in states),
        ]

    def _add(self, group: int, what: str, address: int, length: int, item: int) -> None:
        """A region for a buffer. Its name says the same on every rank, and in both engines."""
        name = type(self._pool).__name__
        draft = address not in self._owners
        owner = (self._drafts if draft else self._owners).get(address)
        if owner is None:
            raise ValueError(f"kvconn: SGLang hands over a buffer of {what!r} that no layer of its {name} has")
        if owner.part.rstrip("0123456789") not in (_PAGES if group == 0 else _PARTS[what]):
            raise ValueError(
                f"kvconn: SGLang hands over {owner.part} of layer {owner.layer} of its {name} as {what!r}, which has no such part"
            )
        label = f"{what}.{'draft ' if draft else ''}{owner.layer}.{owner.part}"
        pages = group == 0 or self._kinds[group - 1].index == "page"
        geometry = self._geometry(item, owner) if pages else {}
        if what == "dsa_tail":
            entries = owner.pool.index_kpool + owner.pool.tail_extra_slots
            if item % entries or self._ring not in (0, entries):
                raise ValueError(f"kvconn: a row of {item} bytes is no ring of {entries} entries (other layers: {self._ring or entries})")
            self._ring, item = entries, item // entries
        elif not geometry and owner.part != "index" and self._heads.tp_size > 1:
            # Each rank has another part of this cache, and only the region's name can tell which part.
            label += f" of rank {self._heads.tp_rank}/{self._heads.tp_size}"
        if owner.shape:
            label += f" {owner.shape}"
        self.regions.append(
            Region(label, address, item, item, length // item, group, index_kind=self._index_kind(group), memory=owner.memory, **geometry)
        )

    def _index_kind(self, group: int) -> int:
        kind = self._kinds[group - 1].index if group else "page"
        if kind == "ring":
            return IndexKind.ring(self._ring)
        return IndexKind.SLOT if kind == "slot" else IndexKind.BLOCK

    def _geometry(self, item: int, owner: pools.Owner) -> dict[str, int]:
        """The geometry of a page that has token after token and, in a token, head after head; empty for any other page."""
        tokens, heads = self.page_size, self._heads
        token = item // tokens
        if item % tokens or owner.part not in _PAGES:
            return {}
        if owner.part == "kv":
            return {"tokens": tokens, "heads": 1, "token_stride": token, "head_stride": token} if token % 4 == 0 else {}
        alike = owner.pool.kv_cache_layout == "nhd" and owner.pool.head_num == heads.here
        if not alike or not heads.known or token % heads.here or (token // heads.here) % 4:
            return {}
        return {
            "tokens": tokens,
            "heads": heads.here,
            "first_head": heads.first,
            "total_heads": max(heads.total, heads.here),
            "token_stride": token,
            "head_stride": token // heads.here,
        }

    def _rows(self, args: Any) -> None:
        # The number of buffers is a part of the name: a buffer that only one engine has would shift the others.
        count = len(args.aux_data_ptrs)
        for number, (address, length, item) in enumerate(zip(args.aux_data_ptrs, args.aux_data_lens, args.aux_item_lens)):
            name = f"aux.{number} of {count}"
            self.regions.append(Region(name, address, item, item, length // item, self.aux_group, index_kind=IndexKind.ROW))

    @property
    def layers(self) -> set[int]:
        """The model's layers that this rank has a cache of."""
        return {owner.layer for owner in self._owners.values()}

    @property
    def plain(self) -> bool:
        """Whether each layer of the model has its cache in the one pool, which then is of one kind."""
        return all(owner.pool is self._pool for owner in self._owners.values())

    @property
    def one_part_each(self) -> list[str]:
        """The types of states that both engines need equal tensor parallel sizes for: each rank has a part, which cannot be cut."""
        return [name for name, kind in zip(self.state_types, self._kinds) if kind.sharded]

    def blocks(self, pages: Any, states: Sequence[Any] | None, row: int | None) -> list[Any]:
        """The block ids of a request, per group."""
        given = list(states or [])
        if len(given) > len(self.state_types):
            raise ValueError(f"SGLang names {len(given)} states of a request, but {len(self.state_types)} are registered")
        out = [ids(pages, "pages")]
        for number, (name, kind) in enumerate(zip(self.state_types, self._kinds)):
            indices = given[number] if number < len(given) and given[number] is not None else ()
            if kind.index == "ring":
                indices = self._entries(name, [int(each) for each in indices])
            block = ids(indices, f"indices of the state {name!r}")
            if kind.index == "slot" and len(block) > 1:
                raise ValueError(f"SGLang names {len(block)} slots of the state {name!r} for a request, want at most 1: {list(block)[:8]}")
            out.append(block)
        return [*out, ids(() if row is None else (row,), "auxiliary rows")]

    def _entries(self, name: str, given: list[int]) -> list[int]:
        """SGLang names the entries of a request's ring by its row, two runs of entries, and the ring's length."""
        if not given:
            return []
        if len(given) != 6 or min(given) < 0:
            raise ValueError(f"indices of the state {name!r} are {given}: a row, two runs and the length of a ring were expected")
        row, at, count, again, more, ring = given
        if ring != self._ring:
            raise ValueError(f"indices of the state {name!r} are of a ring of {ring} entries, {self._ring} are registered")
        if at + count > ring or again + more > ring or count + more > ring:
            raise ValueError(f"indices of the state {name!r} are {given}: the runs exceed a ring of {ring} entries")
        return [row * ring + entry for entry in (*range(at, at + count), *range(again, again + more))]

    def first(self, blocks: Sequence[Sequence[int]], prefix_pages: int) -> list[int]:
        """Per group, the position of the first block in the request."""
        out = [prefix_pages]
        for kind, block in zip(self._kinds, blocks[1:]):
            if kind.index == "ring":
                # Any position that lies in this entry: rings are of equal length, so the other side counts from the same.
                out.append(block[0] % self._ring if len(block) else 0)
            else:
                out.append(_END - len(block) if kind.to_the_end else 0)
        return [*out, 0]


def ids(values: Any, what: str) -> Any:
    """SGLang's indices, of any array type, as the agent takes them."""
    from array import array

    import numpy as np

    # SGLang has some indices on its GPU: it waits here until they are copied.
    flat = np.asarray(values.cpu() if hasattr(values, "cpu") else values).reshape(-1)
    if flat.size == 0:
        return array("I")
    if flat.dtype.kind not in "iu":
        raise ValueError(f"{what} are of type {flat.dtype}, whole numbers were expected")
    if int(flat.min()) < 0 or int(flat.max()) >= 1 << 32:
        wrong = next(int(n) for n in flat if not 0 <= n < 1 << 32)
        raise ValueError(f"{what} hold {wrong}: want 0 to {(1 << 32) - 1}")
    return array("I", flat.astype(np.uint32).tobytes())
