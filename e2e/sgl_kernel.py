"""A stand-in for SGLang's compiled kernels on machines without a GPU, for the test environment only.

SGLang imports `sgl_kernel` whenever the device is the CPU, and PyPI has no build for it. To serve text with native PyTorch
SGLang needs one of its functions; every other name raises when it is called. `torch.ops.sgl_kernel` stays empty: by that
SGLang knows that there are no compiled CPU kernels.
"""

from __future__ import annotations

import sys
import types
from typing import Any


def assign_req_to_token_pool_cpu(
    req_pool_indices: Any, req_to_token: Any, start_offset: Any, end_offset: Any, out_cache_loc: Any, pool_len: int
) -> None:
    """Writes each request's slice of out_cache_loc into its row of req_to_token, from start to end."""
    taken = 0
    for row, start, end in zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist()):
        req_to_token[row, start:end] = out_cache_loc[taken : taken + end - start]
        taken += end - start


class _Module(types.ModuleType):
    """Any name can be imported from it; a function that is not there raises when it is called, not before."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def missing(*_args: Any, **_kwargs: Any) -> Any:
            raise NotImplementedError(f"{self.__name__}.{name}: this machine has SGLang's Python only, not its kernels")

        return missing


def _install() -> None:
    ours = sys.modules[__name__]
    ours.__class__ = _Module
    for sub in ("kvcacheio", "mamba", "flash_attn"):
        name = f"{__name__}.{sub}"
        sys.modules[name] = _Module(name)


_install()
