"""A request on its way through the engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ludus.core.generation import Completion, FinishReason, Sampling, VersionSpan
from ludus.engine.kv import Holding
from ludus.engine.stopping import StopWatcher

Marks = npt.NDArray[np.bool_]
Reply = Callable[[Completion | list[float] | BaseException], None]


@dataclass(slots=True, eq=False)
class Request:
    """What was asked, what there is so far, and what it holds of the cache."""

    tokens: list[int]
    """The context, then what has been generated."""
    prompt: int
    """How many of the tokens were given."""
    limit: int
    """How many tokens there may be in all."""
    sampling: Sampling
    reply: Reply
    """Delivers the outcome to whoever waits for it; safe to call from the engine's thread."""
    leave_queue: Callable[[], None] | None = None
    """Called once, when the request no longer waits for its first place in the batch."""
    session: str | None = None
    is_score: bool = False
    """Score requests generate nothing: they collect the log-probability of each given token."""
    stop_tokens: frozenset[int] = frozenset()
    watcher: StopWatcher | None = None
    seen: Marks | None = None
    """Marks the vocabulary of the context, for a repetition penalty."""
    logprobs: list[float] = field(default_factory=list)
    versions: list[VersionSpan] = field(default_factory=list)
    holding: Holding = field(default_factory=Holding)
    row: int = -1
    cached_tokens: int | None = None
    promised: int = 0
    """How many tokens have been launched and not been received yet."""
    is_decoding: bool = False
    """Whether the next token to compute is the one that its row drew last."""
    is_done: bool = False
    """Whether it has been taken out; what still arrives for it is dropped."""

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt

    @property
    def pending(self) -> int:
        """How many tokens, known or promised, are not scheduled yet."""
        return len(self.tokens) + self.promised - self.holding.length

    def accept(self, token: int, logprob: float) -> tuple[FinishReason, str | None] | None:
        """Add a sampled token; why the request is finished, if it is."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if self.seen is not None:
            self.seen[token] = True
        if token in self.stop_tokens:
            return FinishReason.STOP_TOKEN, None
        if self.watcher is not None and (stop := self.watcher.push(token)) is not None:
            return FinishReason.STOP_STRING, stop
        if len(self.tokens) >= self.limit:
            return FinishReason.LENGTH, None
        return None

    def started(self) -> None:
        """The request has left the queue."""
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
        )
