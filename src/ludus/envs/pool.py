"""A pool of environments: each episode holds an instance of its own, and gives it back.

Who waits for whom. An episode waits for one of `size` places, first in, first out, at most `max_wait` seconds.
With its place it takes an idle instance or makes one, and resets it; one that fails is closed, and another one
tried. A place is free again when its instance is idle or closed, so that instances, those being made or closed
among them, are never more than `size`. `release` leaves closing to a background task, so it is safe inside a
task that is being cancelled. A pool belongs to one event loop. Environments are closed when the pool is, and at
the interpreter's exit otherwise.

An instance may stand for a session on a server (`ServedEnvs`). It is closed after one episode: kept idle here,
it would hold an instance there that others wait for. Its reset may wait for one there, so that it may take
`max_wait` beside `reset_timeout`.

A server of others may have room for fewer sessions than `size` (`ServerFull`). Then episodes have their turn
one after another: the first takes the next instance that is given back, or tries every second for one more.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, get_args

from ludus.core.failures import Boundary, ConfigError, InfraError
from ludus.core.task import Task
from ludus.core.user_code import error_with_location, log_once
from ludus.envs.env import (
    Env,
    Isolation,
    Observation,
    ServedEnvs,
    ServerFull,
    ShowActions,
    has_snapshots,
    reset_env,
    setting_of,
)
from ludus.envs.instances import Instance, InstanceFactory, PoolConfig, is_final
from ludus.remote.limits import queueing
from ludus.tools.versions import code_version

_log = logging.getLogger(__name__)

_FULL_SECONDS = 1.0
"""How often a server that was full is asked for one more session."""
_DEFAULT_SIZE = 16


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

    def __init__(self, factory: Callable[[], Any], *, name: str = "env", **settings: Any) -> None:
        """The settings are those of `PoolConfig`; without a size, there are 16 instances at most."""
        self._config = config = PoolConfig.parse(settings, f"the pool {name!r}")
        self.name, self.size, self.max_wait = name, config.size or _DEFAULT_SIZE, config.max_wait
        source: Any = factory
        made: Any = source
        given: dict[Any, Any] = dict(config.options)
        if isinstance(source, partial):  # an adapter's class, with what a reference names
            made = source.func
            given = dict(enumerate(source.args)) | source.keywords | given
        self.version = code_version(made, {str(name): one for name, one in given.items()})
        """Another one where the environment's code, its options or the files that they name have changed."""
        self.made_by = str(getattr(made, "__qualname__", type(made).__name__))
        kind: type[Env] = made if isinstance(made, type) else Env
        own_word = config.deterministic
        self.is_deterministic = bool(setting_of(kind, "deterministic") if own_word is None else own_word)
        self.has_snapshots = has_snapshots(kind)
        self.step_timeout: float = config.step_timeout or setting_of(kind, "step_timeout")
        self._served: ServedEnvs | None = source if isinstance(source, ServedEnvs) else None
        self._max_uses = config.max_uses if self._served is None else 1
        self.reset_timeout, self._reset_limit = config.reset_timeout, "reset_timeout"
        if self._served is not None:
            self.reset_timeout += config.max_wait
            self._reset_limit = "max_wait and reset_timeout"
        self.isolation: Isolation = config.isolation or setting_of(kind, "isolation")
        self._instances = InstanceFactory(source, name, self.isolation, self.step_timeout, config)
        self._places = asyncio.Semaphore(self.size)
        self._alive = 0
        """Instances that are leased, idle, being made or being closed."""
        self._waiting = 0
        self._idle: list[Instance] = []
        self._leases: dict[str, Lease] = {}
        self._pending: dict[str, asyncio.Future[None]] = {}
        self._making: set[asyncio.Task[Instance]] = set()
        self._background: set[asyncio.Task[None]] = set()
        self._spares_due = 0
        self._makes_spares = True
        """Until one cannot be made; the next episode that asks tries again."""
        self._is_closed = False
        self._full: ServerFull | None = None
        """Why no further instance can be made for now."""
        self._was_full = False
        self._turn, self._returned = asyncio.Lock(), asyncio.Event()
        """For episodes while the server is full: whose turn it is, and whether an instance was given back."""

    @property
    def stats(self) -> PoolStats:
        return PoolStats(
            size=self.size,
            in_use=len(self._leases),
            idle=len(self._idle),
            waiting=self._waiting,
            created=self._instances.created,
            closed=self._instances.closed,
            failures=self._instances.failures,
        )

    def show_actions_of(self, env: Any) -> ShowActions:
        """How the agent learns of the possible actions: as the recipe says, or the environment's class."""
        own: ShowActions = self._config.show_actions or setting_of(env, "show_actions")
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
        self._check_open()
        self._pending[episode] = asyncio.get_running_loop().create_future()
        self._makes_spares = True
        try:
            self._leases[episode] = held = await self._new_lease(episode, task)
        finally:
            self._pending.pop(episode).set_result(None)
        self._make_spares()
        return held

    async def release(self, episode: str, *, is_broken: bool = False) -> None:
        """Give the episode's instance back, if it has one; one that is broken is closed and replaced.

        It never suspends, so that a task that is being cancelled can rely on it.
        """
        held = self._leases.pop(episode, None)
        if held is None:
            return
        if is_broken or self._is_closed or self._is_worn_out(held.instance):
            self._start(self._retire(held.instance))
        else:
            self._keep(held.instance)
            self._places.release()

    async def close(self) -> None:
        """Close every instance and refuse further episodes; those that wait get an `InfraError`."""
        self._is_closed = True
        self._returned.set()
        for making in self._making:
            making.cancel()
        for episode in list(self._leases):
            await self.release(episode)
        while self._idle:
            self._start(self._close(self._take_idle()))
        while ending := [*self._background, *self._pending.values()]:
            await asyncio.wait(ending)
        if self._served is not None:  # what it holds for all instances: connections
            await self._served.aclose()

    # Getting an instance --------------------------------------------------------------------------

    async def _new_lease(self, episode: str, task: Task) -> Lease:
        end = asyncio.get_running_loop().time() + self.max_wait
        async with self._queued(end):
            await self._places.acquire()
        instance: Instance | None = None
        try:
            async with AsyncExitStack() as turn:
                attempt, has_turn = 1, False
                while True:
                    if self._full is not None and not has_turn:
                        async with self._queued(end):
                            await self._turn.acquire()
                        turn.callback(self._turn.release)
                        has_turn = True
                    self._check_open()
                    instance = await self._next_instance()
                    try:
                        with nullcontext() if self._served is None else queueing():  # for a place there
                            seen = await reset_env(
                                instance.env, task, self.name, timeout=self.reset_timeout
                            )
                        self._check_open()
                        break
                    except Exception as error:  # noqa: BLE001 - told by `_check_reset`
                        closing, instance = self._start(self._close(instance)), None
                        await asyncio.wait((closing,))  # its state is unknown
                        if isinstance(error, ServerFull) and not self._is_closed:
                            self._note_full(error)
                            if has_turn:
                                await self._room(end)
                            continue
                        self._check_reset(error, attempt)
                        attempt += 1
        except BaseException:
            if instance is None:
                self._places.release()
            else:
                self._start(self._retire(instance))
            raise
        if instance.uses == 0:
            self._full = None  # there is room
        instance.uses += 1
        return Lease(episode, instance.env, seen, instance)

    @asynccontextmanager
    async def _queued(self, end: float) -> AsyncIterator[None]:
        """A wait in the pool's queue, cut off at `end`."""
        self._waiting += 1
        try:
            with queueing():
                async with asyncio.timeout_at(end):
                    yield
        except TimeoutError:
            more = self._waiting - 1
            why = (
                f"{len(self._leases)} of {self.size} are in use and {more} more episodes wait; raise the "
                "pool's size (of a server: --size), or lower the number of episodes in flight"
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
            ) from None
        finally:
            self._waiting -= 1

    def _note_full(self, error: ServerFull) -> None:
        if not self._was_full:
            _log.warning(
                "the environment %r: its server is full (%s), so that episodes wait for a session; "
                "agent.pools.%s.size = N makes no more than N",
                *(self.name, error, self.name),
            )
        self._full, self._was_full = error, True

    async def _room(self, end: float) -> None:
        """Wait until an instance is given back, or for a second: there may be room for one more by then."""
        async with self._queued(end):
            with suppress(TimeoutError):
                async with asyncio.timeout(_FULL_SECONDS):
                    while not self._idle and not self._is_closed:
                        self._returned.clear()
                        await self._returned.wait()

    def _check_reset(self, error: Exception, attempt: int) -> None:
        """Raise what ends the search for an instance, after an attempt that failed."""
        if isinstance(error, ConfigError) or self._is_closed:
            raise error
        self._instances.failures += 1
        if not isinstance(error, InfraError):
            log_once(_log, f"resetting the environment {self.name!r}", error)
        if self._config.gives_up(attempt, error):
            why = error_with_location(error)
            if isinstance(error, TimeoutError):
                why = f"it took more than {self.reset_timeout:g} seconds ({self._reset_limit})"
            raise self._failure("could not be reset", why, error, attempt) from error

    async def _next_instance(self) -> Instance:
        """An idle instance that is fit, or a new one; there is a place for it."""
        while self._idle:
            instance, is_fit = self._take_idle(), False
            try:
                is_fit = not self._is_worn_out(instance) and await self._instances.is_healthy(instance)
            finally:
                if not is_fit:
                    closing = self._start(self._close(instance))
            if is_fit:
                return instance
            await asyncio.wait((closing,))
        return await self._make()

    async def _make(self) -> Instance:
        self._alive += 1
        making = asyncio.get_running_loop().create_task(self._instances.make())
        self._making.add(making)
        try:
            return await making
        except BaseException as error:
            if making.done() and not making.cancelled() and making.exception() is None:
                made = making.result()  # cancelled when it was there and not yet handed over
                if self._is_closed:
                    self._start(self._close(made))
                else:
                    self._keep(made)
                raise
            self._alive -= 1
            if self._is_closed:
                raise self._closed_error() from None
            if not isinstance(error, Exception) or isinstance(error, ConfigError):
                raise
            attempts = 1 if is_final(error) else self._config.reset_retries + 1
            why = error_with_location(error)
            raise self._failure("could not be made", why, error, attempts) from error
        finally:
            self._making.discard(making)

    # Keeping instances ----------------------------------------------------------------------------

    def _make_spares(self) -> None:
        wanted = self._config.spares if self._makes_spares and not self._is_closed else 0
        for _ in range(min(wanted - len(self._idle), self.size - self._alive) - self._spares_due):
            self._spares_due += 1
            self._start(self._make_spare())

    async def _make_spare(self) -> None:
        try:
            async with self._places:
                if self._alive < self.size and not self._is_closed:
                    self._keep(await self._make())
        except Exception:  # noqa: BLE001 - an episode that needs one will say why
            self._makes_spares = False
        finally:
            self._spares_due -= 1

    def _keep(self, instance: Instance) -> None:
        """Keep an instance for the next episode."""
        instance.has_rested = True
        self._idle.append(instance)
        self._returned.set()
        self._expire_later(instance)

    def _take_idle(self) -> Instance:
        instance = self._idle.pop()
        if instance.expiry is not None:
            instance.expiry.cancel()
            instance.expiry = None
        return instance

    def _expire_later(self, instance: Instance) -> None:
        limits = [] if self._config.max_idle is None else [self._config.max_idle]
        if self._config.time_to_live is not None:
            limits.append(max(0.0, instance.born + self._config.time_to_live - time.monotonic()))
        if limits:
            loop = asyncio.get_running_loop()
            instance.expiry = loop.call_later(min(limits), self._expire, instance)

    def _expire(self, instance: Instance) -> None:
        if self._is_worn_out(instance) or len(self._idle) > self._config.spares:
            self._idle.remove(instance)
            self._start(self._close(instance))
        else:
            self._expire_later(instance)

    def _is_worn_out(self, instance: Instance) -> bool:
        age = time.monotonic() - instance.born
        is_old = self._config.time_to_live is not None and age >= self._config.time_to_live
        return is_old or (self._max_uses is not None and instance.uses >= self._max_uses)

    async def _retire(self, instance: Instance) -> None:
        """Close an instance, and give its place back."""
        await self._close(instance)
        self._places.release()

    async def _close(self, instance: Instance) -> None:
        await self._instances.close(instance)
        self._alive -= 1
        self._make_spares()

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return task

    def _failure(self, what: str, why: str, error: Exception, attempts: int) -> InfraError:
        boundary = error.boundary if isinstance(error, InfraError) else Boundary.ENV
        message = f"the environment {self.name!r} {what}: {why}"
        return InfraError(boundary, message, attempts=attempts, retriable=not is_final(error))

    def _check_open(self) -> None:
        if self._is_closed:
            raise self._closed_error()

    def _closed_error(self) -> InfraError:
        return InfraError(Boundary.POOL, f"the pool {self.name!r} is closed", retriable=False)
