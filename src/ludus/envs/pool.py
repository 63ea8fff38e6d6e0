"""A pool of environments: each episode holds an instance of its own, and gives it back.

Who waits for whom. An episode that asks while all instances are taken waits in a first-in-first-out
queue, at most `max_wait` seconds. Instances are made by background tasks, when an episode waits and there
are fewer than `size`; they are reset by the episode that gets them, and closed by background tasks,
which then free their place. Only `close` waits for a close, so releasing is safe inside a task that is
being cancelled. A pool belongs to one event loop.

An instance may stand for a session on a server (`factory.is_session`). It is closed after one episode: kept
idle here, it would hold an instance there that others wait for. Its reset may wait for one there, so that it
may take `max_wait` beside `reset_timeout`.

Environments are closed when the pool is, and at the interpreter's exit otherwise. A process that is
killed cannot close anything: what must not outlive it has to watch its parent, as process tools do.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import inspect
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, get_args

from pydantic import Field

from ludus.core.concurrency import ThreadExecutor, set_own_thread, shared_threads
from ludus.core.config import Config
from ludus.core.failures import Boundary, ConfigError, InfraError, LudusError
from ludus.core.task import Task
from ludus.core.user_code import error_with_location, log_once
from ludus.envs.env import (
    Env,
    Isolation,
    Observation,
    ShowActions,
    as_env,
    call_env,
    has_snapshots,
    reset_env,
)
from ludus.envs.isolated import IsolatedEnv
from ludus.tools.versions import code_version

_log = logging.getLogger(__name__)


class PoolConfig(Config):
    """How the instances of one environment are kept."""

    size: int | None = Field(default=None, ge=1)
    """Most instances alive at once; agent.env_pool when left out."""
    max_wait: float = Field(default=300.0, gt=0)
    """Seconds that an episode waits for a free instance before it fails."""
    reset_timeout: float = Field(default=60.0, gt=0)
    """Seconds that making or resetting an instance may take."""
    reset_retries: int = Field(default=2, ge=0)
    """How often another instance is tried when one cannot be made or reset."""
    step_timeout: float | None = Field(default=None, gt=0)
    """Seconds that a call may take before its instance is replaced; as the class says (60) when left out."""
    close_timeout: float = Field(default=10.0, gt=0)
    """Seconds that closing an instance, or asking whether it is healthy, may take."""
    time_to_live: float | None = Field(default=None, gt=0)
    """Seconds after which an instance is replaced, between episodes; for ever when left out."""
    max_idle: float | None = Field(default=None, gt=0)
    """Seconds after which an instance that no episode uses is closed; spares stay."""
    max_uses: int | None = Field(default=None, ge=1)
    """Episodes after which an instance is replaced; any number when left out."""
    spares: int = Field(default=0, ge=0)
    """Instances kept ready beside those in use, as far as the size allows."""
    isolation: Isolation | None = None
    """Where an instance lives: none, thread or process; as its class says when left out (docs/envs.md)."""
    memory_mb: int | None = Field(default=None, ge=1)
    """MiB above which an instance's process is replaced, between episodes (isolation = "process")."""
    show_actions: ShowActions | None = None
    """How the agent learns of the possible actions: no, tool, observation; as the class says when left out."""
    deterministic: bool | None = None
    """Whether the same calls have the same results, so that branches of trees (`rl.tree`) may make them again;
    as the class says when left out."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Arguments that instances are made with, by name: those of the environment's class."""


@dataclass(slots=True, eq=False)
class Instance:
    """One environment, its age and its use."""

    env: Any
    born: float
    uses: int = 0
    has_rested: bool = False
    """Whether it has been idle, so that nobody knows how it is."""
    thread: ThreadExecutor | None = None
    """Its own thread, where it has one."""
    expiry: asyncio.TimerHandle | None = None


class InstanceFactory:
    """Makes and closes instances; what is still alive when the interpreter ends is closed then."""

    def __init__(
        self,
        factory: Callable[[], Any],
        name: str,
        make_timeout: float | None,
        close_timeout: float,
        retries: int,
        isolation: Isolation,
    ) -> None:
        self._factory = factory
        self._isolation = isolation
        self._name = name
        self._make_timeout, self._close_timeout = make_timeout, close_timeout
        self._retries = retries
        self._living: set[Instance] = set()
        self.created = 0
        self.closed = 0
        self.failures = 0
        _factories.add(self)

    async def make(self) -> Instance:
        """A new instance; a factory that fails is tried again."""
        attempt, thread = 0, None
        while True:
            attempt += 1
            try:
                if self._isolation != "none":
                    thread = ThreadExecutor(1, name=f"env-{self._name}", keep_idle=True)
                env = as_env(await self._build(thread or shared_threads()), self._name)
                break
            except Exception as error:
                self.failures += 1
                if not isinstance(error, LudusError):
                    log_once(_log, f"making the environment {self._name!r}", error)
                if attempt > self._retries or is_final(error):
                    raise
        set_own_thread(env, thread)
        instance = Instance(env, time.monotonic(), thread=thread)
        self._living.add(instance)
        self.created += 1
        return instance

    async def _build(self, threads: ThreadExecutor) -> Any:
        if inspect.iscoroutinefunction(self._factory):
            return await call_env(self._factory, timeout=self._make_timeout)
        is_wanted, guard = True, threading.Lock()

        def build() -> Any:
            env = self._factory()
            with guard:
                if is_wanted:
                    return env
            _close_now(env)  # it came after its deadline, and no caller has it
            return None

        try:
            made = await threads.run(build, timeout=self._make_timeout)
            if inspect.isawaitable(made):
                async with asyncio.timeout(self._make_timeout):
                    made = await made
            return made
        except BaseException:
            with guard:
                is_wanted = False
            raise

    async def is_healthy(self, instance: Instance) -> bool:
        """Whether a used instance may be handed out again."""
        check = getattr(instance.env, "is_healthy", None)
        is_own = getattr(type(instance.env), "is_healthy", None) is not Env.is_healthy
        if not (instance.uses or instance.has_rested) or check is None or not is_own:
            return True
        try:
            good = bool(await call_env(check, timeout=self._close_timeout))
        except Exception as error:  # noqa: BLE001 - whatever it raised, it is not healthy
            log_once(_log, f"the health check of the environment {self._name!r}", error)
            good = False
        self.failures += not good
        return good

    async def close(self, instance: Instance) -> None:
        """Close an instance, whatever its `close` does; the deadline bounds it."""
        close = getattr(instance.env, "close", None)
        try:
            if close is not None:
                await call_env(close, timeout=self._close_timeout)
        except Exception as error:  # noqa: BLE001 - an environment that cannot close must not stop us
            self.failures += 1
            log_once(_log, f"closing the environment {self._name!r}", error)
        finally:
            self._living.discard(instance)
            self.closed += 1
            if instance.thread is not None:
                set_own_thread(instance.env, None)
                await instance.thread.close()

    def close_at_exit(self) -> None:
        """Close what is left; the event loop is gone by then."""
        for instance in list(self._living):
            thread = threading.Thread(target=_close_now, args=(instance.env,), daemon=True)
            try:
                thread.start()
            except RuntimeError:
                _close_now(instance.env)  # some versions of Python start no threads at exit
            else:
                thread.join(self._close_timeout)


def is_final(error: BaseException) -> bool:
    """Whether another instance would fail in the same way: a setting is wrong, or nobody is at the address."""
    return isinstance(error, ConfigError) or (isinstance(error, InfraError) and not error.replay)


def _close_now(env: Any) -> None:
    with contextlib.suppress(Exception):
        value = env.close() if hasattr(env, "close") else None
        if inspect.iscoroutine(value):
            asyncio.run(value)


_factories: weakref.WeakSet[InstanceFactory] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for workshop in list(_factories):
        workshop.close_at_exit()


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


def checked_options(
    factory: Callable[..., Any], name: str, options: Mapping[str, Any]
) -> Callable[..., Any]:
    """`factory`, if it takes these arguments."""
    try:
        inspect.signature(factory).bind(**options)
    except TypeError as error:
        takes = ", ".join(inspect.signature(factory).parameters) or "none"
        raise ConfigError(
            f"agent.pools.{name}.options: {error}; the arguments that {name!r} takes: {takes}"
        ) from None
    return factory


PROBE_SECONDS = 6.0
"""How long a server may take to answer before a run begins; one that is just being started needs a few."""


async def probe_env(factory: Callable[..., Any], name: str, options: Mapping[str, Any]) -> None:
    """Refuse an environment on a server that is not there (`ConfigError`); others need no probe."""
    probe = getattr(factory, "probe", None)
    if probe is not None and not isinstance(factory, type):
        checked_options(factory, name, options)
        await probe(PROBE_SECONDS, **options)


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
        self.version = code_version(made)
        """Another one where the code of the environment has changed."""
        self.made_by = str(getattr(factory, "__qualname__", None) or type(factory).__name__)
        self._close_factory = getattr(factory, "aclose", None)
        is_session = bool(getattr(factory, "is_session", False))
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
        if memory_mb is not None and self.isolation != "process":
            raise ConfigError(
                f"the environment {name!r}: memory_mb bounds the process of an instance, and with isolation = "
                f'"{self.isolation}" it has none of its own: set isolation = "process"'
            )
        if self.isolation == "process":
            factory = partial(
                IsolatedEnv,
                factory,
                name,
                start_timeout=reset_timeout,
                call_timeout=self.step_timeout,
                close_timeout=close_timeout,
                memory_mb=memory_mb,
            )
        self._show_actions = show_actions
        self._instances = InstanceFactory(
            factory, name, reset_timeout, close_timeout, reset_retries, self.isolation
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
        attempt = 0
        while True:
            instance = await self._next_instance(first=attempt > 0)
            attempt += 1
            try:
                seen = await reset_env(instance.env, task, self.name, timeout=self.reset_timeout)
            except BaseException as error:
                self._retire(instance)  # its state is unknown
                if not isinstance(error, Exception) or isinstance(error, ConfigError):
                    raise
                self._instances.failures += 1
                if not isinstance(error, InfraError):
                    log_once(_log, f"resetting the environment {self.name!r}", error)
                if attempt > self._reset_retries or is_final(error):
                    boundary = error.boundary if isinstance(error, InfraError) else Boundary.ENV
                    why = (
                        f"it took more than {self.reset_timeout:g} seconds ({self._reset_limit})"
                        if isinstance(error, TimeoutError) and self.reset_timeout is not None
                        else error_with_location(error)
                    )
                    message = f"the environment {self.name!r} could not be reset: {why}"
                    raise InfraError(
                        boundary, message, attempts=attempt, retriable=not is_final(error)
                    ) from error
                continue
            if self._is_closed:
                self._retire(instance)
                raise self._closed_error()
            instance.uses += 1
            return Lease(episode, instance.env, seen, instance)

    async def _next_instance(self, *, first: bool) -> Instance:
        """The next instance that is free and fit; `first` goes to the head of the queue."""
        end = time.monotonic() + self.max_wait
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
            await asyncio.wait((waiter,), timeout=seconds)
        except asyncio.CancelledError:
            self._withdraw(waiter)
            raise
        if not waiter.done():
            self._withdraw(waiter)
            raise InfraError(
                Boundary.POOL,
                f"no environment {self.name!r} became free within {self.max_wait:g} seconds: "
                f"{len(self._leases)} of {self.size} are in use and {len(self._waiting)} more episodes "
                "wait; raise the pool's size (of a server: --size), or lower the number of episodes in flight",
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
        for _ in range(0 if self._is_closed else wanted):
            self._places += 1
            self._start(self._make(), self._making)

    async def _make(self) -> None:
        try:
            instance = await self._instances.make()
        except Exception as error:  # noqa: BLE001 - whatever the factory raised goes to who waits
            self._places -= 1
            message = f"an environment {self.name!r} could not be made: {error_with_location(error)}"
            failure = InfraError(
                error.boundary if isinstance(error, InfraError) else Boundary.ENV,
                message,
                attempts=1 if is_final(error) else self._reset_retries + 1,
                retriable=not is_final(error),
            )
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

    def _closed_error(self) -> InfraError:
        return InfraError(Boundary.POOL, f"the pool {self.name!r} is closed", retriable=False)
