"""Requests to the engine: callers who wait for them on their event loops, and their state while they are
served."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ludus.core.failures import EngineError
from ludus.core.generation import Completion, FinishReason, OnTokens, Sampling, VersionSpan, first_stop
from ludus.core.messages import MediaSpan
from ludus.engine.embedded.block_manager import BlockTable
from ludus.remote.limits import Wait

if TYPE_CHECKING:
    from ludus.model.image_layout import ContextLayout


class ReplyFuture:
    """A future on the caller's event loop, to be resolved from the engine's thread."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[Any] = self.loop.create_future()

    def settle(self, outcome: object) -> None:
        """Set the result, or raise the exception in the caller. On its event loop only."""
        if self.future.done():
            return
        if isinstance(outcome, BaseException):
            self.future.set_exception(outcome)
        else:
            self.future.set_result(outcome)


class TokenStream:
    """Tells a caller what was sampled for it so far, before its future is resolved."""

    def __init__(self, reply_future: ReplyFuture, tokens: list[int], on_tokens: OnTokens) -> None:
        """`tokens` are the request's own: a prompt now, which grows."""
        self.reply_future, self.loop = reply_future, reply_future.loop
        self._tokens, self._told, self._on_tokens = tokens, len(tokens), on_tokens

    def take(self) -> list[int]:
        """The tokens since the last time. On the engine's thread only."""
        new = self._tokens[self._told :]
        self._told += len(new)
        return new

    def settle(self, outcome: Any) -> None:
        """Hand tokens to the caller, if it is still there. On its event loop only."""
        if not self.reply_future.future.done():
            self._on_tokens(outcome)


Receiver = ReplyFuture | TokenStream


def _settle_all(loop: asyncio.AbstractEventLoop, outcomes: Sequence[tuple[Receiver, object]]) -> bool:
    """Settle futures of one loop, from any thread; False when that loop is closed and its callers are gone."""

    def settle() -> None:
        for receiver, outcome in outcomes:
            receiver.settle(outcome)

    try:
        loop.call_soon_threadsafe(settle)
    except RuntimeError:
        return False
    return True


class Outbox:
    """What callers are to hear after the current step. On the engine's thread, or under its lock."""

    def __init__(self) -> None:
        self.unresolved: set[ReplyFuture] = set()
        """The futures of callers that have no outcome yet."""
        self.streams: list[TokenStream] = []
        self._outcomes: list[tuple[Receiver, object]] = []

    def reply(self, reply_future: ReplyFuture, outcome: object) -> None:
        """Resolve a caller's future."""
        self.unresolved.discard(reply_future)
        self._outcomes.append((reply_future, outcome))

    def report_tokens(self) -> None:
        """What requests with a stream have sampled in this step, in order with the replies."""
        self.streams = [one for one in self.streams if one.reply_future in self.unresolved]
        self._outcomes += [(stream, new) for stream in self.streams if (new := stream.take())]

    def fail_all(self, error: EngineError) -> None:
        """Resolve every future with an error."""
        self._outcomes += [(reply_future, copy_of(error)) for reply_future in self.unresolved]
        self.unresolved.clear()
        self.deliver()

    def deliver(self) -> None:
        """One wake-up for each loop, however many of its callers are answered."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[Receiver, object]]] = {}
        for receiver, outcome in self._outcomes:
            by_loop.setdefault(receiver.loop, []).append((receiver, outcome))
        self._outcomes.clear()
        for loop, outcomes in by_loop.items():
            _settle_all(loop, outcomes)


def copy_of(error: EngineError) -> EngineError:
    """An error for one more caller: each adds its own traceback."""
    copy = EngineError(str(error), retriable=error.retriable)
    copy.__cause__ = error.__cause__
    return copy


class _Waiter(ReplyFuture):
    """A caller in the queue; its future is done when it is admitted or cancelled."""

    def __init__(self, tag: str | None) -> None:
        super().__init__()
        self.tag, self.is_cancelled = tag, False

    def wake(self) -> bool:
        return _settle_all(self.loop, [(self, None)])


class AdmissionQueue:
    """Admits `capacity` callers, first come, first served, across threads and event loops.

    Each one that leaves, from any thread, admits the next.
    """

    def __init__(self, capacity: int) -> None:
        self._lock = threading.Lock()
        self.free = capacity
        """How many callers could enter without waiting."""
        self._queue: deque[_Waiter] = deque()
        self._arriving: set[_Waiter] = set()  # queued, or admitted and not yet awake

    async def enter(self, tag: str | None = None) -> bool:
        """Wait to be admitted; False when `cancel` was called meanwhile."""
        with self._lock:
            if self.free > 0 and not self._queue:
                self.free -= 1
                return True
            waiter = _Waiter(tag)
            self._queue.append(waiter)
            self._arriving.add(waiter)
        entered = False
        try:
            await waiter.future
            entered = not waiter.is_cancelled
        finally:
            with self._lock:
                self._arriving.discard(waiter)
                is_queued = waiter in self._queue
                if is_queued:
                    self._queue.remove(waiter)
            if not entered and not is_queued:
                self.leave()  # it was given a place just now
        return entered

    def leave(self, wait: Wait | None = None, loop: asyncio.AbstractEventLoop | None = None) -> None:
        """Give a place back. A `wait` in an event loop ends with that."""
        with self._lock:
            while self._queue:
                if self._queue.popleft().wake():
                    break
            else:
                self.free += 1
        if wait is not None and loop is not None and wait.is_limited:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(wait.leave)

    def cancel(self, tag: str | None = None) -> None:
        """Turn away the callers that wait under this tag, or all."""
        with self._lock:
            for waiter in self._arriving:
                if tag is None or waiter.tag == tag:
                    waiter.is_cancelled = True
                    waiter.wake()


Decode = Callable[[Sequence[int]], str]


class StopChecker:
    """Finds stop strings in the decoded tail of the output, at a cost that does not grow with the output.

    The tail always covers more characters than the longest stop string has, so that cutting it inside a
    character or a word, which can garble its first letters, hides nothing.
    """

    def __init__(self, stops: Sequence[str], decode: Decode) -> None:
        self._stops = tuple(stops)
        self._decode = decode
        self._tail: list[int] = []
        self._reach = max(len(stop) for stop in stops) + 8
        # Tokens may decode to nothing; the tail is cut at this size all the same.
        self._most_tokens = 8 * self._reach

    @classmethod
    def of(cls, sampling: Sampling, decode: Decode | None) -> StopChecker | None:
        """For a request; None where it has no stop strings."""
        if not sampling.stop:
            return None
        if decode is None:
            raise EngineError("stop strings need a tokenizer: give one with the engine", retriable=False)
        return cls(sampling.stop, decode)

    def push(self, token: int) -> str | None:
        """The stop string that this token completes, if any; the first one, where it completes several."""
        self._tail.append(token)
        text = self._decode(self._tail)
        if (found := first_stop(text, self._stops)) is not None:
            return found[1]
        if len(text) > 3 * self._reach or len(self._tail) > self._most_tokens:
            self._shorten()
        return None

    def _shorten(self) -> None:
        """Keep the fewest tokens that still cover what a stop string can reach."""
        keep = min(len(self._tail), self._reach) // 2 + 1
        while keep < len(self._tail) and len(self._decode(self._tail[-keep:])) < self._reach:
            keep *= 2
        if keep > self._most_tokens // 2:
            keep = self._most_tokens // 2
        self._tail = self._tail[-keep:]


def first_ending(
    tokens: Sequence[int], sampling: Sampling, decode: Decode | None
) -> tuple[int, FinishReason | None, str | None]:
    """(tokens up to it, how, which string) of the first stop of an output; all tokens where there is none."""
    checker = StopChecker.of(sampling, decode)
    for count, token in enumerate(tokens[: sampling.max_tokens], start=1):
        if token in sampling.stop_tokens:
            return count, FinishReason.STOP_TOKEN, None
        if checker is not None and (stop := checker.push(token)) is not None:
            return count, FinishReason.STOP_STRING, stop
    is_full = len(tokens) >= sampling.max_tokens
    return min(len(tokens), sampling.max_tokens), FinishReason.LENGTH if is_full else None, None


Marks = npt.NDArray[np.bool_]
Reply = Callable[[Completion | list[float] | BaseException], None]


@dataclass(slots=True, eq=False)
class Request:
    """A request, what has been generated for it, and its place in the batch and in the KV cache."""

    tokens: list[int]
    """The prompt, then what has been generated; virtual ids where an image is read (`images`)."""
    prompt: int
    """Length of the prompt."""
    limit: int
    """Most tokens, the prompt included."""
    sampling: Sampling
    reply: Reply
    """Delivers the outcome to the caller; called on the engine's thread."""
    leave_queue: Callable[[], None] | None = None
    """Called once, when the request leaves the waiting queue."""
    arrived: float | None = None
    """When it arrived, by `time.perf_counter`."""
    queued_seconds: float = 0.0
    """How long it waited in the queue."""
    session: str | None = None
    is_score: bool = False
    """Generate nothing: collect the log-probability of each given token."""
    stop_tokens: frozenset[int] = frozenset()
    stop_checker: StopChecker | None = None
    seen: Marks | None = None
    """Which tokens of the vocabulary the context has, for a repetition penalty."""
    images: tuple[MediaSpan, ...] = ()
    """The images of the prompt."""
    layout: ContextLayout | None = None
    """Positions and runs of the prompt's images, where these are not those of text."""
    placeholder: int = 0
    """The token that stands for a part of an image."""
    logprobs: list[float] = field(default_factory=list)
    versions: list[VersionSpan] = field(default_factory=list)
    block_table: BlockTable = field(default_factory=BlockTable)
    row: int = -1
    """Its row in the batch; -1 while it waits."""
    cached_tokens: int | None = None
    in_flight: int = 0
    """Tokens whose step was launched and not collected yet."""
    is_decoding: bool = False
    """Whether the next token to compute is the one that its row sampled last."""
    failure: Exception | None = None
    """Why its last token could not be sampled."""
    is_done: bool = False
    """Whether it has finished; what still arrives for it is dropped."""
    behind: tuple[Request, int] | None = None
    """The long prompt that it may not pass yet, and how many tokens of that must be scheduled before."""

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt

    @property
    def unscheduled(self) -> int:
        """How many tokens, known or in flight, are not scheduled yet."""
        return len(self.tokens) + self.in_flight - self.block_table.length

    def whole(self, count: int) -> int:
        """About `count` of its next tokens, such that no image is cut whose tokens see each other."""
        return count if self.layout is None else self.layout.whole(self.block_table.length, count)

    def accept(self, token: int, logprob: float) -> tuple[FinishReason, str | None] | None:
        """Add a sampled token; why the request is finished, if it is."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if self.seen is not None:
            self.seen[token] = True
        if token in self.stop_tokens:
            return FinishReason.STOP_TOKEN, None
        if self.stop_checker is not None and (stop := self.stop_checker.push(token)) is not None:
            return FinishReason.STOP_STRING, stop
        if len(self.tokens) >= self.limit:
            return FinishReason.LENGTH, None
        return None

    def started(self) -> None:
        """The request has left the queue."""
        if self.arrived is not None:
            self.queued_seconds, self.arrived = time.perf_counter() - self.arrived, None
        if self.leave_queue is not None:
            self.leave_queue()
            self.leave_queue = None

    def note_version(self, version: int) -> None:
        """From the next token on, the policy has this version."""
        start = self.generated
        if self.versions and self.versions[-1].start == start:
            self.versions.pop()
        if not self.versions or self.versions[-1].version != version:
            self.versions.append(VersionSpan(start, version))

    def completion(self, finish: FinishReason, stop: str | None = None) -> Completion:
        return Completion(
            tokens=self.tokens[self.prompt :],
            logprobs=list(self.logprobs),
            finish=finish,
            versions=tuple(self.versions),
            stop=stop,
            cached_tokens=self.cached_tokens or 0,
            queued_seconds=self.queued_seconds,
        )


class Chunk(NamedTuple):
    """Tokens `start` to `stop` of a request, to be computed in this step."""

    request: Request
    start: int
    stop: int
    is_decode: bool
    """One token: the one that the request's row sampled last, whose value may not be known yet."""
    samples: bool
    """Whether the next token is sampled."""
