"""Stand-ins for objects of vLLM and SGLang, held against the installed engine's own classes.

Tests that need no engine use them, and tests to which an engine's whole object would be in the way. Where the engine is installed, a
stand-in with a field that the class does not have is an error: so no test can play an engine that does not exist.
"""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import inspect
import textwrap
from types import SimpleNamespace
from typing import Any


@functools.cache
def installed(engine: str) -> bool:
    return importlib.util.find_spec(engine) is not None


@functools.cache
def fields_of(path: str) -> frozenset[str]:
    """What an object of the class has: its declared fields, its methods and properties, and what its code sets."""
    module, _, name = path.partition(":")
    cls = functools.reduce(getattr, name.split("."), importlib.import_module(module))
    found = set(dir(cls))
    for kind in cls.__mro__[:-1]:
        found |= set(getattr(kind, "__annotations__", {}))
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
        except (OSError, TypeError):  # not written in Python
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and getattr(node.value, "id", "") == "self":
                found.add(node.attr)
    return frozenset(found)


@functools.cache
def set_by(module: str, target: str) -> frozenset[str]:
    """The attributes that a module's code sets on what it calls target."""
    tree = ast.parse(inspect.getsource(importlib.import_module(module)))
    stores = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store))
    return frozenset(node.attr for node in stores if getattr(node.value, "id", "") == target)


def like(path: str, **values: Any) -> Any:
    """A stand-in for an object of the class at "module:Class", with these fields and no other."""
    engine = path.partition(".")[0]
    if installed(engine):
        known = fields_of(path)
        if path == LAYER:  # the CPU's attention backend says on the layer which order it has chosen
            known |= set_by("vllm.v1.attention.backends.cpu_attn", "layer")
        unknown = sorted(set(values) - known)
        assert not unknown, f"{path} of the installed {engine} has no {', '.join(unknown)}"
    return SimpleNamespace(**values)


def older(**values: Any) -> Any:
    """A stand-in for an object of older vLLMs only. The installed vLLM cannot check it: `make e2e-versions` runs the older ones."""
    return SimpleNamespace(**values)


VLLM_CONFIG = "vllm.config:VllmConfig"
MODEL_CONFIG = "vllm.config:ModelConfig"
CACHE_CONFIG = "vllm.config:CacheConfig"
LOAD_CONFIG = "vllm.config:LoadConfig"
PARALLEL_CONFIG = "vllm.config:ParallelConfig"
TRANSFER_CONFIG = "vllm.config:KVTransferConfig"
SPECULATIVE_CONFIG = "vllm.config:SpeculativeConfig"
LORA_CONFIG = "vllm.config:LoRAConfig"
# Releases before 0.31 have these options in the model's configuration.
_OF_MODEL = installed("vllm") and importlib.util.find_spec("vllm.config.aux_output") is None
AUX = "model_config" if _OF_MODEL else "aux_output_config"
AUX_CONFIG = MODEL_CONFIG if _OF_MODEL else "vllm.config.aux_output:AuxOutputConfig"
COMPILATION_CONFIG = "vllm.config:CompilationConfig"
CACHES = "vllm.v1.kv_cache_interface:KVCacheConfig"
GROUP = "vllm.v1.kv_cache_interface:KVCacheGroupSpec"
FULL = "vllm.v1.kv_cache_interface:FullAttentionSpec"
REQUEST = "vllm.v1.request:Request"
LORA_REQUEST = "vllm.lora.request:LoRARequest"
OUTPUT = "vllm.v1.core.sched.output:SchedulerOutput"
NEW_REQUEST = "vllm.v1.core.sched.output:NewRequestData"
CACHED_REQUESTS = "vllm.v1.core.sched.output:CachedRequestData"
BACKEND = "vllm.v1.attention.backend:AttentionBackend"
LAYER = "vllm.model_executor.layers.attention.attention:Attention"
RUNNER = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"

SGLANG_SCHEDULER = "sglang.srt.managers.scheduler:Scheduler"
SGLANG_WORKER = "sglang.srt.managers.tp_worker:TpModelWorker"
SGLANG_RUNNER = "sglang.srt.model_executor.model_runner:ModelRunner"
SGLANG_LORA_MANAGER = "sglang.srt.lora.lora_manager:LoRAManager"
SGLANG_MODEL_CONFIG = "sglang.srt.configs.model_config:ModelConfig"
SGLANG_QUEUE = "sglang.srt.disaggregation.decode:DecodePreallocQueue"
SGLANG_REQUEST = "sglang.srt.managers.schedule_batch:Req"
SGLANG_ALLOCATOR = "sglang.srt.mem_cache.allocator.base:BaseTokenToKVPoolAllocator"
SGLANG_REQUESTS = "sglang.srt.mem_cache.memory_pool:ReqToTokenPool"
SGLANG_TRANSFERS = "sglang.srt.disaggregation.decode:DecodeTransferQueue"
