"""How the instances of an environment are kept: settings, making and closing, for its pool.

An instance is made in a thread, within a deadline, and again where that fails. What is alive when the
interpreter ends is closed then. A process that is killed cannot close anything: what must not outlive it has to
watch its parent, as process tools do.
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
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from pydantic import Field

from ludus.core.config import Config
from ludus.core.failures import ConfigError, InfraError, LudusError
from ludus.core.user_code import log_once
from ludus.envs.env import Env, Isolation, ProbedEnvs, ShowActions, as_env, call_env, is_own, setting_of
from ludus.envs.isolated import IsolatedEnv
from ludus.remote.threads import ThreadExecutor, set_own_thread, shared_threads

_log = logging.getLogger(__name__)


class PoolConfig(Config):
    """How the instances of one environment are kept."""

    size: int | None = Field(default=None, ge=1)
    """Most instances alive at once; 256 when left out (64 in `ludus serve`)."""
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

    def gives_up(self, attempt: int, error: Exception) -> bool:
        """Whether no other instance is tried after this attempt, counted from 1."""
        return attempt > self.reset_retries or is_final(error)


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


def _refuse_lacking(kind: type, name: str) -> None:
    """Refuse a class that cannot be made without arguments (`ConfigError`)."""
    try:
        taken = inspect.signature(kind).parameters.values()
    except (TypeError, ValueError):  # it does not say
        return
    lacking = [
        one.name
        for one in taken
        if one.default is one.empty and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
    ]
    if lacking:
        given = ", ".join(f"{one} = ..." for one in lacking)
        raise ConfigError(
            f"the environment {name!r} cannot be made without the argument(s) {', '.join(lacking)}: give "
            f"options = {{ {given} }} in [agent.pools.NAME] of the recipe, or defaults "
            f"in {kind.__name__}.__init__"
        )


PROBE_SECONDS = 6.0
"""How long a server may take to answer before a run begins; one that is just being started needs a few."""


async def probe_env(factory: Any, name: str, options: Mapping[str, Any]) -> None:
    """Refuse an environment on a server that is not there (`ConfigError`); others need no probe."""
    if isinstance(factory, type) or not isinstance(factory, ProbedEnvs):
        return
    checked_options(cast(Any, factory), name, options)
    await factory.probe(PROBE_SECONDS, **options)


@dataclass(slots=True, eq=False)
class Instance:
    """One environment, its age and its use."""

    env: Any
    born: float
    uses: int = 0
    has_rested: bool = False
    """Has been idle: health-check before reuse."""
    thread: ThreadExecutor | None = None
    """Its own thread, where it has one."""
    expiry: asyncio.TimerHandle | None = None


class InstanceFactory:
    """Makes and closes instances; what is still alive when the interpreter ends is closed then."""

    def __init__(
        self,
        factory: Callable[..., Any],
        name: str,
        isolation: Isolation,
        step_timeout: float,
        config: PoolConfig,
    ) -> None:
        if config.options:
            factory = partial(checked_options(factory, name, config.options), **config.options)
        elif isinstance(factory, type):
            _refuse_lacking(factory, name)
        if config.memory_mb is not None and isolation != "process":
            raise ConfigError(
                f"the environment {name!r}: memory_mb bounds the process of an instance, and with isolation = "
                f'"{isolation}" it has none of its own: set isolation = "process"'
            )
        if isolation == "process":
            factory = partial(
                IsolatedEnv,
                factory,
                name,
                start_timeout=config.reset_timeout,
                call_timeout=step_timeout,
                close_timeout=config.close_timeout,
                memory_mb=config.memory_mb,
            )
        self._factory, self._name, self._isolation, self._config = factory, name, isolation, config
        self._living: set[Instance] = set()
        self.created = 0
        self.closed = 0
        self.failures = 0
        _factories.add(self)

    async def make(self) -> Instance:
        """A new instance; a factory that fails is tried again."""
        attempt = 0
        while True:
            attempt += 1
            has_thread = self._isolation != "none"
            thread = ThreadExecutor(1, name=f"env-{self._name}", keep_idle=True) if has_thread else None
            try:
                env = as_env(await self._build(thread or shared_threads()), self._name)
                break
            except BaseException as error:
                if thread is not None:
                    await thread.close()
                if not isinstance(error, Exception):
                    raise
                self.failures += 1
                if not isinstance(error, LudusError):
                    log_once(_log, f"making the environment {self._name!r}", error)
                if self._config.gives_up(attempt, error):
                    raise
        set_own_thread(env, thread)
        instance = Instance(env, time.monotonic(), thread=thread)
        self._living.add(instance)
        self.created += 1
        return instance

    async def _build(self, threads: ThreadExecutor) -> Any:
        if inspect.iscoroutinefunction(self._factory):
            return await call_env(self._factory, timeout=self._config.reset_timeout)
        is_wanted, guard, built = True, threading.Lock(), list[Any]()

        def build() -> Any:
            env = self._factory()
            with guard:
                if is_wanted:
                    built.append(env)
                    return env
            _close_now(env)  # it came after its deadline, and no caller has it
            return None

        try:
            made = await threads.run(build, timeout=self._config.reset_timeout)
            if inspect.isawaitable(made):
                async with asyncio.timeout(self._config.reset_timeout):
                    made = await made
            return made
        except BaseException:
            with guard:
                is_wanted = False
            if built:  # cancelled when it was there and not yet handed over
                await threads.run(_close_now, built[0], timeout=self._config.close_timeout)
            raise

    async def is_healthy(self, instance: Instance) -> bool:
        """Whether a used instance may be handed out again."""
        if not is_own(type(instance.env), "is_healthy") or not (instance.uses or instance.has_rested):
            return True
        try:
            good = bool(await call_env(instance.env.is_healthy, timeout=self._config.close_timeout))
        except Exception as error:  # noqa: BLE001 - whatever it raised, it is not healthy
            log_once(_log, f"the health check of the environment {self._name!r}", error)
            good = False
        self.failures += not good
        return good

    async def close(self, instance: Instance) -> None:
        """Close an instance, whatever its `close` does; the deadline bounds it."""
        try:
            if (close := setting_of(instance.env, "close")) is not Env.close:
                await call_env(close, timeout=self._config.close_timeout)
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
                thread.join(self._config.close_timeout)


def is_final(error: BaseException) -> bool:
    """Whether another instance would fail in the same way: a wrong setting, or no server at its address."""
    return isinstance(error, ConfigError) or (isinstance(error, InfraError) and not error.replay)


def _close_now(env: Any) -> None:
    with contextlib.suppress(Exception):
        value = env.close()
        if inspect.iscoroutine(value):
            asyncio.run(value)


_factories: weakref.WeakSet[InstanceFactory] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for factory in list(_factories):
        factory.close_at_exit()
