"""One engine step, as a worker goes through it.

    phase      entered by                    what is said to the agent
    BOUND      -                             nothing yet
    WITHDRAWN  handle_preemptions, or begin  withdrawals, and the cancels of what is withdrawn
    BEGUN      bind_connector_metadata       announces, offers, claims, refusals, other cancels, partial offers
    LOADED     start_load_kv                 loads, and the cancels of these loads
    WRITTEN    wait_for_save                 which of the partial offers the step has written

Releases of vLLM differ in which of these calls they make, and how often. A step enters each phase once, and passes over
those that nobody has asked for.
"""

from __future__ import annotations

from array import array
from enum import IntEnum

from .metadata import CancelWork, KVConnMetadata, PartialWork


class Phase(IntEnum):
    BOUND = 0
    WITHDRAWN = 1
    BEGUN = 2
    LOADED = 3
    WRITTEN = 4


# An attribute of an enumeration costs a step more than a name of a module does.
BOUND, WITHDRAWN, BEGUN, LOADED, WRITTEN = Phase


# What early sending loses, said once: how many layers, of how many, one of them.
UNCALLED = (
    "%d of %d layers, such as %s, were not called in a step that computes a prompt: a full CUDA graph calls none, and vLLM has no call "
    'for some kinds. Such a step is sent when it has ended, not layer by layer. If send_early is set to "layers", vLLM takes piecewise '
    "graphs, which call layers"
)


class Step:
    """A step whose metadata says something."""

    __slots__ = ("by_layers", "computing", "meta", "partial_calls", "phase", "queued", "unwritten")

    def __init__(self, meta: KVConnMetadata, by_layers: bool = False) -> None:
        self.meta = meta
        self.by_layers = by_layers  # layers tell the agent that they are written
        self.phase = BOUND
        self.computing: list[PartialWork] = []  # the partial offers that the agent has accepted
        # The agent follows what the last call of offer_partial has named, until a cancel ends that.
        self.partial_calls = 0
        self.unwritten: dict[str, array[int]] = {}  # layers that have not told yet that they are written, with their regions
        self.queued = array("I")  # regions that a GPU will write and that the agent has not been told of yet

    def enter(self, phase: Phase) -> bool:
        """Goes on to a phase. False if the step has come to this phase before."""
        if self.phase >= phase:
            return False
        self.phase = phase
        return True

    def cancels(self) -> list[CancelWork]:
        """The cancels of the phase that the step is in."""
        starting = {work.transfer_id for work in self.meta.loads}

        def phase_of(work: CancelWork) -> Phase:
            if not work.of_load and work.transfer_id in self.meta.withdrawals:
                return WITHDRAWN  # before the withdrawal, so that decode does not load the transfer anew
            return LOADED if work.transfer_id in starting else BEGUN  # a load starts before it is cancelled

        return [work for work in self.meta.cancels if phase_of(work) is self.phase]
