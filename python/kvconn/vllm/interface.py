"""What of vLLM's connector interface kvconn leaves as vLLM has it, with the reason.

Everything else of the interface is in connector.py. A test holds both against the installed vLLM.
"""

from __future__ import annotations

LEFT = {
    "role": "it says which half of the connector this is",
    "_get_connector_metadata": "a helper for connectors, which kvconn does not call",
    "has_connector_metadata": "it is true between bind_connector_metadata and clear_connector_metadata, which call vLLM's own",
    "requires_kv_delivery": "true on an engine that prefills: a request that vLLM preempts while its last step is under way is computed "
    "again, and does not end with blocks that are another's. The partial offers of a preempted request are withdrawn in any case",
    "has_pending_block_frees": "were it true, a running request would wait for a transfer's blocks, and preempt no other. A decode engine "
    "may fetch them as late as the offer lives",
    "get_mem_pool_context": "kvconn carries caches from where vLLM puts them, and needs no pool of its own",
    "set_host_xfer_buffer_ops": "there is no buffer in the host's memory between a cache and the transfer",
    "finish_forward": "what the model reads is not changed by a transfer: vLLM gives the blocks of a load to no step",
    "reset_capture_state": "a capture of CUDA graphs has no metadata of ours, and leaves no state in the worker",
    "get_kv_connector_kv_cache_events": "events of a store that outlives its requests; blocks that were loaded are in vLLM's own events",
    "take_events": "events of a store that outlives its requests; blocks that were loaded are in vLLM's own events",
    "build_connector_worker_meta": "workers have nothing to say to the scheduler but what is sent, received and failed",
    "bind_kv_cache_manager": "the connector keeps blocks alive by what it answers to request_finished, and counts no references itself",
    "bind_gpu_block_pool": "as bind_kv_cache_manager",
    "get_external_cache_hit_sources": "all that kvconn loads has one source, which _cache_hit_source says",
    "register_finished_partial_tail": "copies of a prompt's last, half full block into a store. An offer has that block itself",
    "get_finished_count": "each rank reports each request",
}


def unknown(base: type, ours: type) -> list[str]:
    """What the interface of the installed vLLM has that this release of kvconn was not written for."""
    theirs = {name for name in vars(base) if not name.startswith("__") and name != "_abc_impl"}
    return sorted(name for name in theirs if name not in LEFT and name not in vars(ours))
