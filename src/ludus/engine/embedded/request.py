"""A request to the engine while it is served: its tokens, its place in the batch, and what ends it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ludus.core.failures import EngineError
from ludus.core.generation import Completion, FinishReason, Sampling, VersionSpan, first_stop
from ludus.core.messages import MediaSpan
from ludus.engine.embedded.block_manager import BlockTable

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
