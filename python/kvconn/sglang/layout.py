"""SGLang's KV cache, metadata rows and states as regions of blocks.

Group 0 is the KV cache, in pages. A group for each component of the state follows. The last group has the auxiliary rows
(first token, logprobs …): a row is a block. SGLang gives bare pointers; the numbers of heads tell what a page holds.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvconn import Region

logger = logging.getLogger("kvconn.sglang")

# States whose indices follow the sequence from some place on to its end. The two sides may begin at different places. All
# other states have equal length on both sides.
_TO_THE_END = ("swa", "dsa", "qsa_compressed", "minimax_index_k", "minimax_dense_kv", "block_scale", "block_scale_swa")
# The position after the last index of such a state.
_END = 1 << 18


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

    def __init__(self, args: Any, heads: Heads | None, mla: bool) -> None:
        self.page_size = args.page_size
        self.state_types = [getattr(kind, "value", str(kind)) for kind in getattr(args, "state_types", None) or []]
        self.aux_group = 1 + len(self.state_types)
        self.regions: list[Region] = []
        self._pages(args, heads, mla)
        for number, kind in enumerate(self.state_types):
            self._state(args, number, kind)
        self._rows(args)
        groups = {region.group for region in self.regions}
        if groups != set(range(self.aux_group + 1)):
            raise ValueError(f"kvconn: no memory for the groups {sorted(set(range(self.aux_group + 1)) - groups)} of {self.state_types}")
        self.pages = min(region.num_blocks for region in self.regions if region.group == 0)
        self.page_bytes = sum(region.block_bytes for region in self.regions if region.group == 0)

    def _pages(self, args: Any, heads: Heads | None, mla: bool) -> None:
        names = page_names(
            len(args.kv_data_ptrs),
            getattr(args, "num_draft_entries", 0),
            list(getattr(args, "kv_layer_ids", None) or []),
            getattr(args, "prefill_start_layer", 0) or 0,
            mla,
        )
        # A layout with a name orders a page in another way.
        plain = getattr(args, "kv_layout", None) is None
        for name, address, length, item in zip(names, args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens):
            if not item:
                continue  # the pool leaves this buffer out
            geometry = _geometry(item, self.page_size, heads, mla) if plain and not name.startswith("draft") else {}
            self.regions.append(Region(name, address, item, item, length // item, 0, **geometry))

    def _state(self, args: Any, number: int, kind: str) -> None:
        layers = (getattr(args, "state_layer_ids", None) or [[]] * len(self.state_types))[number]
        seen: Counter[int] = Counter()
        rows = zip(args.state_data_ptrs[number], args.state_data_lens[number], args.state_item_lens[number])
        for place, (address, length, item) in enumerate(rows):
            if not item:
                continue
            layer = layers[place] if place < len(layers) else place
            self.regions.append(Region(f"{kind}.{layer}.{seen[layer]}", address, item, item, length // item, 1 + number))
            seen[layer] += 1

    def _rows(self, args: Any) -> None:
        # The number of buffers is a part of the name: a buffer that only one engine has would shift the others.
        count = len(args.aux_data_ptrs)
        for number, (address, length, item) in enumerate(zip(args.aux_data_ptrs, args.aux_data_lens, args.aux_item_lens)):
            self.regions.append(Region(f"aux.{number} of {count}", address, item, item, length // item, self.aux_group))

    def blocks(self, pages: Any, states: Sequence[Any] | None, row: int | None) -> list[Any]:
        """The block ids of a request, per group."""
        given = list(states or [])
        if len(given) > len(self.state_types):
            raise ValueError(f"{len(given)} state components, {len(self.state_types)} are registered")
        out = [pages]
        for number in range(len(self.state_types)):
            out.append(given[number] if number < len(given) and given[number] is not None else ())
        return [ids(block, self._what(group)) for group, block in enumerate([*out, () if row is None else (row,)])]

    def _what(self, group: int) -> str:
        if group == 0:
            return "pages"
        return "auxiliary rows" if group == self.aux_group else f"indices of the state {self.state_types[group - 1]!r}"

    def first(self, blocks: Sequence[Sequence[int]], prefix_pages: int) -> list[int]:
        """Per group, the position of the first block in the request."""
        out = [prefix_pages]
        for kind, block in zip(self.state_types, blocks[1:]):
            out.append(_END - len(block) if kind in _TO_THE_END else 0)
        return [*out, 0]


def ids(values: Any, what: str) -> Any:
    """SGLang's indices, of any array type, as the agent takes them."""
    from array import array

    import numpy as np

    flat = np.asarray(values).reshape(-1)
    if flat.size == 0:
        return array("I")
    if flat.dtype.kind not in "iu":
        raise ValueError(f"{what} are of type {flat.dtype}, whole numbers were expected")
    if int(flat.min()) < 0 or int(flat.max()) >= 1 << 32:
        wrong = next(int(n) for n in flat if not 0 <= n < 1 << 32)
        raise ValueError(f"{what} hold {wrong}: want 0 to {(1 << 32) - 1}")
    return array("I", flat.astype(np.uint32).tobytes())


def page_names(count: int, drafts: int, layer_ids: Sequence[int], start_layer: int, mla: bool) -> list[str]:
    """A name for each of the KV cache's buffers. A layer's name is the same on a side that has only some of the layers.

    SGLang's pools give the keys of all layers, then the values; a layer's first buffer is its key.
    """
    if layer_ids and len(layer_ids) != count:
        raise ValueError(f"kvconn: {len(layer_ids)} layer ids for {count} buffers of the KV cache")
    target = count - drafts
    if not layer_ids:
        each = 1 if mla or target % 2 else 2
        layers = target // each
        layer_ids = [start_layer + n for _ in range(each) for n in range(layers)]
    names = []
    seen: Counter[int] = Counter()
    for layer in layer_ids[:target]:
        names.append(f"layer.{layer}.{seen[layer]}")
        seen[layer] += 1
    return [*names, *(f"draft.{number} of {drafts}" for number in range(drafts))]


def _geometry(item: int, tokens: int, heads: Heads | None, mla: bool) -> dict[str, int]:
    """The geometry of a page with token after token, and in a token head after head; empty if the page is not so."""
    if item % tokens:
        return {}
    token = item // tokens
    if mla:
        return {"tokens": tokens, "heads": 1, "token_stride": token, "head_stride": token} if token % 4 == 0 else {}
    if heads is None or not heads.known or token % heads.here or (token // heads.here) % 4:
        return {}
    return {
        "tokens": tokens,
        "heads": heads.here,
        "first_head": heads.first,
        "total_heads": max(heads.total, heads.here),
        "token_stride": token,
        "head_stride": token // heads.here,
    }
