"""A vLLM worker on a CPU that sleeps while it waits: `vllm serve --worker-cls patient_worker.PatientWorker`.

vLLM's workers wait for each other in loops, in shared memory, for each sum over the tensor parallel ranks. Where there are fewer
cores than workers, a worker that waits takes the processor from the worker that it waits for.
"""

from __future__ import annotations

import os
from typing import Any

from vllm.distributed.device_communicators import cpu_communicator
from vllm.v1.worker.cpu_worker import CPUWorker


class PatientWorker(CPUWorker):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # Ranks that do not agree on a name for the shared memory use gloo, which sleeps.
        shared = cpu_communicator._CPUSHMDistributed
        named = shared.make_group_name
        shared.make_group_name = staticmethod(lambda communicator: f"{named(communicator)}-{os.getpid()}")
        super().__init__(*args, **kwargs)
