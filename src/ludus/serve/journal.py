"""What has run and what is running, by key: so that a request that comes twice runs once.

A request whose key is known joins the running call, or gets the finished one's answer. Finished calls are
forgotten by age, count and size. Forgetting must not turn a late retry into a second run, so the journal
remembers the arrival of the youngest call it ever forgot: a retry whose first attempt is older than that may
have run, a younger one cannot have.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import sys
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from ludus.core.messages import ToolResult
from ludus.serve.problems import Problem
from ludus.tools.wire import CallBody, ErrorKind, dump

_log = logging.getLogger(__name__)

_TRANSIT_SECONDS = 30.0
"""How long a retry may have been on its way, during which its age is not counted."""

Outcome = ToolResult | Problem
Name = tuple[str, str]
"""A session, or nothing, and a key."""


@dataclass(slots=True, eq=False)
class Entry:
    """One call: running, or finished with its outcome."""

    name: Name
    fingerprint: bytes
    arrived: float
    task: asyncio.Task[tuple[Outcome, bool]] | None = None
    outcome: Outcome | None = None
    waiters: int = 0
    size: int = 0
    finished: float = 0.0
    done: asyncio.Event | None = field(default_factory=asyncio.Event)
    """Set when it is finished; then gone, because many finished calls are kept."""
    queue_seconds: float = 0.0
    seconds: float = 0.0


class Journal:
    """Calls by name, running and finished."""

    def __init__(self, keep_seconds: float, keep_calls: int, keep_bytes: int) -> None:
        self._keep_seconds, self._keep_calls, self._keep_bytes = keep_seconds, keep_calls, keep_bytes
        self._running: dict[Name, Entry] = {}
        self._finished: OrderedDict[Name, Entry] = OrderedDict()
        self._size = 0
        self._forgotten_until = float("-inf")

    @property
    def running(self) -> list[Entry]:
        return list(self._running.values())

    def running_under(self, name: Name) -> Entry | None:
        return self._running.get(name)

    def __len__(self) -> int:
        return len(self._finished)

    def find(self, session: str, call: CallBody) -> Entry | None:
        """The call with this key, if any; a `Problem` when that key stood for something else."""
        self._forget_old()
        name = (session, call.key)
        entry = self._running.get(name) or self._finished.get(name)
        if entry is not None and entry.fingerprint != fingerprint(call):
            message = f"the key {call.key!r} was used for a different call; a key is for one call only"
            raise Problem(ErrorKind.KEY_REUSED, message)
        return entry

    def may_have_forgotten(self, age_seconds: float) -> bool:
        """Whether a call that arrived so long ago, or later, could have run and been forgotten."""
        return _now() - age_seconds - _TRANSIT_SECONDS <= self._forgotten_until

    def start(
        self,
        session: str,
        call: CallBody,
        work: Callable[[Entry], Coroutine[Any, Any, tuple[Outcome, bool]]],
    ) -> Entry:
        """Run `work` under this key. It gives the outcome, and whether that is worth remembering."""
        entry = Entry((session, call.key), fingerprint(call), _now())
        self._running[entry.name] = entry
        entry.task = asyncio.create_task(work(entry))
        # By callback, because a task that is cancelled before its first step runs no line of its own.
        entry.task.add_done_callback(lambda task: self._finish(entry, task))
        return entry

    def _finish(self, entry: Entry, task: asyncio.Task[tuple[Outcome, bool]]) -> None:
        keep = False
        if task.cancelled():
            entry.outcome = Problem(ErrorKind.CANCELLED, "the call was cancelled before it was run")
        elif (error := task.exception()) is not None:
            _log.error("a call failed in a way that nobody foresaw", exc_info=error)
            message = f"{type(error).__name__}: {error}"
            entry.outcome, keep = Problem(ErrorKind.FAILED, message, started=True), True
        else:
            entry.outcome, keep = task.result()
        del self._running[entry.name]
        entry.finished = _now()
        if keep:
            self._remember(entry)
        assert entry.done is not None
        entry.done.set()
        entry.done = entry.task = None

    def _remember(self, entry: Entry) -> None:
        outcome = entry.outcome
        entry.size = 256
        if isinstance(outcome, ToolResult):
            entry.size += sys.getsizeof(outcome.content)  # in memory: up to four bytes a character
            entry.size += sum(len(media.data or b"") for media in outcome.media)
        self._finished[entry.name] = entry
        self._size += entry.size
        while self._finished and (
            len(self._finished) > self._keep_calls or self._size > self._keep_bytes
        ):
            self._forget_first()

    def _forget_old(self) -> None:
        oldest = _now() - self._keep_seconds
        while self._finished and next(iter(self._finished.values())).finished < oldest:
            self._forget_first()

    def _forget_first(self) -> None:
        _, entry = self._finished.popitem(last=False)
        self._size -= entry.size
        self._forgotten_until = max(self._forgotten_until, entry.arrived)


def fingerprint(call: CallBody) -> bytes:
    """What makes two requests the same call."""
    return hashlib.blake2b(dump([call.name, call.arguments, call.id]), digest_size=16).digest()


def _now() -> float:
    return asyncio.get_running_loop().time()
