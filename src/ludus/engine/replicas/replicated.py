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
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ludus.core.failures import EngineError
from ludus.core.generation import Completion, Engine, FinishReason, OnTokens, Sampling, VersionSpan
from ludus.core.messages import MediaSpan
from ludus.engine.canary import Canary, CanaryError
from ludus.engine.replicas.weight_folders import Published, WeightFolders, WeightSource
from ludus.remote.time_limit import queueing

log = logging.getLogger(__name__)

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


class _Member:
    """A replica and what is known of it."""

    def __init__(self, replica: Engine) -> None:
        self.replica = replica
        self.lock = asyncio.Lock()
        """Held while weights are loaded."""
        self.is_up = self.is_given_up = False
        self.sessions: set[str] = set()
        self.anonymous = 0
        """Requests in flight that have no session."""
        self.loaded = self.verified = -1
        """The version that it was given, and the last one that passed the canary."""
        self.passed = asyncio.Event()
        """Set unless it is on trial."""
        self.down: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Why it was taken out."""
        self.failures = self.refusals = 0
        self.since = 0.0
        self.reason = "it has not been started"

    @property
    def is_serving(self) -> bool:
        return self.is_up and not self.down.done()

    @property
    def load(self) -> int:
        return len(self.sessions) + self.anonymous

    def take_out(self, reason: str) -> None:
        self.reason = reason
        if not self.down.done():
            self.down.set_result(reason)


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
        self._members = [_Member(replica) for replica in replicas]
        self._keepers: list[asyncio.Task[None]] = []
        self._sessions: dict[str, _Member] = {}
        self._homeless: set[str] = set()
        """Sessions whose request waits for a replica to come back."""
        self._aborted: set[str] = set()
        self._changed = asyncio.Event()
        self._version = version
        self._is_paused = self._is_closed = False
        self._updating = asyncio.Lock()
        self._differences: dict[int, float] = {}
        self._restarts = 0
        self._sync_seconds = self._paused_seconds = 0.0

    # The life of the engine

    async def open(self) -> None:
        """Start all replicas with the source's weights; an error of one is an error of the engine."""
        try:
            await self._folders.publish(self._version)
            async with asyncio.TaskGroup() as group:
                for member in self._members:
                    group.create_task(self._bring_up(member))
        except BaseExceptionGroup as several:
            await self.close()
            raise several.exceptions[0] from several
        except BaseException:
            await self.close()
            raise
        self._keepers = [asyncio.create_task(self._keep(member)) for member in self._members]

    async def close(self) -> None:
        self._is_closed = True
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        for member in self._members:
            self._stop_serving(member, "the engine is closed")
        await asyncio.gather(*(self._end(member) for member in self._members))
        self._folders.close()
        self._notify()

    async def _keep(self, member: _Member) -> None:
        """Start a replica again whenever it is taken out, until it is given up."""
        while True:
            reason = await asyncio.shield(member.down)
            self._stop_serving(member, reason)
            log.warning("%s is taken out: %s", member.replica.name, reason)
            await self._end(member)
            while not member.is_up:
                if member.failures > self._limits.restarts or member.refusals >= self._limits.refusals:
                    member.is_given_up = True
                    log.error("%s is given up: %s", member.replica.name, member.reason)
                    self._notify()
                    return
                doublings = min(max(0, member.failures - 1), 16)  # 2**1024 is no float
                await asyncio.sleep(min(60.0, self._limits.backoff * 2**doublings))
                try:
                    await self._bring_up(member)
                    self._restarts += 1
                    log.warning("%s serves again", member.replica.name)
                except Exception as error:  # noqa: BLE001 - whatever a replica's start raises
                    member.failures += 1
                    member.reason = f"{type(error).__name__}: {error}"
                    await self._end(member)

    async def _bring_up(self, member: _Member) -> None:
        """Start a replica with the newest weights; it serves when it has passed the canary."""
        async with member.lock:
            member.down = asyncio.get_running_loop().create_future()
            published: Published | None = None
            while published is not self._newest:
                begin = member.replica.start if published is None else member.replica.load_weights
                published = self._newest
                await self._load(member, published, begin)
                await self._examine(member, published)
            is_paused = False
            while is_paused != self._is_paused:
                is_paused = self._is_paused
                command = member.replica.pause() if is_paused else member.replica.resume()
                await self._command(member, "to pause or go on", command)
            member.is_up, member.since = True, time.monotonic()
            watch = asyncio.create_task(self._watch(member))
            member.down.add_done_callback(lambda _: watch.cancel())
            self._notify()

    async def _watch(self, member: _Member) -> None:
        member.take_out(await member.replica.ended())

    def _stop_serving(self, member: _Member, reason: str) -> None:
        if member.is_up:
            is_steady = time.monotonic() - member.since > _STEADY_SECONDS
            member.failures = 0 if is_steady else member.failures + 1
        member.is_up = False
        member.take_out(reason)
        for session in member.sessions:
            del self._sessions[session]
        member.sessions.clear()

    async def _end(self, member: _Member) -> None:
        try:
            async with asyncio.timeout(self._limits.seconds):
                await member.replica.close()
        except Exception as error:  # noqa: BLE001 - it is not needed any more
            log.warning(
                "%s could not be ended: %s: %s", member.replica.name, type(error).__name__, error
            )

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
            serving = [member for member in self._members if member.is_serving]
            self._paused_seconds = 0.0
            await asyncio.gather(*(self._sync(member, published) for member in serving))
            await asyncio.shield(published.expected)  # the trainer may change the weights then
            self._version = published.version
            self._sync_seconds = time.perf_counter() - started
            self._check_usable()
            return self._version

    async def _sync(self, member: _Member, published: Published) -> None:
        async with member.lock:
            if not member.is_serving or member.loaded == published.version:
                return  # it comes back with the newest weights
            started = time.perf_counter()
            try:
                await self._load(member, published, member.replica.load_weights)
                self._paused_seconds = max(self._paused_seconds, time.perf_counter() - started)
                if not self._is_paused:
                    await self._examine(member, published)
                    member.failures = member.refusals = 0
            except CanaryError as error:
                member.refusals += 1
                member.take_out(str(error))
            except Exception as error:  # noqa: BLE001 - whatever it is, its weights are unknown now
                member.take_out(f"it could not load version {published.version}: {error}")

    async def _load(
        self,
        member: _Member,
        published: Published,
        load: Callable[[Path, int], Coroutine[Any, Any, None]],
    ) -> None:
        member.passed.clear()
        with published.reading() as folder:
            what = f"to load the weights of version {published.version}"
            await self._command(member, what, load(folder, published.version))
        member.loaded = published.version

    async def _examine(self, member: _Member, published: Published) -> None:
        """Let a replica score the canary; what it has sampled with the new weights is held back until then."""
        canary = self._canary
        scoring = member.replica.score(canary.tokens, media=canary.media)
        scored = await self._command(member, "to score the canary", scoring)
        expected = await asyncio.shield(published.expected)
        difference = canary.check(expected, scored, member.replica.name, published.version)
        self._differences[self._members.index(member)] = difference
        member.verified = published.version
        member.passed.set()

    async def pause(self) -> None:
        self._is_paused = True
        await self._command_all("to pause", lambda replica: replica.pause())

    async def resume(self) -> None:
        """Go on; replicas that got weights while they were paused are examined first of all."""
        self._is_paused = False
        await self._command_all("to go on", lambda replica: replica.resume())
        for member in [one for one in self._members if one.is_serving and not one.passed.is_set()]:
            async with member.lock:
                try:
                    if member.is_serving and not member.passed.is_set():
                        await self._examine(member, self._newest)
                except EngineError as error:
                    member.refusals += isinstance(error, CanaryError)
                    member.take_out(str(error))

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
        member.anonymous += session is None
        try:
            request = member.replica.generate(tokens, sampling, session=session, media=media)
            completion = await self._answered(member, request)
            if max(span.version for span in completion.versions) > member.verified:
                await self._answered(member, member.passed.wait())
            return completion
        finally:
            member.anonymous -= session is None

    async def score(
        self, tokens: Sequence[int], *, temperature: float = 1.0, media: Sequence[MediaSpan] = ()
    ) -> list[float]:
        member = await self._placed(None)
        assert member is not None, "only a session can be aborted"
        member.anonymous += 1
        try:
            scoring = member.replica.score(tokens, temperature=temperature, media=media)
            scored = await self._answered(member, scoring)
            if not member.passed.is_set():
                await self._answered(member, member.passed.wait())
            return scored
        finally:
            member.anonymous -= 1

    async def fork(self, session: str, into: str) -> None:
        """On the same replica. Where that is gone, so is what could be shared, and it is computed again."""
        member = self._sessions.get(session)
        if member is None or not member.is_serving:
            return
        other = self._sessions.get(into)
        if other is not None and other is not member:
            await self.release(into)
        self._assign(into, member)
        await self._command(
            member, f"to fork the session {session!r}", member.replica.fork(session, into)
        )

    async def release(self, session: str) -> None:
        member = self._sessions.pop(session, None)
        if member is None:
            return
        member.sessions.discard(session)
        if member.is_serving:
            with contextlib.suppress(EngineError):  # it is gone, and the session with it
                await self._command(member, "to release a session", member.replica.release(session))

    async def abort(self, session: str) -> None:
        if session in self._homeless:
            self._aborted.add(session)
            self._notify()
        member = self._sessions.get(session)
        if member is not None and member.is_serving:
            with contextlib.suppress(EngineError):
                await self._command(member, "to abort a request", member.replica.abort(session))

    async def _placed(self, session: str | None) -> _Member | None:
        """The replica for a request; None where its session was aborted while it waited for one."""
        deadline = time.monotonic() + self._limits.seconds
        while True:
            self._check_usable()
            known = self._sessions.get(session) if session is not None else None
            if known is not None and known.is_serving:
                return known
            serving = [member for member in self._members if member.is_serving]
            if serving:
                member = min(serving, key=lambda one: one.load)
                if session is not None:
                    self._assign(session, member)
                return member
            if not await self._came_back(session, deadline - time.monotonic()):
                return None

    async def _came_back(self, session: str | None, seconds: float) -> bool:
        """Wait until something has changed; False where the session was aborted meanwhile."""
        if session is not None:
            self._homeless.add(session)
        try:
            async with asyncio.timeout(max(0.0, seconds)):
                await self._changed.wait()
            return session not in self._aborted
        except TimeoutError:
            raise EngineError(
                f"waited {self._limits.seconds:g} s for an engine to come back: {self._reasons()}"
            ) from None
        finally:
            if session is not None:
                self._homeless.discard(session)
                self._aborted.discard(session)

    def _assign(self, session: str, member: _Member) -> None:
        before = self._sessions.get(session)
        if before is not None:
            before.sessions.discard(session)
        self._sessions[session] = member
        member.sessions.add(session)

    # Waiting for replicas

    async def _answered(
        self, member: _Member, call: Coroutine[Any, Any, T], seconds: float | None = None
    ) -> T:
        """What a call of a replica gives; an `EngineError` when the replica is taken out first."""
        task, down = asyncio.ensure_future(call), member.down
        try:
            await asyncio.wait((task, down), timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if task.done() and not (down.done() and task.exception() is not None):
                return task.result()
        finally:
            await self._let_go(task)
        if down.done():
            raise EngineError(f"{member.replica.name} was lost: {down.result()}")
        raise TimeoutError

    async def _let_go(self, task: asyncio.Future[Any]) -> None:
        """Cancel a call whose answer nobody waits for."""
        if not task.done():
            task.cancel()
            await asyncio.wait((task,), timeout=self._limits.seconds)
        if task.done() and not task.cancelled():
            task.exception()  # so that nobody warns that it was never looked at

    async def _command(self, member: _Member, what: str, call: Coroutine[Any, Any, T]) -> T:
        """The same for what must not take long; a replica that does is taken out."""
        try:
            return await self._answered(member, call, self._limits.seconds)
        except TimeoutError:
            text = f"waited {self._limits.seconds:g} s for {member.replica.name} {what}"
            member.take_out(text)
            raise EngineError(text) from None

    async def _command_all(self, what: str, call: Callable[[Engine], Coroutine[Any, Any, None]]) -> None:
        """Tell all that serve. One that fails is taken out, which is what the others need to know of it."""
        self._check_usable()

        async def one(member: _Member) -> None:
            try:
                await self._command(member, what, call(member.replica))
            except EngineError as error:
                member.take_out(str(error))

        await asyncio.gather(*(one(member) for member in self._members if member.is_serving))

    def _check_usable(self) -> None:
        if self._is_closed:
            raise EngineError("the engine is closed", retriable=False)
        if all(member.is_given_up for member in self._members):
            raise EngineError(f"no engine is left: {self._reasons()}", retriable=False)

    def _reasons(self) -> str:
        return "; ".join(f"{m.replica.name}: {m.reason}" for m in self._members if not m.is_serving)

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def metrics(self) -> dict[str, float]:
        """How the replicas are, as of the last update."""
        return {
            "engine/replicas": sum(member.is_serving for member in self._members),
            "engine/restarts": self._restarts,
            "engine/sync_seconds": self._sync_seconds,
            "paused_seconds": self._paused_seconds,
            "engine/canary_difference": max(self._differences.values(), default=0.0),
        }
