"""Noticing a stop string while tokens arrive, at a cost that does not grow with the output."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ludus.core.failures import EngineError
from ludus.core.generation import Completion, FinishReason, Sampling, VersionSpan
from ludus.engine.block_manager import Holding, KvBooks

Decode = Callable[[Sequence[int]], str]


class StopWatcher:
    """Decodes a short tail of the generated tokens and looks for stop strings in it.

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

    def push(self, token: int) -> str | None:
        """The stop string that this token completes, if any."""
        self._tail.append(token)
        text = self._decode(self._tail)
        ends = [(text.find(stop) + len(stop), stop) for stop in self._stops if stop in text]
        if ends:
            return min(ends)[1]
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


# --- requests ---
# A request on its way through the engine.

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


# --- scheduler ---
# Who computes what in the next step.
#
# Continuous batching: each step, every running request that decodes gets one token, running prompts get a
# chunk of what is left of the token budget, and waiting requests are let in while there are rows, budget
# and pages. When pages run out, the session that has been idle for longest loses its KV first; then the
# youngest running request goes back to the queue's head and recomputes later. No model is touched here.
#
# A step may be planned while the one before it still runs. A request then has a *promised* token: drawn on the
# device, not known here. Its position is known, which is all that planning needs. What is known of a request
# only afterwards (its token was a stop) costs one token that is thrown away.


class Chunk(NamedTuple):
    """Tokens `start` to `stop` of a request, to be computed in this step."""

    request: Request
    start: int
    stop: int
    is_decode: bool
    """Its one token is the one that the request's row drew last; its value may not be known yet."""
    samples: bool
    """Whether the token that follows is drawn."""


@dataclass(slots=True)
class IdleSession:
    """What a session holds between its requests."""

    holding: Holding
    tokens: list[int]


class Scheduler:
    """Queues, rows, sessions and pages."""

    def __init__(self, books: KvBooks, max_running: int, tokens_per_step: int) -> None:
        self.books = books
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # oldest first
        self.sessions: OrderedDict[str, IdleSession] = OrderedDict()  # idle for longest first
        self.active: dict[str, Request] = {}  # by session, waiting or running
        self.preemptions = 0
        self.tables: npt.NDArray[np.int64] = np.zeros((max_running, 8), dtype=np.int64)
        self._rows = list(range(max_running - 1, -1, -1))
        self._budget = tokens_per_step

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        """Queue a request; a session has one at a time."""
        if request.session is not None:
            if request.session in self.active:
                raise EngineError(
                    f"session {request.session!r} already has a request running", retriable=False
                )
            self.active[request.session] = request
        self.waiting.append(request)

    def plan(self) -> list[Chunk]:
        """The chunks of the next step, with pages for all of them; none if all wait for promised tokens."""
        chunks: list[Chunk] = []
        page_size = self.books.page_size
        prefill = self._budget - sum([request.is_decoding for request in self.running])
        for request in list(self.running):
            if request.row < 0:  # it was preempted for an older one
                continue
            holding = request.holding
            start = holding.length
            if request.is_decoding:
                if len(request.tokens) + request.promised >= request.limit:
                    continue  # its last token is on its way
                if start % page_size:
                    holding.length = start + 1
                    request.promised += 1
                    chunks.append(Chunk(request, start, start + 1, True, True))
                elif self._make_room(request, start + 1):
                    chunks.append(self._schedule_page(request))
                continue
            count = min(request.pending, prefill)
            prefill -= count
            if count and self._make_room(request, start + count):
                chunks.append(self._schedule(request, count))
        while self.waiting and self._rows and prefill > 0:
            chunk = self._admit(self.waiting[0], prefill)
            if chunk is None:
                break
            prefill -= chunk.stop - chunk.start
            chunks.append(chunk)
        return chunks

    def _schedule_page(self, request: Request) -> Chunk:
        """A decoding request begins a page, and everybody may find the one that it has filled."""
        holding, page_size = request.holding, self.books.page_size
        start = holding.length
        holding.length = start + 1
        request.promised += 1
        place = start // page_size
        self._widen_tables(place + 1)
        self.tables[request.row, place] = holding.pages[place]
        self.books.publish(holding, request.tokens, min(start, len(request.tokens)))
        return Chunk(request, start, start + 1, True, True)

    def _schedule(self, request: Request, count: int) -> Chunk:
        holding = request.holding
        start = holding.length
        stop = holding.length = start + count
        before, size = start // self.books.page_size, len(holding.pages)
        self._widen_tables(size)
        self.tables[request.row, before:size] = holding.pages[before:]
        if request.is_score:
            return Chunk(request, start, stop, False, False)
        self.books.publish(holding, request.tokens, stop)
        samples = stop == len(request.tokens)
        if samples:
            request.promised += 1
            request.is_decoding = True
        return Chunk(request, start, stop, False, samples)

    def _admit(self, request: Request, budget: int) -> Chunk | None:
        """Give the queue's head a row, what it can reuse, and pages for its first chunk; or None."""
        if request.promised:  # it was preempted, and its last token is on its way
            return None
        self._reuse(request)
        # All of its context and one more token: admitting what must be preempted at once helps nobody.
        needed = self.books.pages_for(min(len(request.tokens) + 1, request.limit))
        missing = needed - len(request.holding.pages)
        while missing > self.books.ledger.available and self._evict_session():
            pass
        if missing > self.books.ledger.available:
            self._hand_back(request)
            return None
        self.waiting.popleft()
        request.started()
        if request.cached_tokens is None:  # what it finds again after a preemption does not count
            request.cached_tokens = request.holding.length
        request.row = self._rows.pop()
        self.running.append(request)
        size = len(request.holding.pages)
        self._widen_tables(size)
        self.tables[request.row, :size] = request.holding.pages
        count = min(request.pending, budget)
        self.books.grow(request.holding, request.holding.length + count)
        return self._schedule(request, count)

    def _widen_tables(self, size: int) -> None:
        width = self.tables.shape[1]
        if size > width:
            self.tables = np.pad(self.tables, ((0, 0), (0, max(size, 2 * width) - width)))

    def _reuse(self, request: Request) -> None:
        if request.is_score:  # every position's hidden state is needed
            return
        idle = self.sessions.pop(request.session, None) if request.session is not None else None
        held, tokens = (idle.holding, idle.tokens) if idle else (Holding(), [])
        request.holding = self.books.reuse(request.tokens, held, tokens)

    def _hand_back(self, request: Request) -> None:
        """A request that cannot start yet leaves what it found where others may take it from."""
        if request.session is not None and request.holding.length:
            self.sessions[request.session] = IdleSession(request.holding, request.tokens)
            request.holding = Holding()
        else:
            self.books.drop(request.holding)

    def _make_room(self, request: Request, tokens: int) -> bool:
        """Pages for a running request's next chunk; False if it had to leave the batch itself."""
        while not self.books.grow(request.holding, tokens):
            if self._evict_session():
                continue
            youngest = self.running[-1]
            self.preempt(youngest)
            self.preemptions += 1
            if youngest is request:
                return False
        return True

    def _evict_session(self) -> bool:
        if not self.sessions:
            return False
        _, idle = self.sessions.popitem(last=False)
        self.books.drop(idle.holding)
        return True

    def preempt(self, request: Request) -> None:
        """Back to the queue's head, without KV."""
        self._leave(request)
        self.books.drop(request.holding)
        self.waiting.appendleft(request)

    def preempt_all(self) -> None:
        """Everyone recomputes; the order stays."""
        for request in reversed(list(self.running)):
            self.preempt(request)

    def finish(self, request: Request) -> None:
        """Take a request out, wherever it is; its session keeps what was computed of its known tokens."""
        request.is_done = True
        if request.row >= 0:
            self._leave(request)
        elif request in self.waiting:
            self.waiting.remove(request)
            request.started()
        if request.session is not None:
            del self.active[request.session]
        self._settle(request)
        if request.session is None or not request.holding.length:
            self.books.drop(request.holding)
        else:
            self.sessions[request.session] = IdleSession(request.holding, request.tokens)
            request.holding = Holding()

    def _settle(self, request: Request) -> None:
        """Publish all that is known. Steps under way are safe to read from: later ones run after them."""
        if not request.is_score:
            request.holding.length = min(request.holding.length, len(request.tokens))
            self.books.publish(request.holding, request.tokens, request.holding.length)

    def _leave(self, request: Request) -> None:
        self.running.remove(request)
        self._rows.append(request.row)
        request.row = -1
        request.is_decoding = False

    def release(self, session: str) -> None:
        """Forget a session; a request of it that is running goes on and leaves nothing behind."""
        if (request := self.active.pop(session, None)) is not None:
            request.session = None
        if (idle := self.sessions.pop(session, None)) is not None:
            self.books.drop(idle.holding)

    def fork(self, session: str, into: str) -> None:
        """`into` holds what `session` has computed so far, running or idle."""
        if into in self.active:
            raise EngineError(f"session {into!r} is running and cannot be replaced", retriable=False)
        request, idle = self.active.get(session), self.sessions.get(session)
        if request is not None and request.holding.length:
            self._settle(request)
            source = IdleSession(request.holding, request.tokens)
        elif idle is not None:
            source = idle
        else:
            return
        if into != session:
            self.release(into)
            copy = self.books.fork(source.holding)
            self.sessions[into] = IdleSession(copy, source.tokens[: copy.length])

    def forget(self, version: int) -> None:
        """Drop all KV: running requests recompute under the new version. No step may be under way."""
        self.preempt_all()
        for idle in self.sessions.values():
            self.books.drop(idle.holding)
        self.sessions.clear()
        self.books.set_version(version)
