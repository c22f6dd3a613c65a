"""The chunks of a request on their way to the agent."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any


class Chunks:
    """The pages of one request, as its prefill hands them over. The last chunk brings the states and the auxiliary row.

    The transfer grows with each chunk, which moves while the next is computed, and is offered as a whole with the last.
    """

    def __init__(self, layout: Any, total: int, prefix_pages: int) -> None:
        self._layout = layout
        self._total = total
        self._prefix_pages = prefix_pages
        self._pages = array("I")

    def add(self, pages: Sequence[int]) -> bool:
        """Whether these were the last."""
        self._pages.extend(pages)
        if len(self._pages) > self._total:
            raise ValueError(f"{len(self._pages)} pages were sent, {self._total} were announced")
        return len(self._pages) == self._total

    def growth(self, pages: Sequence[int]) -> tuple[list[Any], list[int], list[int]]:
        """What a chunk adds to each group, how many blocks are there with it, and where the first one stands."""
        nothing = [()] * self._layout.aux_group
        begin = [self._prefix_pages, *[0] * self._layout.aux_group]
        return [pages, *nothing], [self._prefix_pages + len(self._pages), *begin[1:]], begin

    def offer(self, states: Sequence[Any] | None, row: int | None) -> tuple[list[Any], list[int]]:
        """The blocks of all groups, and where they begin."""
        blocks = self._layout.blocks(self._pages, states, row)
        return blocks, self._layout.first(blocks, self._prefix_pages)
