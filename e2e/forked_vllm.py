"""`vllm`, whose processes are forked, and sleep while they wait for each other. Pair(forked=True) starts its servers by this file;
test_pair and test_launch start them as users do.

On a CPU vLLM spawns its processes, whatever VLLM_WORKER_MULTIPROC_METHOD says, and each that is spawned imports vLLM anew: ten
seconds of a processor.

An engine and its worker wait for each other with sched_yield, for a second after each message. Linux 6.18, on two cores, then did
not run another session's processes for 31 seconds, although they were ready to (/proc/PID/schedstat): an engine that was to load
let the lease of 15 seconds pass.
"""

from __future__ import annotations

import multiprocessing
import sys
import time

if __name__ == "__main__":
    del sys.path[0]  # this folder

from vllm.utils import system_utils

# Before any other module of vLLM takes the function by its name.
system_utils.get_mp_context = lambda: multiprocessing.get_context("fork")

from vllm.distributed import utils  # noqa: E402

utils.sched_yield = lambda: time.sleep(0.0005)

from vllm.distributed.device_communicators import shm_broadcast  # noqa: E402

if shm_broadcast.sched_yield is not utils.sched_yield:
    raise ImportError("vLLM's shm_broadcast does not wait by utils.sched_yield any more: find what it waits by, and have that sleep")

# A word that comes between the reader's look into the ring and its wait for the socket is lost. The reader looks into the ring
# again after this time, which is 5 s by default.
shm_broadcast.SHM_READER_RECHECK_INTERVAL_MS = 20

from vllm.entrypoints.cli.main import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
