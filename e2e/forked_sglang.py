"""`python -m sglang.launch_server`, whose processes are forked. SGLang spawns them, and each that is spawned imports SGLang anew: ten
seconds of a processor. Engines(forked=True) starts its servers by this file; test_sglang starts them as users do.
"""

from __future__ import annotations

import multiprocessing
import runpy
import sys

if __name__ == "__main__":
    del sys.path[0]  # this folder
multiprocessing.set_start_method("fork")
multiprocessing.set_start_method = lambda *_, **__: None

if __name__ == "__main__":
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)
