"""Making, judging and closing the instances of one environment, so that none is left behind."""

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
from typing import Any

from ludus.core.failures import LudusError
from ludus.core.user_code import show_once
from ludus.envs.env import Env, call_env

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Instance:
    """One environment, its age and its use."""

    env: Any
    born: float
    uses: int = 0
    expiry: asyncio.TimerHandle | None = None


class Workshop:
    """Makes and closes instances; what is still alive when the interpreter ends is closed then."""

    def __init__(
        self,
        factory: Callable[[], Any],
        name: str,
        make_timeout: float | None,
        close_timeout: float,
        retries: int,
    ) -> None:
        self._factory = factory
        self._name = name
        self._make_timeout, self._close_timeout = make_timeout, close_timeout
        self._retries = retries
        self._living: set[Instance] = set()
        self.created = 0
        self.closed = 0
        self.failures = 0
        _workshops.add(self)

    async def make(self) -> Instance:
        """A new instance; a factory that fails is tried again."""
        attempt = 0
        while True:
            attempt += 1
            try:
                env = await self._build()
                break
            except Exception as error:
                self.failures += 1
                if not isinstance(error, LudusError):
                    show_once(_log, f"making the environment {self._name!r}", error)
                if attempt > self._retries:
                    raise
        instance = Instance(env, time.monotonic())
        self._living.add(instance)
        self.created += 1
        return instance

    async def _build(self) -> Any:
        if inspect.iscoroutinefunction(self._factory):
            return await call_env(self._factory, timeout=self._make_timeout)
        is_wanted, guard = True, threading.Lock()

        def build() -> Any:
            env = self._factory()
            with guard:
                if is_wanted:
                    return env
            _close_now(env)  # it came after its deadline: nobody else knows of it
            return None

        try:
            return await call_env(build, timeout=self._make_timeout)
        except BaseException:
            with guard:
                is_wanted = False
            raise

    async def is_healthy(self, instance: Instance) -> bool:
        """Whether a used instance may be handed out again."""
        check = getattr(instance.env, "is_healthy", None)
        is_own = getattr(type(instance.env), "is_healthy", None) is not Env.is_healthy
        if not instance.uses or check is None or not is_own:
            return True
        try:
            good = bool(await call_env(check, timeout=self._close_timeout))
        except Exception as error:  # noqa: BLE001 - whatever it raised, it is not healthy
            show_once(_log, f"the health check of the environment {self._name!r}", error)
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
            show_once(_log, f"closing the environment {self._name!r}", error)
        finally:
            self._living.discard(instance)
            self.closed += 1

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


def _close_now(env: Any) -> None:
    with contextlib.suppress(Exception):
        value = env.close() if hasattr(env, "close") else None
        if inspect.iscoroutine(value):
            asyncio.run(value)


_workshops: weakref.WeakSet[Workshop] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for workshop in list(_workshops):
        workshop.close_at_exit()
