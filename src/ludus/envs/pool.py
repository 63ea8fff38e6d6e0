"""A pool of environments: each episode holds an instance of its own, and gives it back.

Who waits for whom. An episode that asks while all instances are taken waits in a first-in-first-out
queue, at most `max_wait` seconds. Instances are made by background tasks, when an episode waits and there
are fewer than `size`; they are reset by the episode that gets them, and closed by background tasks,
which then free their place. Only `close` waits for a close, so releasing is safe inside a task that is
being cancelled. A pool belongs to one event loop.

An instance may stand for a session on a server (`factory.is_session`). It is closed after one episode: kept
idle here, it would hold an instance there that others wait for. Its reset may wait for one there, so that it
may take `max_wait` beside `reset_timeout`.

A server of others may have room for fewer sessions than `size` (`ServerFull`). Then the episode goes back to
the queue, and gets the next instance that is given back; every second, one episode finds out whether there is
room for one more.

Environments are closed when the pool is, and at the interpreter's exit otherwise.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, get_args

from ludus.core.failures import Boundary, ConfigError, InfraError
from ludus.core.task import Task
from ludus.core.user_code import error_with_location, log_once
from ludus.envs.env import Env, Isolation, Observation, ServerFull, ShowActions, has_snapshots, reset_env
from ludus.envs.instances import Instance, InstanceFactory, is_final
from ludus.envs.pool_config import checked_options
from ludus.remote.time_limit import queueing
from ludus.tools.versions import code_version

_log = logging.getLogger(__name__)

_FULL_SECONDS = 1.0
"""How often a server that was full is asked for one more session."""


@dataclass(frozen=True, slots=True)
class Lease:
    """An instance bound to an episode, and what its reset returned."""

    episode: str
    env: Any
    observation: Observation
    instance: Instance = field(repr=False)


@dataclass(frozen=True, slots=True)
class PoolStats:
    """A pool at one moment, for metrics."""

    size: int
    in_use: int
    idle: int
    waiting: int
    created: int
    closed: int
    failures: int
    """Creations, resets, health checks and closes that went wrong."""


class EnvPool:
    """Hands out instances that `factory` (a class or a function, sync or async) makes."""

    def __init__(
        self,
        factory: Callable[[], Any],
        *,
        name: str = "env",
        size: int = 16,
        max_wait: float = 300.0,
        time_to_live: float | None = None,
        max_idle: float | None = None,
        max_uses: int | None = None,
        reset_timeout: float | None = 60.0,
        close_timeout: float = 10.0,
        reset_retries: int = 2,
        step_timeout: float | None = None,
        spares: int = 0,
        isolation: Isolation | None = None,
        memory_mb: int | None = None,
        show_actions: ShowActions | None = None,
        deterministic: bool | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """The settings are those of `PoolConfig`."""
        if size < 1:
            raise ConfigError(f"the pool {name!r} needs a size of at least 1, not {size}")
        self.name, self.size, self.max_wait = name, size, max_wait
        made = getattr(factory, "func", factory)  # an adapter's class, with its arguments
        own_word = bool(getattr(made, "deterministic", False))
        self.is_deterministic = own_word if deterministic is None else deterministic
        self.has_snapshots = isinstance(made, type) and has_snapshots(made)
        given = {str(place): one for place, one in enumerate(getattr(factory, "args", ()))}
        given |= {**getattr(factory, "keywords", {}), **(options or {})}
        self.version = code_version(made, given)
        """Another one where the environment's code, its options or the files that they name have changed."""
        self.made_by = str(getattr(factory, "__qualname__", None) or type(factory).__name__)
        self._close_factory = getattr(factory, "aclose", None)
        self._is_session = is_session = bool(getattr(factory, "is_session", False))
        self._time_to_live, self._max_idle = time_to_live, max_idle
        self._max_uses = 1 if is_session else max_uses
        self.reset_timeout, self._reset_retries = reset_timeout, reset_retries
        if is_session and reset_timeout is not None:
            self.reset_timeout = reset_timeout + max_wait
        own: float = getattr(factory, "step_timeout", Env.step_timeout)
        self.step_timeout, self.spares = step_timeout or own, spares
        self.isolation: Isolation = isolation or getattr(factory, "isolation", None) or "none"
        if options:
            factory = partial(checked_options(factory, name, options), **options)
        self._show_actions = show_actions
        self._instances = InstanceFactory(
            factory,
            name,
            self.isolation,
            make_timeout=reset_timeout,
            call_timeout=self.step_timeout,
            close_timeout=close_timeout,
            retries=reset_retries,
            memory_mb=memory_mb,
        )
        self._reset_limit = "max_wait and reset_timeout" if is_session else "reset_timeout"
        self._makes_spares = True
        """Until one cannot be made; the next episode that asks tries again."""
        self._idle: list[Instance] = []
        self._places = 0
        """Instances that are there, being made or being closed: never more than `size`."""
        self._waiting: deque[asyncio.Future[Instance]] = deque()
        self._leases: dict[str, Lease] = {}
        self._pending: dict[str, asyncio.Future[None]] = {}
        self._making: set[asyncio.Task[None]] = set()
        self._closing: set[asyncio.Task[None]] = set()
        self._is_closed = False
        self._full: ServerFull | None = None
        """Why no further instance can be made for now."""
        self._was_full = False
        self._ask_again: asyncio.TimerHandle | None = None

    @property
    def stats(self) -> PoolStats:
        """How the pool is doing."""
        return PoolStats(
            size=self.size,
            in_use=len(self._leases),
            idle=len(self._idle),
            waiting=len(self._waiting),
            created=self._instances.created,
            closed=self._instances.closed,
            failures=self._instances.failures,
        )

    def show_actions_of(self, env: Any) -> ShowActions:
        """How the agent learns of the possible actions: as the recipe says, or the environment's class."""
        own: ShowActions = self._show_actions or getattr(env, "show_actions", None) or "no"
        if own not in get_args(ShowActions):
            raise ConfigError(
                f"the environment {self.name!r}: show_actions is one of {', '.join(get_args(ShowActions))}, "
                f"not {own!r}"
            )
        return own

    @asynccontextmanager
    async def new_instance(self) -> AsyncIterator[Any]:
        """An instance beside those that are handed out, not reset, to look at; closed at the end."""
        instance = await self._instances.make()
        try:
            yield instance.env
        finally:
            await self._instances.close(instance)

    @asynccontextmanager
    async def lease(self, episode: str, task: Task) -> AsyncIterator[Any]:
        """The episode's environment, reset for `task`, and released at the end."""
        held = await self.acquire(episode, task)
        try:
            yield held.env
        finally:
            await self.release(episode)

    async def acquire(self, episode: str, task: Task) -> Lease:
        """The episode's own instance: the one it has, or the next free one, reset for `task`."""
        while episode in self._pending:
            await asyncio.wait((self._pending[episode],))
        if episode in self._leases:
            return self._leases[episode]
        self._pending[episode] = asyncio.get_running_loop().create_future()
        self._makes_spares = True
        try:
            held = await self._new_lease(episode, task)
            self._leases[episode] = held
            return held
        finally:
            self._pending.pop(episode).set_result(None)

    async def release(self, episode: str, *, is_broken: bool = False) -> None:
        """Give the episode's instance back, if it has one; one that is broken is closed and replaced.

        It never suspends, so that a task that is being cancelled can rely on it.
        """
        held = self._leases.pop(episode, None)
        if held is None:
            return
        if is_broken or self._is_worn_out(held.instance):
            self._retire(held.instance)
        else:
            self._offer(held.instance)

    async def close(self) -> None:
        """Close every instance and refuse further episodes; those that wait get an `InfraError`."""
        self._is_closed = True
        if self._ask_again is not None:
            self._ask_again.cancel()
        for making in self._making:
            making.cancel()
        while self._waiting:
            self._fail_first(self._closed_error())
        for episode in list(self._leases):
            await self.release(episode)
        while self._idle:
            self._retire(self._take_idle(self._idle[-1]))
        while tasks := self._making | self._closing:
            await asyncio.wait(tasks)
        if self._close_factory is not None:  # one that holds something for all instances: connections
            await self._close_factory()

    # Getting an instance --------------------------------------------------------------------------

    async def _new_lease(self, episode: str, task: Task) -> Lease:
        attempt, was_full = 0, False
        end = time.monotonic() + self.max_wait
        while True:
            if not was_full:
                end = time.monotonic() + self.max_wait
            instance = await self._next_instance(end, first=was_full or attempt > 0)
            was_full = False
            attempt += 1
            try:
                with queueing() if self._is_session else nullcontext():  # for a place on the server
                    seen = await reset_env(instance.env, task, self.name, timeout=self.reset_timeout)
            except ServerFull as error:
                self._retire(instance)
                self._note_full(error)
                was_full, attempt = True, attempt - 1
                continue
            except BaseException as error:
                self._retire(instance)  # its state is unknown
                if not isinstance(error, Exception) or isinstance(error, ConfigError):
                    raise
                self._instances.failures += 1
                if not isinstance(error, InfraError):
                    log_once(_log, f"resetting the environment {self.name!r}", error)
                if attempt > self._reset_retries or is_final(error):
                    why = error_with_location(error)
                    if isinstance(error, TimeoutError) and self.reset_timeout is not None:
                        why = f"it took more than {self.reset_timeout:g} seconds ({self._reset_limit})"
                    raise self._failure("could not be reset", why, error, attempt) from error
                continue
            if self._is_closed:
                self._retire(instance)
                raise self._closed_error()
            if instance.uses == 0 and self._full is not None:  # there is room again
                self._full = None
                self._grow()
            instance.uses += 1
            return Lease(episode, instance.env, seen, instance)

    def _note_full(self, error: ServerFull) -> None:
        if not self._was_full:
            _log.warning(
                "the environment %r: its server is full (%s), so that episodes wait for a session; "
                "agent.pools.%s.size = N makes no more than N",
                *(self.name, error, self.name),
            )
        self._full, self._was_full = error, True

    async def _next_instance(self, end: float, *, first: bool) -> Instance:
        """The next instance that is free and fit; `first` goes to the head of the queue."""
        while True:
            instance = await self._next_free(max(0.0, end - time.monotonic()), first)
            is_fit = False
            try:
                is_fit = not self._is_worn_out(instance) and await self._instances.is_healthy(instance)
            finally:
                if not is_fit:
                    self._retire(instance)
            if is_fit:
                return instance
            first = True

    async def _next_free(self, seconds: float, first: bool) -> Instance:
        if self._is_closed:
            raise self._closed_error()
        if self._idle and (first or not self._waiting):
            return self._take_idle(self._idle[-1])
        waiter: asyncio.Future[Instance] = asyncio.get_running_loop().create_future()
        if first:
            self._waiting.appendleft(waiter)
        else:
            self._waiting.append(waiter)
        self._grow()
        try:
            with queueing():
                await asyncio.wait((waiter,), timeout=seconds)
        except asyncio.CancelledError:
            self._withdraw(waiter)
            raise
        if not waiter.done():
            self._withdraw(waiter)
            why = (
                f"{len(self._leases)} of {self.size} are in use and {len(self._waiting)} more episodes "
                "wait; raise the pool's size (of a server: --size), or lower the number of episodes in flight"
            )
            if self._full is not None:
                why = (
                    f"its server is full ({self._full}), and {len(self._leases)} of its sessions are ours; let "
                    f"the server have more, set agent.pools.{self.name}.size to what it has room for, or raise "
                    f"agent.pools.{self.name}.max_wait"
                )
            raise InfraError(
                Boundary.POOL,
                f"no environment {self.name!r} became free within {self.max_wait:g} seconds: {why}",
            )
        return waiter.result()

    def _withdraw(self, waiter: asyncio.Future[Instance]) -> None:
        """Stop waiting; an instance that was handed over in the same moment goes to the next."""
        if waiter in self._waiting:
            self._waiting.remove(waiter)
        elif waiter.done() and waiter.exception() is None:
            self._offer(waiter.result())

    # Keeping instances ----------------------------------------------------------------------------

    def _grow(self) -> None:
        """Make instances for those who wait and for whom none is being made, and spares, if there is room."""
        spares = max(0, self.spares - len(self._idle)) if self._makes_spares else 0
        wanted = min(len(self._waiting) + spares - len(self._making), self.size - self._places)
        if self._full is not None:
            wanted = self._wanted_of_full(wanted)
        for _ in range(0 if self._is_closed else wanted):
            self._places += 1
            self._start(self._make(), self._making)

    def _wanted_of_full(self, wanted: int) -> int:
        """One instance at a time, and a pause after each, while the server is taken to be full."""
        if wanted <= 0 or self._is_closed or self._ask_again is not None:
            return 0

        def again() -> None:
            self._ask_again = None
            self._grow()

        self._ask_again = asyncio.get_running_loop().call_later(_FULL_SECONDS, again)
        return 1

    async def _make(self) -> None:
        try:
            instance = await self._instances.make()
        except Exception as error:  # noqa: BLE001 - whatever the factory raised goes to who waits
            self._places -= 1
            attempts = 1 if is_final(error) else self._reset_retries + 1
            failure = self._failure("could not be made", error_with_location(error), error, attempts)
            failure.__cause__ = error
            self._makes_spares = False
            self._fail_first(error if isinstance(error, ConfigError) else failure)
            return
        self._offer(instance)

    def _fail_first(self, failure: Exception) -> None:
        if self._waiting:
            self._waiting.popleft().set_exception(failure)

    def _offer(self, instance: Instance) -> None:
        """Hand an instance to the first waiting episode, or keep it idle."""
        if self._is_closed:
            self._retire(instance)
        elif self._waiting:
            self._waiting.popleft().set_result(instance)
        else:
            instance.has_rested = True
            self._idle.append(instance)
            self._expire_later(instance)

    def _take_idle(self, instance: Instance) -> Instance:
        self._idle.remove(instance)
        self._grow()
        if instance.expiry is not None:
            instance.expiry.cancel()
            instance.expiry = None
        return instance

    def _expire_later(self, instance: Instance) -> None:
        limits = []
        if self._time_to_live is not None:
            limits.append(max(0.0, instance.born + self._time_to_live - time.monotonic()))
        if self._max_idle is not None:
            limits.append(self._max_idle)
        if limits:
            loop = asyncio.get_running_loop()
            instance.expiry = loop.call_later(min(limits), self._expire, instance)

    def _expire(self, instance: Instance) -> None:
        if instance not in self._idle:
            return
        if self._is_worn_out(instance) or len(self._idle) > self.spares:
            self._retire(self._take_idle(instance))
        else:
            self._expire_later(instance)

    def _is_worn_out(self, instance: Instance) -> bool:
        age = time.monotonic() - instance.born
        is_old = self._time_to_live is not None and age >= self._time_to_live
        return is_old or (self._max_uses is not None and instance.uses >= self._max_uses)

    def _retire(self, instance: Instance) -> None:
        self._start(self._close_one(instance), self._closing)

    async def _close_one(self, instance: Instance) -> None:
        await self._instances.close(instance)
        self._places -= 1

    def _start(self, work: Coroutine[Any, Any, None], tasks: set[asyncio.Task[None]]) -> None:
        def finish(task: asyncio.Task[None]) -> None:
            tasks.discard(task)
            self._grow()

        task = asyncio.get_running_loop().create_task(work)
        tasks.add(task)
        task.add_done_callback(finish)

    def _failure(self, what: str, why: str, error: Exception, attempts: int) -> InfraError:
        boundary = error.boundary if isinstance(error, InfraError) else Boundary.ENV
        message = f"the environment {self.name!r} {what}: {why}"
        return InfraError(boundary, message, attempts=attempts, retriable=not is_final(error))

    def _closed_error(self) -> InfraError:
        return InfraError(Boundary.POOL, f"the pool {self.name!r} is closed", retriable=False)
