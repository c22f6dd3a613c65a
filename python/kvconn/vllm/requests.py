"""What vLLM says of a request: which client's it is, and what its cache is of."""

from __future__ import annotations

import re
from collections import OrderedDict
from typing import Any

from ..checkpoint import NoFingerprint, adapter_fingerprint
from ..prompt import fingerprint
from .params import BadParams, DecodeParams, PrefillParams

_ADAPTERS = 1024  # the adapters whose fingerprints are kept
_REMEMBERED = 16384  # transfer ids, so that a second request with one of them is noticed

# vLLM makes the ids of one client's request from one id: "1_cmpl-x-0-1a2b3c4d" is a sample, "cmpl-x-1-5e6f7a8b" another prompt of it.
_ID = re.compile(r"(?:(?P<sample>\d+)_)?(?P<whole>(?P<base>.+?)(?:-(?P<prompt>\d{1,7}))?(?:-[0-9a-f]{8})?)")


def siblings(a: str, b: str) -> bool:
    """Whether two requests are samples of one prompt, or prompts of one list: a router gives all of these one transfer id."""
    one, two = _ID.fullmatch(a), _ID.fullmatch(b)
    if one is None or two is None:
        return False
    if one["whole"] == two["whole"]:
        return one["sample"] != two["sample"]
    listed = one["base"].startswith("cmpl-")  # only such a request has a list of prompts
    return listed and one["base"] == two["base"] and one["prompt"] != two["prompt"]


class Taken(BadParams):
    """Another request has the transfer, as it should: another sample or prompt of the same list."""


class Used(BadParams):
    """Another request has the transfer, or had it. The name of that request, which may be another client's, is for the log."""

    def __init__(self, transfer_id: str, owner: str, req_id: str) -> None:
        super().__init__(f"transfer_id {transfer_id!r} was used before: each request, and each retry, needs a transfer_id of its own")
        self.for_the_log = f"{self}; it belongs to request {owner} already, so it cannot be request {req_id}'s"


class Owners:
    """Which request has each transfer, or had it: an agent carries a transfer once, so a second request would wait in
    vain."""

    def __init__(self) -> None:
        self._owners: OrderedDict[str, str] = OrderedDict()

    def take(self, params: PrefillParams | DecodeParams, request: Any) -> None:
        """Raises Taken or Used if the transfer is another request's.

        Several samples of one prompt (n > 1), or several prompts, are several requests with one transfer id: the first of them
        has it. If a request of vLLM's server fails, the server adds one that is aborted at once, in case the failed one was
        not added.
        """
        # An engine of both roles may be P and D of one transfer, so the key names the half.
        key, req_id = f"{'P' if isinstance(params, PrefillParams) else 'D'}:{params.transfer_id}", request.request_id
        owner = self._owners.setdefault(key, req_id)
        if owner != req_id:
            if siblings(owner, req_id) or getattr(request, "abort_immediately", False):
                raise Taken(f"transfer_id {params.transfer_id!r} belongs to request {owner} already")
            raise Used(params.transfer_id, owner, req_id)
        while len(self._owners) > _REMEMBERED:
            self._owners.popitem(last=False)


class Prompts:
    """Fingerprints of prompts. With an adapter (LoRA) a prompt has another cache, and so another fingerprint."""

    def __init__(self, cache_dir: str | None = None) -> None:
        self._cache_dir = cache_dir
        self._adapters: OrderedDict[str, str] = OrderedDict()  # by path

    def check(self, request: Any) -> None:
        """BadParams if the request's adapter cannot be compared."""
        self._adapter(request)

    def fingerprint(self, request: Any) -> int:
        """The fingerprint of a prompt that its tokens describe; 0 for embeddings, and for a session, whose prompt goes on."""
        tokens = request.prompt_token_ids
        if tokens is None or getattr(request, "prompt_embeds", None) is not None or getattr(request, "resumable", False):
            return 0
        adapter = self._adapter(request)
        number = fingerprint(tokens)
        return (number ^ int(adapter[2:18], 16)) or 1 if adapter else number

    def _adapter(self, request: Any) -> str:
        lora = getattr(request, "lora_request", None)
        if lora is None:
            return ""
        path = lora.lora_path
        if getattr(lora, "load_inplace", False):  # other weights may have taken the place of the former ones
            self._adapters.pop(path, None)
        known = self._adapters.get(path)
        if known is None:
            try:
                known = adapter_fingerprint(path, cache_dir=self._cache_dir)
            except NoFingerprint as error:
                raise BadParams(f"the adapter {lora.lora_name!r} cannot be compared: {error}") from error
            self._adapters[path] = known
            while len(self._adapters) > _ADAPTERS:
                self._adapters.popitem(last=False)
        return known
