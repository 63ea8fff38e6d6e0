"""A session: one private environment (interpreter, shell, files) in which code runs, turn after turn."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, ParamSpec, Self, TypeVar

from ludus.core.failures import LudusError
from ludus.sandbox.config import Limits
from ludus.sandbox.guest_io import encode_argument
from ludus.sandbox.result import Execution

if TYPE_CHECKING:
    from ludus.sandbox.process_session import Snapshot


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


class Session(ClosedAtExit):
    """Python, a shell and files in one private environment, of any tier. Made by `Sandbox.session`."""

    limits: Limits

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
    async def fork(self) -> Session:
        """A second live session with the same variables and files. `CannotFork` says what prevents it."""

    @abstractmethod
    async def snapshot(self) -> Snapshot:
        """The state as it is now, to return to any number of times. `CannotFork` as for `fork`."""

    async def put(self, files: Mapping[str, bytes | str] | None) -> None:
        """Write several files."""
        for path, data in (files or {}).items():
            await self.write(path, data)


def checked_argv(argv: Sequence[str]) -> list[str]:
    """The words of a command, NUL and lone surrogates escaped."""
    if isinstance(argv, str | bytes) or not argv:
        raise ValueError(f'argv is a list of words such as ["ls", "-la"], not {argv!r:.60}; see `shell`')
    return [os.fsdecode(encode_argument(word)) for word in argv]
