"""Continuous batching: which tokens of which requests the next step computes. No model is touched here.

In each step every decoding request gets one token, prompts get chunks of what is left of the token budget
(chunked prefill), and waiting requests are admitted while there are rows, budget and blocks. When blocks run
out, the session that has been idle for longest loses its KV first; then the youngest running request is
preempted: it goes back to the head of the queue and recomputes later. A chunk never ends inside an image whose
tokens see each other in both directions; it may be larger than the step's budget for that.

Who is next: first come, first served, except that a *long* prompt, one that a whole step cannot finish, lets
others pass. It gets half of the step (`long_share`), the other half is offered to the requests behind it whose
prompts are not long, in their order, and what they leave goes to the long prompt as well. None starves: the
long prompt has the first half of every step until it is finished, blocks that it will need are kept for it, and
then the head of the queue is admitted before all others. A request that continues the same tokens as the
long prompt does not pass: it waits for their KV instead of computing it a second time.

A step may be scheduled while the one before it runs. A request then has a token *in flight*: sampled on the
device, not known here. Scheduling needs its position only. If that token turns out to be a stop token, the
token after it was computed for nothing.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
import numpy.typing as npt

from ludus.core.failures import EngineError
from ludus.engine.embedded.block_manager import BlockManager, BlockTable, common_prefix
from ludus.engine.embedded.request import Chunk, Request

_LOOKED_AT = 256
"""How many waiting requests are looked at for one that may pass a long prompt."""


@dataclass(slots=True)
class StepPlan:
    """A step while it is planned."""

    room: int
    """The tokens that decoding leaves for prompts; a prompt that needs more is long."""
    left: int
    """Those that no prompt has got yet."""
    chunks: list[Chunk] = field(default_factory=list)
    long: int | None = None
    """The place of the first long prompt's chunk."""


@dataclass(slots=True)
class IdleSession:
    """State of a session between its requests."""

    block_table: BlockTable
    tokens: list[int]


class Scheduler:
    """Queues, batch rows, sessions and their block tables."""

    long_share = 0.5
    """The part of a step that a long prompt gets before others are asked; with 1.0 none pass."""

    def __init__(self, block_manager: BlockManager, max_running: int, tokens_per_step: int) -> None:
        self.block_manager = block_manager
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # oldest first
        self.sessions: OrderedDict[str, IdleSession] = OrderedDict()  # idle for longest first
        self.active: dict[str, Request] = {}  # by session, waiting or running
        self.preemptions = 0
        self.block_tables: npt.NDArray[np.int64] = np.zeros((max_running, 8), dtype=np.int64)
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
        """The chunks of the next step, with blocks for all of them; none if all wait for tokens in flight."""
        block_size = self.block_manager.block_size
        self.block_manager.begin_step()
        room = self._budget - sum([request.is_decoding for request in self.running])
        step = StepPlan(room, left=room)
        for request in list(self.running):
            if request.row < 0:  # it was preempted for an older one
                continue
            block_table = request.block_table
            start = block_table.length
            if request.is_decoding:
                if len(request.tokens) + request.in_flight >= request.limit:
                    continue  # its last token is in flight
                if start % block_size:
                    block_table.length = start + 1
                    request.in_flight += 1
                    step.chunks.append(Chunk(request, start, start + 1, True, True))
                elif self._make_room(request, start + 1):
                    step.chunks.append(self._schedule_new_block(request))
                continue
            count = self._share(request, step)
            if count and self._make_room(request, start + count):
                self._prefill(request, count, step)
        if self.waiting and self._rows and step.left > 0:
            self._admit_waiting(step)
        if step.long is not None and step.left > 0:
            self._extend_long(step, step.long)
        return step.chunks

    def _share(self, request: Request, step: StepPlan) -> int:
        """How many tokens of its prompt a request gets before others are asked."""
        if step.left < 1:  # an image that cannot be cut took more
            return 0
        count = min(request.unscheduled, step.left)
        if request.unscheduled > step.room:
            count = math.ceil(step.left * self.long_share)
        return self._cut(request, count)

    def _cut(self, request: Request, count: int) -> int:
        """About `count` of a prompt's next tokens, as a step may compute them."""
        count = self.block_manager.chunk(request.block_table, count)
        return request.whole(count) if count else 0

    def _prefill(self, request: Request, count: int, step: StepPlan) -> None:
        """Schedule so many tokens of a prompt, whose blocks are there."""
        if step.long is None and request.unscheduled > step.room:
            step.long = len(step.chunks)
        step.left -= count
        step.chunks.append(self._schedule(request, count))

    def _admit_waiting(self, step: StepPlan) -> None:
        """Give waiting requests, in their order, a row, what they can reuse, and blocks for a first chunk."""
        for request in list(islice(self.waiting, _LOOKED_AT)):
            if step.left < 1 or not self._rows or request.in_flight:
                return  # in flight: it was preempted with its last token on the way
            long = None if step.long is None else step.chunks[step.long].request
            if long is not None:
                if request.behind is None or request.behind[0] is not long:
                    is_score = request.is_score or long.is_score  # its KV is not shared
                    request.behind = long, 0 if is_score else common_prefix(request.tokens, long.tokens)
                if request.behind[1] > long.block_table.length:
                    continue  # it waits for tokens of the long prompt, or is known to be long itself
            if not self._find_reusable(request):
                continue
            if long is not None and request.unscheduled > step.room:
                request.behind = long, len(long.tokens)
                self._give_up_blocks(request)
                continue
            if not self._has_blocks(request, long):
                self._give_up_blocks(request)
                return
            self._start(request)
            count = self._share(request, step)
            self.block_manager.grow(request.block_table, request.block_table.length + count)
            self._prefill(request, count, step)

    def _find_reusable(self, request: Request) -> bool:
        """A block table with what a waiting request can reuse; False when it should wait for more of that."""
        session = None if request.session is None or request.is_score else request.session
        idle = self.sessions.pop(session, None) if session is not None else None
        held, tokens = (idle.block_table, idle.tokens) if idle else (BlockTable(), [])
        while not self.block_manager.can_begin(held) and self._evict_session():
            pass
        table: BlockTable | None = None
        if self.block_manager.can_begin(held):
            if request.is_score:  # every position's hidden state is needed
                table = self.block_manager.reuse(request.tokens[:1], held, tokens)
            else:
                table = self.block_manager.reuse(request.tokens, held, tokens, request.prompt)
        if table is not None:
            request.block_table = table
        elif idle is not None and session is not None:
            self.sessions[session] = idle
        return table is not None

    def _extend_long(self, step: StepPlan, place: int) -> None:
        """Give the step's leftover tokens to the long prompt. Never preempts."""
        chunk = step.chunks[place]
        request = chunk.request
        count = self._cut(request, min(request.unscheduled, step.left))
        if count < 1:
            return
        while not self.block_manager.grow(request.block_table, chunk.stop + count):
            if not self._evict_session():
                return
        more = self._schedule(request, count)
        step.chunks[place] = Chunk(request, chunk.start, more.stop, False, more.samples)

    def _schedule_new_block(self, request: Request) -> Chunk:
        """A decoding request begins a block; the block that it has filled is published."""
        block_table, block_size = request.block_table, self.block_manager.block_size
        start = block_table.length
        block_table.length = start + 1
        request.in_flight += 1
        place = start // block_size
        self._widen_block_tables(place + 1)
        self.block_tables[request.row, place] = block_table.blocks[place]
        self.block_manager.publish(block_table, request.tokens, min(start, len(request.tokens)))
        return Chunk(request, start, start + 1, True, True)

    def _schedule(self, request: Request, count: int) -> Chunk:
        block_table = request.block_table
        start = block_table.length
        stop = block_table.length = start + count
        before, size = start // self.block_manager.block_size, len(block_table.blocks)
        self._widen_block_tables(size)
        self.block_tables[request.row, before:size] = block_table.blocks[before:]
        if request.is_score:
            return Chunk(request, start, stop, False, False)
        self.block_manager.publish(block_table, request.tokens, stop)
        samples = stop == len(request.tokens)
        if samples:
            request.in_flight += 1
            request.is_decoding = True
        return Chunk(request, start, stop, False, samples)

    def _has_blocks(self, request: Request, long: Request | None) -> bool:
        """Whether there are blocks for a request, beside those that a long prompt will need."""
        missing = self._missing_blocks(request) + (0 if long is None else self._missing_blocks(long))
        while missing > self.block_manager.pool.available and self._evict_session():
            pass
        return missing <= self.block_manager.pool.available

    def _missing_blocks(self, request: Request) -> int:
        """Blocks to add for the whole context and one more token: with fewer it would be preempted at once."""
        needed = self.block_manager.blocks_for(min(len(request.tokens) + 1, request.limit))
        return needed - len(request.block_table.blocks)

    def _start(self, request: Request) -> None:
        """From the queue to a row of the batch."""
        self.waiting.remove(request)
        request.behind = None
        request.started()
        if request.cached_tokens is None:  # what it finds again after a preemption does not count
            request.cached_tokens = request.block_table.length
        request.row = self._rows.pop()
        self.running.append(request)
        size = len(request.block_table.blocks)
        self._widen_block_tables(size)
        self.block_tables[request.row, :size] = request.block_table.blocks

    def _widen_block_tables(self, size: int) -> None:
        width = self.block_tables.shape[1]
        if size > width:
            self.block_tables = np.pad(self.block_tables, ((0, 0), (0, max(size, 2 * width) - width)))

    def _give_up_blocks(self, request: Request) -> None:
        """Leave a request's blocks to its session, which may be evicted; without a session, free them."""
        if request.session is not None and request.block_table.length:
            self.sessions[request.session] = IdleSession(request.block_table, request.tokens)
            request.block_table = BlockTable()
        else:
            self.block_manager.drop(request.block_table)

    def _make_room(self, request: Request, tokens: int) -> bool:
        """Blocks for a running request's next chunk; False if it had to leave the batch itself."""
        while not self.block_manager.grow(request.block_table, tokens):
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
        self.block_manager.drop(idle.block_table)
        return True

    def preempt(self, request: Request) -> None:
        """Back to the queue's head, without KV."""
        self._leave(request)
        self.block_manager.drop(request.block_table)
        self.waiting.appendleft(request)

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
        self._give_up_blocks(request)

    def _settle(self, request: Request) -> None:
        """Publish the blocks of all known tokens. Steps in flight write theirs before later steps read them."""
        if not request.is_score:
            request.block_table.length = min(request.block_table.length, len(request.tokens))
            self.block_manager.publish(request.block_table, request.tokens, request.block_table.length)

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
            self.block_manager.drop(idle.block_table)

    def fork(self, session: str, into: str) -> None:
        """`into` holds what `session` has computed so far, running or idle."""
        if into in self.active:
            raise EngineError(f"session {into!r} is running and cannot be replaced", retriable=False)
        request, idle = self.active.get(session), self.sessions.get(session)
        if request is not None and request.block_table.length:
            self._settle(request)
            source = IdleSession(request.block_table, request.tokens)
        elif idle is not None:
            source = idle
        else:
            return
        if into != session:
            self.release(into)
            copy = self.block_manager.fork(source.block_table)
            self.sessions[into] = IdleSession(copy, source.tokens[: copy.length])

    def forget(self, version: int) -> None:
        """Drop all KV: running requests recompute under the new version. No step may be in flight."""
        for request in reversed(list(self.running)):  # the order stays
            self.preempt(request)
        for idle in self.sessions.values():
            self.block_manager.drop(idle.block_table)
        self.sessions.clear()
        self.block_manager.set_version(version)
