"""Makes and closes the instances of an environment, for its pool.

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
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from ludus.core.failures import ConfigError, InfraError, LudusError
from ludus.core.user_code import log_once
from ludus.envs.env import Env, Isolation, as_env, call_env
from ludus.envs.isolated import IsolatedEnv
from ludus.remote.threads import ThreadExecutor, set_own_thread, shared_threads

_log = logging.getLogger(__name__)


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
        factory: Callable[[], Any],
        name: str,
        isolation: Isolation,
        *,
        make_timeout: float | None,
        call_timeout: float,
        close_timeout: float,
        retries: int,
        memory_mb: int | None,
    ) -> None:
        if memory_mb is not None and isolation != "process":
            raise ConfigError(
                f"the environment {name!r}: memory_mb bounds the process of an instance, and with isolation = "
                f'"{isolation}" it has none of its own: set isolation = "process"'
            )
        if isolation == "process":
            factory = partial(
                IsolatedEnv,
                factory,
                name,
                start_timeout=make_timeout,
                call_timeout=call_timeout,
                close_timeout=close_timeout,
                memory_mb=memory_mb,
            )
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
    """Whether another instance would fail in the same way: a wrong setting, or no server at its address."""
    return isinstance(error, ConfigError) or (isinstance(error, InfraError) and not error.replay)


def _close_now(env: Any) -> None:
    with contextlib.suppress(Exception):
        value = env.close() if hasattr(env, "close") else None
        if inspect.iscoroutine(value):
            asyncio.run(value)


_factories: weakref.WeakSet[InstanceFactory] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for factory in list(_factories):
        factory.close_at_exit()
