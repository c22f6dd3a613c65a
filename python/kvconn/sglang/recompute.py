"""Requests that are prefilled again under the same room. SGLang's decode retracts them, to go on with other weights.

Each time a request is prefilled is a turn. Both sides must use the same transfer for a turn. SGLang's decode asks prefill
for a further turn by an ordinary request, whose id has the turn's number.
"""

from __future__ import annotations

import re
from typing import Any

from ..prompt import fingerprint
from .allow import RouteError
from .params import KEY_VARIABLE

_AT_ONCE = 256  # requests that a prefill server is asked for
_SAID = 1 << 20  # bytes of an answer
_MARK = re.compile(r"\.kvconn-([1-9][0-9]{0,8})\Z")


def prompt_and_turn(request: Any) -> tuple[int, int]:
    """The fingerprint of a request's prompt (0: not known), and how often it was prefilled before."""
    if getattr(request, "pd_rebootstrap_in_progress", False):  # at decode: the prompt has what was decoded before
        request.kvconn_turn = getattr(request, "kvconn_turn", 0) + 1
        return fingerprint([*request.origin_input_ids, *request.output_ids]), request.kvconn_turn
    prompt = getattr(request, "origin_input_ids_unpadded", None) or request.origin_input_ids
    marked = _MARK.search(str(getattr(request, "rid", "")))
    return fingerprint(prompt) if prompt else 0, int(marked[1]) if marked else 0


def marked(payload: dict[str, Any], turn: int) -> dict[str, Any]:
    """The body of the request to prefill. Its id begins with the first request's id, so that an abort of the first finds it too."""
    return {**payload, "rid": f"{payload['rid']}.kvconn-{turn}"}


def prefill(receiver: Any, payload: dict[str, Any], bound_s: float) -> None:
    """Has the prefill engine of a receiver's request compute the request again."""
    room, rooms = receiver.room, receiver.kv_mgr.rooms

    def ended(result: RouteError | None) -> None:
        if result is not None:
            rooms.abort(room, str(result))

    if receiver.http_port is None:
        ended(RouteError(f"prefill engine at {receiver.bootstrap_addr} does not say at which port it computes a retracted request again"))
    else:
        address = f"{receiver.bootstrap_addr.rpartition(':')[0]}:{receiver.http_port}"
        receiver.kv_mgr.router.prefill_again(address, marked(payload, room.again), bound_s, ended)


class Prefills:
    """Asks prefill servers by their own API. An answer comes only when the server has computed the request, so these calls
    have connections of their own."""

    def __init__(self, access: Any, key: str) -> None:
        """key: the servers' API key; empty: they have none."""
        self._access = access
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self.session: Any = None

    async def ask(self, address: str, payload: dict[str, Any], bound_s: float) -> None:
        import aiohttp

        where = f"prefill server at {address}, asked to compute a retracted request again"
        self._access.url(address, "")  # whether the host may be asked
        if self.session is None:
            self.session = self._access.session(_AT_ONCE)
        try:
            bound = aiohttp.ClientTimeout(total=bound_s)
            about = {"headers": self._headers, "timeout": bound, "allow_redirects": False}
            async with self.session.post(f"http://{address}/generate", json=payload, **about) as answer:
                said = await answer.content.read(_SAID)
        except Exception as error:
            raise RouteError(f"{where}: {str(error) or repr(error)}") from error
        if answer.status != 200:
            remedy = f" ({KEY_VARIABLE} names a file with its API key)" if answer.status in (401, 403) else ""
            raise RouteError(f"{where}: it answers {answer.status}: {said[:200].decode('utf-8', 'replace')}{remedy}")
