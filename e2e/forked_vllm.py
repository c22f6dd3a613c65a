"""`vllm`, whose processes are forked, and sleep while they wait for each other. Pair(forked=True) starts its servers by this file;
test_pair and test_launch start them as users do.

On a CPU vLLM spawns its processes, whatever VLLM_WORKER_MULTIPROC_METHOD says, and each that is spawned imports vLLM anew: ten
seconds of a processor.

An engine and its worker wait for each other with sched_yield, for a second after each message. Linux 6.18, on two cores, then did
not run another session's processes for 31 seconds, although they were ready to (/proc/PID/schedstat): an engine that was to load
let the lease of 15 seconds pass.
"""

from __future__ import annotations

import contextlib
import importlib
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


# What takes longest of what a server imports. vLLM's plugins, kvconn among them, are not in it.
_SLOW = """
vllm.entrypoints.cli.main
vllm.entrypoints.cli.serve
vllm.entrypoints.anthropic.api_router
vllm.entrypoints.generate.api_router
vllm.entrypoints.generate.generative_scoring.api_router
vllm.entrypoints.launchers.api_server.entry
vllm.entrypoints.openai.api_server
vllm.entrypoints.openai.chat_completion.api_router
vllm.entrypoints.openai.completion.api_router
vllm.entrypoints.openai.responses.api_router
vllm.model_executor.models.llama
vllm.renderers.hf
vllm.v1.attention.backends.cpu_attn
vllm.v1.engine.async_llm
vllm.v1.engine.core
vllm.v1.executor.multiproc_executor
vllm.v1.structured_output
vllm.v1.worker.cpu_worker
"""


def imports() -> None:
    for name in _SLOW.split():
        # A name of one release may not be another's; the server imports what it needs.
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(name)


def serve() -> None:
    from vllm.entrypoints.cli.main import main

    sys.exit(main())


if __name__ == "__main__":
    serve()
