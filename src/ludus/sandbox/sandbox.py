"""The sandbox: one way to run code, whatever backend its config names, and what a backend gives: sessions.

`Sandbox` is what callers use. A backend is a `SandboxBackend` whose `session` makes a `Session`, a private
environment in which code runs, turn after turn; `processes/` and `containers/` have those of Ludus.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal, ParamSpec, Self, TypeVar

from ludus.core.failures import CannotFork, ConfigError, LudusError
from ludus.core.messages import released_slot
from ludus.sandbox.config import BACKENDS, Limits, SandboxConfig, SandboxError
from ludus.sandbox.exchange import Execution

Files = Mapping[str, bytes | str]


class ClosedAtExit(ABC):
    """An asynchronous context manager whose exit is `close`."""

    @abstractmethod
    async def close(self) -> None: ...

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class Session(ClosedAtExit):
    """Python, a shell and files in one private environment, of any backend. Made by `Sandbox.session`.

    What its code does, beyond every limit, is an `Execution`. Where the environment itself fails, `SessionLost`
    is raised; a file request in a session that its code has ended raises `SessionEnded`.
    """

    limits: Limits
    on_close: Callable[[], None] | None = None
    """Called when it has been closed."""
    closed = False
    """Whether it was closed from outside."""
    _closing: asyncio.Task[None] | None = None

    @property
    @abstractmethod
    def alive(self) -> bool:
        """Whether it can still run code."""

    @property
    @abstractmethod
    def was_ended_inside(self) -> bool:
        """Whether the code in it ended it or exceeded a limit: the model's fault, not an infrastructure
        failure."""

    @abstractmethod
    async def python(
        self, code: str, *, stdin: str = "", wall_seconds: float | None = None
    ) -> Execution:
        """Run Python statements; variables and imports stay for the next ones."""

    @abstractmethod
    async def shell(
        self, command: str, *, stdin: str = "", wall_seconds: float | None = None
    ) -> Execution:
        """Run a bash command; its working directory, variables and functions stay for the next ones."""

    @abstractmethod
    async def run(
        self, argv: Sequence[str], *, stdin: str = "", wall_seconds: float | None = None
    ) -> Execution:
        """Run a program in the session's files; nothing of it stays but what it wrote there."""

    @abstractmethod
    async def write(self, path: str, data: bytes | str) -> None:
        """Write a file, relative to the working directory; folders are made. `OSError` as usual."""

    @abstractmethod
    async def read(self, path: str, *, max_bytes: int = 1_000_000) -> bytes:
        """The first `max_bytes` of a file. `OSError` as usual."""

    @abstractmethod
    async def end(self) -> None:
        """End it with everything that it started. Called once, by `close`."""

    async def fork(self) -> Session:
        """A second live session with the same variables and files. `CannotFork` says what prevents it."""
        raise CannotFork(f"a {type(self).__name__} cannot be duplicated")

    async def snapshot(self) -> Snapshot:
        """The state as it is now, to return to any number of times. `CannotFork` as for `fork`."""
        raise CannotFork(f"a {type(self).__name__} cannot be duplicated")

    async def put(self, files: Files | None) -> None:
        for path, data in (files or {}).items():
            await self.write(path, data)

    async def close(self) -> None:
        """End it with everything that it started, and wait until it is gone; its forks stay alive."""
        if self._closing is None:
            self.closed = True
            self._closing = asyncio.get_running_loop().create_task(self._end())
        await asyncio.shield(self._closing)

    async def _end(self) -> None:
        try:
            await self.end()
        finally:
            if self.on_close is not None:
                self.on_close()


class Snapshot(ClosedAtExit):
    """A session's state at one moment. `close` releases it; sessions restored from it stay alive."""

    @abstractmethod
    async def restore(self) -> Session:
        """A new session that continues from that moment."""


@dataclass(frozen=True)
class Layers:
    """The layers of isolation that hold, and why others do not."""

    active: dict[str, bool]
    """Whether each layer is active."""
    doors: dict[str, str | None] = field(default_factory=dict)
    """Result of a probe for each door: the error that stopped it, or None where it got through."""
    reasons: dict[str, str] = field(default_factory=dict)
    """Why a layer is not active."""
    settings: dict[str, Any] = field(default_factory=dict)
    """The backend's own settings."""

    @property
    def open_doors(self) -> list[str]:
        return [name for name, error in self.doors.items() if error is None]


class SandboxBackend(ABC):
    """Where sessions come from: called with the config that names it (`sandbox.tier`).

    A backend of another package registers itself as those of Ludus do, by an entry point:

        [project.entry-points."ludus.sandboxes"]
        e2b = "our_package.e2b:E2bBackend"
    """

    def __init__(self, config: SandboxConfig) -> None:
        self.config = config
        self.sessions: set[Session] = set()
        """Those that `open` has made and that are not closed."""
        self._capacity = asyncio.Semaphore(config.max_sessions)

    replaced = 0
    """How many of its workers died and were replaced."""

    @abstractmethod
    async def start(self) -> Layers:
        """Get ready, once, before the first session. `SandboxUnavailable` says what is missing."""

    @abstractmethod
    async def session(self, limits: Limits, image: str | None) -> Session:
        """A new session, of `image` where that is given. `SandboxError` is an infrastructure failure."""

    async def close(self) -> None:
        """End everything, and wait until it is gone."""
        await asyncio.gather(*(session.close() for session in list(self.sessions)))

    def abandon(self) -> None:  # noqa: B027 - optional
        """End everything without an event loop: it is closed, or the interpreter is about to exit."""

    @property
    def alive(self) -> int:
        """How many sessions and executions there are now."""
        return len(self.sessions)

    async def open(self, limits: Limits, image: str | None) -> Session:
        """A session, once fewer than `max_sessions` are alive."""
        with released_slot() if self._capacity.locked() else contextlib.nullcontext():
            await self._capacity.acquire()
        try:
            session = await self.session(limits, image)
        except BaseException:
            self._capacity.release()
            raise

        def closed() -> None:
            self.sessions.discard(session)
            self._capacity.release()

        session.on_close = closed
        self.sessions.add(session)
        return session

    async def once(
        self,
        what: Literal["python", "shell", "run"],
        given: Any,
        stdin: str,
        files: Files | None,
        limits: Limits,
    ) -> Execution:
        """Run code, a command or a program in an environment of its own."""
        async with await self.open(limits, None) as session:
            await session.put(files)
            runs = {"python": session.python, "shell": session.shell, "run": session.run}
            return await runs[what](given, stdin=stdin)


def make_backend(config: SandboxConfig) -> SandboxBackend:
    backend = BACKENDS.load(config.tier)
    if not (isinstance(backend, type) and issubclass(backend, SandboxBackend)):
        raise ConfigError(f"sandbox.tier = {config.tier!r} names {backend!r:.80}, not a SandboxBackend")
    if config.options and backend.__module__.startswith("ludus."):
        raise ConfigError("sandbox.options is for backends of other packages; Ludus' own have none")
    return backend(config)


Made = TypeVar("Made", bound=ClosedAtExit)
P = ParamSpec("P")
_finishing: set[asyncio.Task[Any]] = set()


def finishes(make: Callable[P, Coroutine[Any, Any, Made]]) -> Callable[P, Coroutine[Any, Any, Made]]:
    """Let a method run to its end even if its caller is cancelled; what it makes is closed then."""

    @functools.wraps(make)
    async def shielded(*args: P.args, **kwargs: P.kwargs) -> Made:
        loop = asyncio.get_running_loop()
        task = loop.create_task(make(*args, **kwargs))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            closing = loop.create_task(_closed_when_made(task))
            _finishing.add(closing)
            closing.add_done_callback(_finishing.discard)
            raise

    return shielded


async def _closed_when_made(task: asyncio.Task[Made]) -> None:
    with contextlib.suppress(LudusError):
        await (await task).close()


class Sandbox(ClosedAtExit):
    """Isolated execution of Python, shell commands and programs. Starts at its first use."""

    def __init__(self, config: SandboxConfig | None = None) -> None:
        self.config = config or SandboxConfig()
        self.backend = make_backend(self.config)
        self.layers: Layers | None = None
        """Which layers of isolation are active; None before the start."""
        self.closed = False
        self._starting = asyncio.Lock()

    async def start(self) -> Layers:
        """Start it now rather than at the first use; returns which layers hold."""
        async with self._starting:
            if self.closed:
                raise SandboxError("the sandbox is closed", retriable=False)
            if self.layers is None:
                self.layers = await self.backend.start()
            return self.layers

    @property
    def alive(self) -> int:
        """How many sessions and executions there are now."""
        return self.backend.alive

    @property
    def replaced(self) -> int:
        """How many workers died and were replaced."""
        return self.backend.replaced

    async def python(
        self, code: str, *, stdin: str = "", files: Files | None = None, limits: Limits | None = None
    ) -> Execution:
        """Run a Python program in a fresh environment."""
        await self.start()
        return await self.backend.once("python", code, stdin, files, limits or self.config.limits)

    async def shell(
        self, command: str, *, stdin: str = "", files: Files | None = None, limits: Limits | None = None
    ) -> Execution:
        """Run a bash command in a fresh environment."""
        await self.start()
        return await self.backend.once("shell", command, stdin, files, limits or self.config.limits)

    async def run(
        self,
        argv: Sequence[str],
        *,
        stdin: str = "",
        files: Files | None = None,
        limits: Limits | None = None,
    ) -> Execution:
        """Run a program in a fresh environment."""
        await self.start()
        return await self.backend.once("run", argv, stdin, files, limits or self.config.limits)

    async def session(
        self,
        *,
        files: Files | None = None,
        limits: Limits | None = None,
        image: str | None = None,
    ) -> Session:
        """An environment that keeps its state until it is closed; `image` where it is to be a container."""
        await self.start()
        session = await self.backend.open(limits or self.config.limits, image)
        try:
            await session.put(files)
        except BaseException:
            await session.close()
            raise
        return session

    async def close(self) -> None:
        """End everything, and wait until it is gone."""
        self.closed = True
        async with self._starting:
            await self.backend.close()

    def abandon(self) -> None:
        """End everything without an event loop: it is closed, or the interpreter is about to exit."""
        self.closed = True
        self.backend.abandon()

    async def __aenter__(self) -> Self:
        await self.start()
        return self


_shared: dict[asyncio.AbstractEventLoop, dict[SandboxConfig, Sandbox]] = {}


def shared_sandbox(config: SandboxConfig | None = None) -> Sandbox:
    """The sandbox that everything on this event loop shares, one for each config."""
    loop = asyncio.get_running_loop()
    for other in [other for other in _shared if other.is_closed()]:
        _abandon(_shared.pop(other))
    boxes = _shared.setdefault(loop, {})
    config = config or SandboxConfig()
    if config not in boxes or boxes[config].closed:
        boxes[config] = Sandbox(config)
    return boxes[config]


async def close_shared_sandboxes() -> None:
    """Close those of this event loop; a later `shared_sandbox` starts a new one."""
    boxes = _shared.pop(asyncio.get_running_loop(), {})
    await asyncio.gather(*(box.close() for box in boxes.values()))


def _abandon(boxes: dict[SandboxConfig, Sandbox]) -> None:
    for box in boxes.values():
        box.abandon()


@atexit.register
def _abandon_all() -> None:
    for boxes in _shared.values():
        _abandon(boxes)
