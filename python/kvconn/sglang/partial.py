"""The chunks of a request on their way to the agent."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any


class Chunks:
    """The pages of one request, as its prefill hands them over. The last chunk brings the states and the auxiliary row.

    Each chunk but the last is a partial offer, whose pages move while the next chunk is computed. With the last one all
    pages are offered.
    """

    def __init__(self, layout: Any, total: int, prefix_pages: int) -> None:
        self._layout = layout
        self._total = total
        self._prefix_pages = prefix_pages
        self._pages = array("I")

    def add(self, pages: Sequence[int]) -> bool:
        """Whether this chunk is the last one."""
        self._pages.extend(pages)
        if len(self._pages) > self._total:
            raise ValueError(f"SGLang has sent {len(self._pages)} pages, but announced {self._total}")
        return len(self._pages) == self._total

    def partial_offer(self, pages: Sequence[int]) -> tuple[list[Any], list[int], list[int]]:
        """Per group: the blocks of a chunk, how many blocks are there with it, and the position of the first one."""
        nothing = [()] * self._layout.aux_group
        begin = [self._prefix_pages, *[0] * self._layout.aux_group]
        return [pages, *nothing], [self._prefix_pages + len(self._pages), *begin[1:]], begin

    def offer(self, states: Sequence[Any] | None, row: int | None) -> tuple[list[Any], list[int]]:
        """Per group: all blocks, and the position of the first one."""
        blocks = self._layout.blocks(self._pages, states, row)
        return blocks, self._layout.first(blocks, self._prefix_pages)
