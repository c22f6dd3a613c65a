"""`python -m sglang.launch_server`, whose processes are forked. SGLang spawns them, and each that is spawned imports SGLang anew: ten
seconds of a processor. Engines(forked=True) starts its servers by this file, and warm.py; test_sglang starts them as users do.
"""

from __future__ import annotations

import importlib
import multiprocessing
import runpy
import sys

if __name__ == "__main__":
    del sys.path[0]  # this folder
multiprocessing.set_start_method("fork")
multiprocessing.set_start_method = lambda *_, **__: None


def imports() -> None:
    """What takes longest of what a server imports. SGLang's plugins, kvconn among them, are not in it. setproctitle, by which SGLang names
    its processes, finds a process's title only while the environment is as it was at the start."""
    importlib.import_module("setproctitle").getproctitle()
    for name in ("sglang.launch_server", "sglang.srt.entrypoints.http_server", "sglang.srt.entrypoints.openai.serving_responses"):
        importlib.import_module(name)


def serve() -> None:
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    serve()
