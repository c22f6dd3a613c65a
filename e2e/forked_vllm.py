"""`vllm`, whose processes are forked. On a CPU vLLM spawns them, whatever VLLM_WORKER_MULTIPROC_METHOD says, and each that is spawned
imports vLLM anew: ten seconds of a processor. Pair(forked=True) starts its servers by this file; test_pair and test_launch start
them as users do.
"""

from __future__ import annotations

import multiprocessing
import sys

if __name__ == "__main__":
    del sys.path[0]  # this folder

from vllm.utils import system_utils

# Before any other module of vLLM takes the function by its name.
system_utils.get_mp_context = lambda: multiprocessing.get_context("fork")

from vllm.entrypoints.cli.main import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
