"""An environment in a process of its own, behind a stand-in that is used like the environment itself.

A crash, a hang or a leak of the environment takes its process along and nothing else: the stand-in raises an
`InfraError` at the boundary ENV, the pool replaces the instance, and the episode is played again. The process,
with everything it started, is killed when the instance is closed, and ends with its parent in any case.

Calls travel by pickle, one at a time: the stand-in waits for each answer in the thread that called (the pool
gives each instance a thread of its own). Tools run over there, with their own checks and time limits; only
their schemas, arguments and results travel. Attributes are read from over there too (a reward's `env.opened`):
values must be picklable, and are copies. Nothing can be assigned from here.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from ludus.core.failures import Boundary, CannotFork, ConfigError, InfraError, LudusError, ToolFault
from ludus.core.messages import Json, ToolCall, ToolContext, ToolResult
from ludus.core.task import Task
from ludus.core.user_code import UserError
from ludus.envs.env import (
    Observation,
    Step,
    as_env,
    call_env,
    read_state,
    reset_env,
    setting_of,
    step_env,
    takes_text,
)
from ludus.envs.tools import ForwardedTool, tools_of
from ludus.remote import process_worker
from ludus.remote.processes import CallWorker, NotPicklable
from ludus.remote.threads import (
    DeadlineExceeded,
    ThreadExecutor,
    WorkerError,
    set_own_thread,
)
from ludus.tools import FunctionTool, LocalTools, Tool

# In our process -------------------------------------------------------------------------------------


class EnvRaised(Exception):
    """An environment raised something in its process; the text says what and where."""


class EnvAttributeError(AttributeError):
    """An attribute that the environment in its process does not have."""


class IsolatedEnv:
    """Stands in for an environment that `factory` (importable by name) makes in another process."""

    def __init__(
        self,
        factory: Callable[[], Any],
        name: str = "env",
        *,
        start_timeout: float | None = 60.0,
        call_timeout: float | None = 60.0,
        close_timeout: float = 10.0,
        memory_mb: int | None = None,
    ) -> None:
        """`call_timeout` bounds attributes and methods by name; a pool bounds all other calls."""
        own: dict[str, Any] = {"_name": name, "_call_timeout": call_timeout, "_memory_mb": memory_mb}
        own["_close_timeout"] = close_timeout
        maker = factory.func if isinstance(factory, partial) else factory  # a class with options
        own |= {"_kind": maker if isinstance(maker, type) else IsolatedEnv}
        own |= {"_lock": threading.Lock(), "_worker": None, "_ending": "", "_methods": {}}
        vars(self).update(own)
        try:
            data = process_worker.pack_call(_make, (factory, name), {})
        except TypeError as error:
            raise NotPicklable(
                f'the environment {name!r} has isolation = "process", so that another process has to import '
                f"it: {error}"
            ) from error
        vars(self)["_worker"] = CallWorker()
        try:
            made = self._answer(data, "being made", start_timeout, start_timeout)
        except BaseException:
            self._worker.kill()
            raise
        vars(self)["_methods"] = made.pop("methods")
        vars(self).update(made)

    # `isinstance` looks here: tools and rewards that want the environment's class take the stand-in
    __class__ = property(lambda self: self._kind)

    def reset(self, task: Task) -> Observation:
        found: Observation = self._ask("reset", task)
        return found

    def step(self, action: str) -> Step:
        found: Step = self._ask("step", action)
        return found

    def tools(self) -> list[Tool]:
        return [
            ForwardedTool(self, one, partial(self._forwarded, one.name)) for one in self._ask("tools")
        ]

    async def _forwarded(self, name: str, arguments: Any, context: ToolContext) -> ToolResult:
        call = ToolCall(name, arguments)
        found: ToolResult = await call_env(self.call_tool, call, context.episode, context.task)
        return found

    def call_tool(self, call: ToolCall, episode: str, task: Task) -> ToolResult:
        """Run one of its tools."""
        found: ToolResult = self._ask("call_tool", call, episode, task)
        return found

    def available_actions(self) -> Any:
        return self._ask("method", "available_actions", (), {})

    def render(self) -> Any:
        return self._ask("method", "render", (), {})

    def public_state(self) -> Json:
        """Its attributes as JSON, read over there."""
        found: Json = self._ask("state")
        return found

    def is_healthy(self) -> bool:
        """Whether its process lives, has not grown above `memory_mb`, and the environment itself agrees."""
        if not self._worker.is_alive:
            return False
        if self._memory_mb is not None and self.memory_mb() > self._memory_mb:
            return False
        return bool(self._ask("method", "is_healthy", (), {}, timeout=self._call_timeout))

    @property
    def process_id(self) -> int:
        """The process that it lives in."""
        pid: int = self._worker.pid
        return pid

    def memory_mb(self) -> float:
        """Resident memory of its process and of everything that this started."""
        return session_memory_mb(self.process_id)

    def close(self) -> None:
        """Let the environment close itself, and end its process; one that is busy is killed."""
        try:
            if self._worker.is_alive and not self._lock.locked():
                limit = self._close_timeout
                self._ask("method", "close", (), {}, timeout=limit, read_timeout=limit)
        finally:
            self._worker.kill()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or "_methods" not in vars(self):
            raise AttributeError(
                f"the environment lives in another process: its private {name!r} cannot be read from here"
            )
        if name not in self._methods:
            return self._ask("attribute", name, timeout=self._call_timeout)

        def call(*args: Any, **kwargs: Any) -> Any:
            return self._ask("method", name, args, kwargs, timeout=self._call_timeout)

        if not self._methods[name]:
            return call

        async def call_async(*args: Any, **kwargs: Any) -> Any:
            return await asyncio.to_thread(call, *args, **kwargs)

        return call_async

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(
            f"the environment {self._name!r} lives in another process: {name!r} cannot be assigned from here; "
            "give its class a method that does it"
        )

    def __repr__(self) -> str:
        return f"<{self._kind.__name__} in process {self.process_id}>"

    def _ask(
        self, what: str, *args: Any, timeout: float | None = None, read_timeout: float | None = None
    ) -> Any:
        try:
            data = process_worker.pack_call(_perform, (what, *args), {})
        except TypeError as error:
            raise ConfigError(
                f"the environment {self._name!r} lives in another process: {error}"
            ) from error
        named = args[0] if what in ("method", "attribute") else what
        with self._lock:
            return self._answer(data, f"{named!r}", timeout, read_timeout)

    def _answer(self, data: bytes, what: str, timeout: float | None, read_timeout: float | None) -> Any:
        try:
            if self._ending:
                raise WorkerError(self._ending)
            limits = (timeout,) if read_timeout is None else (timeout, read_timeout)
            kind, value = self._worker.call(data, *limits)
        except (WorkerError, DeadlineExceeded) as error:
            # what state it is in is not known: it is not used again
            self._worker.signal()
            vars(self)["_ending"] = str(error)
            message = f"the environment {self._name!r} was lost ({what}): {error}"
            raise InfraError(
                Boundary.ENV, message, retriable=False, replay=True, kind=type(error).__name__
            ) from error
        if kind == "value":
            return value
        if isinstance(value, EnvRaised):
            raise EnvRaised(f"{what}: {value}")
        if isinstance(value, (LudusError, EnvAttributeError)):
            raise value
        raise ConfigError(  # the answer could not be pickled, or the call not be read
            f"the environment {self._name!r} lives in another process, and {what} cannot travel: {value}"
        )


def session_memory_mb(leader: int) -> float:
    """Resident memory of all processes of a session; 0 where there is no /proc."""
    pages = 0
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended
        if int(fields[3]) == leader:
            pages += int(fields[21])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


# In the environment's process -----------------------------------------------------------------------


class _Host:
    """The environment, its thread, and the event loop of its async methods."""

    def __init__(self, factory: Callable[[], Any], name: str) -> None:
        self.name = name
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, name="env-loop", daemon=True).start()
        self.thread = ThreadExecutor(1, name="env", keep_idle=True)
        self.env = as_env(self.run(self._made(factory)), name)
        set_own_thread(self.env, self.thread)
        self.toolset: LocalTools | None = None

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result()

    async def _made(self, factory: Callable[[], Any]) -> Any:
        if inspect.iscoroutinefunction(factory):
            return await factory()
        made = await self.thread.run(factory)
        return await made if inspect.isawaitable(made) else made

    def described(self) -> dict[str, Any]:
        kind = type(self.env)
        names = {name for base in kind.__mro__ for name in vars(base) if not name.startswith("_")}
        found = {name: getattr(kind, name) for name in names}
        methods = {
            name: inspect.iscoroutinefunction(one.function if isinstance(one, FunctionTool) else one)
            for name, one in found.items()
            if callable(one)
        }
        settings = {name: setting_of(self.env, name) for name in ("step_rewards", "show_actions")}
        return {"methods": methods, "takes_text": takes_text(self.env), **settings}

    async def perform(self, what: str, *args: Any) -> Any:
        if what == "reset":
            return await reset_env(self.env, args[0], self.name)
        if what == "step":
            return await step_env(self.env, args[0])
        if what == "tools":
            self.toolset = LocalTools(await tools_of(self.env, self.name))
            return [one.spec for one in self.toolset.tools]
        if what == "call_tool":
            call, episode, task = args
            if self.toolset is None:
                self.toolset = LocalTools(await tools_of(self.env, self.name))
            return await self.toolset.call(call, ToolContext(episode, task, {self.name: self.env}))
        if what == "state":
            return await call_env(read_state, self.env)
        if what == "method":
            name, given, named = args
            return await call_env(getattr(self.env, name), *given, **named)
        value = getattr(self.env, args[0])
        if callable(value):
            raise ConfigError(f"{args[0]!r} is a function, which cannot leave the environment's process")
        return value


_host: _Host | None = None


def _make(factory: Callable[[], Any], name: str) -> Any:
    global _host
    with _portable_errors():
        _host = _Host(factory, name)
        return _host.described()


def _perform(what: str, *args: Any) -> Any:
    host = _host
    assert host is not None
    with _portable_errors():
        return host.run(host.perform(what, *args))


@contextmanager
def _portable_errors() -> Iterator[None]:
    """Errors of user code as text with its place: an exception loses that, and may not pickle at all."""
    try:
        yield
    except (InfraError, ToolFault, CannotFork, ConfigError):
        raise
    except LudusError as error:
        raise ConfigError(str(error)) from None
    except AttributeError as error:
        raise EnvAttributeError(str(UserError.of(error))) from None
    except BaseException as error:  # noqa: BLE001 - whatever the environment raised
        raise EnvRaised(str(UserError.of(error))) from None
