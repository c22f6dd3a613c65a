"""kvconn as a disaggregation backend of SGLang.

    python -m sglang.launch_server --model-path MODEL --disaggregation-mode prefill --disaggregation-transfer-backend kvconn

SGLang finds it by the entry point in the group ``sglang.srt.plugins``: nothing is patched and nothing else need be set.
SGLang is imported when :func:`register` runs, not when this package is.
"""

from __future__ import annotations

__all__ = ["register"]


def register() -> None:
    """Adds ``kvconn`` to SGLang's disaggregation backends; SGLang calls it in each of its processes."""
    from .plugin import register as add

    add()
