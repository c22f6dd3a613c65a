"""Hands works over to the agent, all in one call where it takes them all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


def hand_over(
    works: Sequence[Any],
    accept: Callable[[Sequence[Any]], None],
    accepted: Callable[[Any], None],
    refuse: Callable[[Any, Exception], None],
) -> None:
    """accept calls the agent, which takes works in order up to the first that it refuses. Its error names the refused work.

    accept notes all works that it was given, accepted each work before a refused one, and refuse the refused work.
    """
    works = list(works)
    while works:
        try:
            accept(works)
            return
        except Exception as error:
            named = getattr(error, "transfer_id", None)
            place = next((n for n, work in enumerate(works) if work.transfer_id == named), None)
            if place is None and len(works) > 1:
                # The error names none of them: find out one by one which the agent refuses.
                for work in works:
                    hand_over([work], accept, accepted, refuse)
                return
            place = place or 0
            for work in works[:place]:
                accepted(work)
            refuse(works[place], error)
            works = works[place + 1 :]
