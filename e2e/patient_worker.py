"""A vLLM worker on a CPU that sleeps while it waits: `vllm serve --worker-cls patient_worker.PatientWorker`.

vLLM's workers wait for each other in loops: in shared memory for each sum over the tensor parallel ranks, and for a second
after each of the engine's messages. Where there are fewer cores than workers, a worker that waits takes the processor from
the worker that it waits for.
"""

from __future__ import annotations

import os
from typing import Any

from vllm.distributed.device_communicators import cpu_communicator, shm_broadcast
from vllm.v1.worker.cpu_worker import CPUWorker


class PatientWorker(CPUWorker):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # Ranks that do not agree on a name for the shared memory use gloo, which sleeps.
        shared = cpu_communicator._CPUSHMDistributed
        named = shared.make_group_name
        shared.make_group_name = staticmethod(lambda communicator: f"{named(communicator)}-{os.getpid()}")
        # The seconds that a reader stays busy before it waits for the socket.
        shm_broadcast.SpinCondition.__init__.__defaults__ = (0,)
        # A word that comes between the reader's look into the ring and its wait for the socket is lost. The reader looks into
        # the ring again after this time, which is 5 s by default.
        shm_broadcast.SHM_READER_RECHECK_INTERVAL_MS = 20
        super().__init__(*args, **kwargs)
