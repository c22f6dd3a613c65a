"""How often the engine of this process has replaced its weights while it ran: a part of each prompt's fingerprint.

When two engines meet, they compare the weights with which they started. They do not compare what each has replaced since
then, but only how often: an engine that has replaced its weights exchanges caches only with engines that have replaced
theirs as often. Each replacement reaches all ranks of an engine, so all ranks count the same.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from hashlib import sha256
from typing import Any

from .errors import Status, TransferError

logger = logging.getLogger("kvconn.weights")


class Weights:
    """Follows what becomes of an engine's weights after its start. All calls come from the thread that runs the model."""

    def __init__(self) -> None:
        self.replaced = 0  # replacements that were begun
        self._sessions: dict[Any, bool] = {}  # models whose parts are replaced one by one, and whether a part has failed
        self._unsure: set[Any] = set()  # models whose last replacement has begun and has not ended well
        self._inside = False

    def of_prompt(self, prompt: int) -> int:
        """A prompt's fingerprint, changed by the count of replacements. Before the first replacement it is unchanged.

        Raises TransferError if nobody can know whether another engine has the same weights.
        """
        if self._unsure:
            raise _refused(
                "this engine's weights are being replaced, or their last replacement has failed: it exchanges no KV cache until one has "
                "ended well"
            )
        if not self.replaced:
            return prompt
        if not prompt:  # 0 is equal to each fingerprint
            raise _refused(
                "this engine has replaced its weights since its start, and the prompt has no fingerprint (embeddings, or a session) that "
                "could tell the other engine: restart both engines to exchange such caches"
            )
        return (prompt ^ int.from_bytes(sha256(b"weights %d" % self.replaced).digest()[:8], "little")) or 1

    def begin(self, model: Any) -> None:
        """Called before anything is replaced. A replacement that fails midway counts too: it leaves weights that no other engine has."""
        self.replaced += 1
        self._unsure.add(model)
        logger.info(
            "this engine replaces its weights, for the %d. time: from now on it exchanges KV caches only with engines that have replaced "
            "theirs as often",
            self.replaced,
        )

    def lose(self, model: Any) -> None:
        """Called when the weights are gone, until a replacement brings new ones."""
        self._unsure.add(model)

    def end(self, model: Any) -> None:
        self._unsure.discard(model)

    def replace(self, model: Any, call: Callable[[], Any]) -> Any:
        """Makes a call that replaces a model's weights. If a session is open, the call replaces a part
        of them, and only the session counts."""
        if self._inside:  # a call of another one that counts already
            return call()
        session = model in self._sessions
        if not session:
            self.begin(model)
        self._inside, well = True, False
        try:
            result = call()
            well = not (isinstance(result, tuple) and result and result[0] is False)  # SGLang's form: whether it went well, and a message
        finally:
            self._inside = False
            if session and not well:
                self._sessions[model] = True
        if well and not session:
            self.end(model)
        return result

    def part(self, call: Callable[[], Any]) -> Any:
        """Makes a call that brings weights for the models that are replaced in parts."""
        try:
            return call()
        except BaseException:
            self._sessions = dict.fromkeys(self._sessions, True)
            raise

    def open(self, model: Any, call: Callable[[], Any]) -> Any:
        """Makes a call after which a model's weights are replaced in parts."""
        if self._sessions.get(model) is not False:  # a session that is open already, and has not failed, goes on
            self.begin(model)
            self._sessions[model] = True
        result = call()
        self._sessions[model] = False
        return result

    def close(self, model: Any, call: Callable[[], Any]) -> Any:
        """Makes a call after which all parts are there."""
        result = call()
        if not self._sessions.pop(model, True):
            self.end(model)
        return result


def _refused(reason: str) -> TransferError:
    return TransferError(reason, code=Status.REFUSED)


engine = Weights()  # of this process


def started() -> None:
    """The engine has the weights of its start."""
    global engine
    engine = Weights()


def follow(cls: type, name: str, how: Callable[..., Any]) -> bool:
    """Runs how(call, self, *args, **kwargs) around each call of a method of an engine's class. Returns whether the class has the method.

    The function changes the method once in a process, however often it is called for it, and for classes that inherit the method too.
    """
    method = getattr(cls, name, None)
    if method is None:
        return False
    if not hasattr(method, "kvconn_follows"):

        @functools.wraps(method)
        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            return how(lambda: method(self, *args, **kwargs), self, *args, **kwargs)

        run.kvconn_follows = True  # type: ignore[attr-defined]
        setattr(cls, name, run)
    return True
