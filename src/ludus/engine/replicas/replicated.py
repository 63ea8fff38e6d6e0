"""`ReplicatedEngine`: one engine made of several replicas, each with weights of its own.

A session stays on the replica that has its KV; a new one goes to the replica with the fewest. Replicas sample
while the trainer computes: they stop only for the moment in which each of them takes new weights.

A replica that dies, stops answering, or fails the canary is taken out: its requests fail as retriable
`EngineError`s, so that their episodes are played again, and its sessions go on elsewhere. It is started again
after a while, with the newest weights, and serves when it has passed the canary. One that fails again and
again is given up; when all are, every request fails with the reasons.

Who waits for whom: a request waits for its replica, or for the first one to come back where none serves.
Loading weights, scoring the canary and every other command has a deadline (`ReplicaLimits.seconds`); a
replica that passes it is taken out. While a replica is on trial (it has new weights, and the canary has not
passed), tokens of the new version are held back. All of it runs in one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ludus.core.failures import EngineError
from ludus.core.generation import Completion, Engine, FinishReason, OnTokens, Sampling, VersionSpan
from ludus.core.messages import MediaSpan
from ludus.engine.replicas.weights import Canary, CanaryError, Published, WeightFolders, WeightSource
from ludus.remote.limits import queueing
from ludus.remote.supervisor import Member, NoWorker, Restarts, Supervisor, WorkerDied

T = TypeVar("T")

_STEADY_SECONDS = 60.0
"""A replica that has served for so long is not counted as one that fails again and again."""


@dataclass(frozen=True, slots=True)
class ReplicaLimits:
    """How long to wait for replicas, and how often to start them again."""

    seconds: float = 600.0
    """What a replica may take to start, to load weights, and to answer a command; also how long a request
    waits for a replica to come back."""
    restarts: int = 5
    """So many starts in a row may fail before a replica is given up."""
    refusals: int = 2
    """So many updates in a row may fail the canary before a replica is given up."""
    backoff: float = 1.0
    """Seconds before the first restart; doubled each time, up to a minute."""


class _Replica:
    """A replica through all of its lives, as a worker of the supervisor."""

    def __init__(
        self, number: int, engine: Engine, bring_up: Callable[[_Replica], Coroutine[Any, Any, None]]
    ) -> None:
        self.number, self.engine, self._bring_up = number, engine, bring_up
        self.lock = asyncio.Lock()
        """Held while weights are loaded."""
        self.loaded = self.verified = -1
        """The version that it was given, and the last one that passed the canary."""
        self.passed = asyncio.Event()
        """Set unless it is on trial."""
        self.refusals = 0
        """Updates in a row that failed the canary."""

    async def start(self) -> None:
        await self._bring_up(self)

    async def ended(self) -> str:
        return await self.engine.ended()

    async def kill(self) -> None:
        await self.engine.close()


_Member = Member[_Replica]


class ReplicatedEngine(Engine):
    """An `Engine` over replicas. Call `open` first; `update_weights` publishes the source's weights."""

    def __init__(
        self,
        replicas: Sequence[Engine],
        source: WeightSource,
        canary: Canary,
        *,
        version: int = 0,
        limits: ReplicaLimits | None = None,
        folder: Path | None = None,
    ) -> None:
        """`folder` is where weights are put for the replicas; shared memory when left out."""
        if not replicas:
            raise ValueError("an engine needs at least one replica")
        self._canary, self._limits = canary, limits or ReplicaLimits()
        self._folders = WeightFolders(source, canary, folder)
        workers = [_Replica(number, one, self._bring_up) for number, one in enumerate(replicas)]
        self._replicas = Supervisor(
            workers.__getitem__,
            len(workers),
            restarts=Restarts(self._limits.backoff, 60.0, _STEADY_SECONDS, self._limits.restarts),
            name="engine",
            kill_seconds=self._limits.seconds,
        )
        self._waiting: dict[str, asyncio.Future[_Member]] = {}
        """Sessions whose request waits for a replica to come back."""
        self._version = version
        self._is_paused = self._is_closed = False
        self._updating = asyncio.Lock()
        self._differences: dict[int, float] = {}
        self._sync_seconds = self._paused_seconds = 0.0

    # The life of the engine

    async def open(self) -> None:
        """Start all replicas with the source's weights; an error of one is an error of the engine."""
        try:
            await self._folders.publish(self._version)
            await self._replicas.start()
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        self._is_closed = True
        await self._replicas.close()
        self._folders.close()

    async def _bring_up(self, replica: _Replica) -> None:
        """Start a replica with the newest weights; it has passed the canary when this returns."""
        engine = replica.engine
        async with replica.lock:
            published: Published | None = None
            while published is not self._newest:
                begin = engine.start if published is None else engine.load_weights
                published = self._newest
                await self._load(replica, published, begin)
                await self._examine(replica, published)
            is_paused = False
            while is_paused != self._is_paused:
                is_paused = self._is_paused
                command = engine.pause() if is_paused else engine.resume()
                await self._command(replica, "to pause or go on", command)

    # Weights

    @property
    def _newest(self) -> Published:
        assert self._folders.newest is not None, "open the engine first"
        return self._folders.newest

    @property
    def policy_version(self) -> int:
        return self._version

    async def update_weights(self, count: int = 1) -> int:
        """Publish the source's weights; returns when every replica that serves has them and has shown it.

        `count` is how many updates have been made since the last time.
        """
        async with self._updating:
            started = time.perf_counter()
            self._check_usable()
            published = await self._folders.publish(self._version + count)
            self._paused_seconds = 0.0
            await asyncio.gather(*(self._sync(member, published) for member in self._replicas.members))
            await asyncio.shield(published.expected)  # the trainer may change the weights then
            self._version = published.version
            self._sync_seconds = time.perf_counter() - started
            self._check_usable()
            return self._version

    async def _sync(self, member: _Member, published: Published) -> None:
        replica = member.worker
        async with replica.lock:
            if not member.is_up or replica.loaded == published.version:
                return  # it comes back with the newest weights
            started = time.perf_counter()
            try:
                await self._load(replica, published, replica.engine.load_weights, member)
                self._paused_seconds = max(self._paused_seconds, time.perf_counter() - started)
                if not self._is_paused:
                    await self._examine(replica, published, member)
                    member.is_proven, replica.refusals = True, 0
            except CanaryError as error:
                self._refuse(member, error)
            except Exception as error:  # noqa: BLE001 - whatever it is, its weights are unknown now
                member.take_out(f"it could not load version {published.version}: {error}")

    def _refuse(self, member: _Member, error: EngineError) -> None:
        """Take out a replica that failed; for good where it has failed the canary again and again."""
        replica = member.worker
        replica.refusals += isinstance(error, CanaryError)
        member.take_out(str(error), for_good=replica.refusals >= self._limits.refusals)

    async def _load(
        self,
        replica: _Replica,
        published: Published,
        load: Callable[[Path, int], Coroutine[Any, Any, None]],
        member: _Member | None = None,
    ) -> None:
        replica.passed.clear()
        with published.reading() as folder:
            what = f"to load the weights of version {published.version}"
            await self._command(replica, what, load(folder, published.version), member)
        replica.loaded = published.version

    async def _examine(
        self, replica: _Replica, published: Published, member: _Member | None = None
    ) -> None:
        """Let a replica score the canary; what it has sampled with the new weights is held back until then."""
        canary, engine = self._canary, replica.engine
        scoring = engine.score(canary.tokens, media=canary.media)
        scored = await self._command(replica, "to score the canary", scoring, member)
        expected = await asyncio.shield(published.expected)
        difference = canary.check(expected, scored, engine.name, published.version)
        self._differences[replica.number] = difference
        replica.verified = published.version
        replica.passed.set()

    async def pause(self) -> None:
        self._is_paused = True
        await self._command_all("to pause", lambda replica: replica.pause())

    async def resume(self) -> None:
        """Go on; replicas that got weights while they were paused are examined first of all."""
        self._is_paused = False
        await self._command_all("to go on", lambda replica: replica.resume())
        for member in [one for one in self._replicas.members if not one.worker.passed.is_set()]:
            async with member.worker.lock:
                try:
                    if member.is_up and not member.worker.passed.is_set():
                        await self._examine(member.worker, self._newest, member)
                except EngineError as error:
                    self._refuse(member, error)

    async def forget(self) -> None:
        """Drop the KV of all replicas; the policy version stays."""
        await self._command_all("to drop its KV", lambda replica: replica.forget())

    # Requests

    async def generate(
        self,
        tokens: Sequence[int],
        sampling: Sampling,
        *,
        session: str | None = None,
        media: Sequence[MediaSpan] = (),
        on_tokens: OnTokens | None = None,
    ) -> Completion:
        with queueing():
            member = await self._placed(session)
        if member is None:
            return Completion([], [], FinishReason.ABORTED, (VersionSpan(0, self._version),))
        replica = member.worker
        with member.busy() if session is None else contextlib.nullcontext():
            request = replica.engine.generate(tokens, sampling, session=session, media=media)
            completion = await self._answered(member, request)
            if max(span.version for span in completion.versions) > replica.verified:
                await self._answered(member, replica.passed.wait())
            return completion

    async def score(self, tokens: Sequence[int], *, media: Sequence[MediaSpan] = ()) -> list[float]:
        member = await self._placed(None)
        assert member is not None, "only a session can be aborted"
        replica = member.worker
        with member.busy():
            scoring = replica.engine.score(tokens, media=media)
            scored = await self._answered(member, scoring)
            if not replica.passed.is_set():
                await self._answered(member, replica.passed.wait())
            return scored

    async def fork(self, session: str, into: str) -> None:
        """On the same replica. Where that is gone, so is what could be shared, and it is computed again."""
        member = self._replicas.where(session)
        if member is None:
            return
        if self._replicas.where(into) not in (None, member):
            await self.release(into)
        self._replicas.assign(into, member)
        what, fork = f"to fork the session {session!r}", member.worker.engine.fork(session, into)
        await self._command(member.worker, what, fork, member)

    async def release(self, session: str) -> None:
        member = self._replicas.where(session)
        self._replicas.release(session)
        if member is not None:
            with contextlib.suppress(EngineError):  # it is gone, and the session with it
                released = member.worker.engine.release(session)
                await self._command(member.worker, "to release a session", released, member)

    async def abort(self, session: str) -> None:
        if session in self._waiting:
            self._waiting[session].cancel()
        member = self._replicas.where(session)
        if member is not None:
            with contextlib.suppress(EngineError):
                aborted = member.worker.engine.abort(session)
                await self._command(member.worker, "to abort a request", aborted, member)

    async def _placed(self, session: str | None) -> _Member | None:
        """The replica for a request; None where its session was aborted while it waited for one."""
        self._check_usable()
        placed = self._replicas.place(session, seconds=self._limits.seconds)
        try:
            if session is None or self._replicas.members:
                return await placed
            waiting = self._waiting[session] = asyncio.ensure_future(placed)
            try:
                await asyncio.wait((waiting,))
            finally:
                waiting.cancel()
                self._waiting.pop(session, None)
            return None if waiting.cancelled() else waiting.result()
        except NoWorker as error:
            raise EngineError(str(error), retriable=not error.is_final) from None

    # Waiting for replicas

    async def _answered(
        self, member: _Member, call: Coroutine[Any, Any, T], seconds: float | None = None
    ) -> T:
        """Await a call of a replica; an `EngineError` when the replica is taken out first."""
        try:
            return await member.answer(call, seconds)
        except WorkerDied as death:
            raise EngineError(f"{member.worker.engine.name} was lost: {death}") from None

    async def _command(
        self,
        replica: _Replica,
        what: str,
        call: Coroutine[Any, Any, T],
        member: _Member | None = None,
    ) -> T:
        """Await a call that must not take long. A replica for which it does is taken out; without `member`
        it is being started, which fails then."""
        try:
            if member is not None:
                return await self._answered(member, call, self._limits.seconds)
            async with asyncio.timeout(self._limits.seconds):
                return await call
        except TimeoutError:
            text = f"waited {self._limits.seconds:g} s for {replica.engine.name} {what}"
            if member is not None:
                member.take_out(text)
            raise EngineError(text) from None

    async def _command_all(self, what: str, call: Callable[[Engine], Coroutine[Any, Any, None]]) -> None:
        """Tell all that serve. One that fails is taken out, which is what the others need to know of it."""
        self._check_usable()

        async def one(member: _Member) -> None:
            try:
                await self._command(member.worker, what, call(member.worker.engine), member)
            except EngineError as error:
                member.take_out(str(error))

        await asyncio.gather(*(one(member) for member in self._replicas.members))

    def _check_usable(self) -> None:
        if self._is_closed:
            raise EngineError("the engine is closed", retriable=False)
        try:
            self._replicas.check()
        except NoWorker as error:
            raise EngineError(str(error), retriable=False) from None

    def metrics(self) -> dict[str, float]:
        """How the replicas are, as of the last update."""
        return {
            "engine/replicas": len(self._replicas.members),
            "engine/restarts": self._replicas.replaced,
            "engine/sync_seconds": self._sync_seconds,
            "paused_seconds": self._paused_seconds,
            "engine/canary_difference": max(self._differences.values(), default=0.0),
        }
