"""Running functions in worker processes that can be killed.

Who waits for whom. Each running call has a driver thread that talks to one worker over a socket; at most
`max_workers` drivers run, and further calls wait in their queue. A call that passes its deadline, or whose
caller is cancelled, has its worker killed together with everything that the worker started. Workers are new
interpreters (never forks: other threads may hold locks), and they end with this process however it ends.

Functions and arguments travel by pickle, so that a function must be importable by name; one of the main script
makes the worker load that script under another name, as `multiprocessing` does. A worker is as trusted as the
process that started it: it is no place for code that a model wrote.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import fcntl
import os
import pickle
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from ludus.core.failures import ConfigError
from ludus.remote import process_worker, user_log
from ludus.remote.threads import DeadlineExceeded, FunctionExited, ThreadExecutor, WorkerError

T = TypeVar("T")

_START_SECONDS = 120.0
_POLL_SECONDS = 0.25
_LEFT_SECONDS = 5.0
"""A folder that is younger may be one whose process has yet to lock it."""


class NotPicklable(ConfigError):
    """A function, or what it is given, cannot be sent to another process."""


@dataclass(slots=True)
class _Ticket:
    """A call on its way: the worker that has it, which is killed when the caller is gone."""

    worker: CallWorker | None = None
    is_cancelled: bool = False


class ProcessExecutor:
    """Runs importable functions in processes; works from any number of event loops at once."""

    def __init__(self, max_workers: int = 2, *, name: str = "ludus") -> None:
        self.max_workers, self.name = max_workers, name
        self._drivers = ThreadExecutor(max_workers, name=f"{name}-driver")
        self._lock = threading.Lock()
        self._idle: list[CallWorker] = []
        self._busy: set[CallWorker] = set()
        self._closed = False
        weakref.finalize(self, _kill_each, self._idle)
        self.lost = 0
        """How many workers died under a call, their deadline apart."""

    async def run(
        self, function: Callable[..., T], *args: Any, timeout: float | None = None, **kwargs: Any
    ) -> T:
        """The function's result; the deadline counts from when the worker has read the call."""
        try:
            data = process_worker.pack_call(function, args, kwargs)
        except TypeError as error:
            raise NotPicklable(str(error)) from error
        ticket = _Ticket()
        try:
            kind, value = await self._drivers.run(self._drive, data, timeout, ticket)
        except asyncio.CancelledError:
            with self._lock:
                ticket.is_cancelled = True
                if ticket.worker is not None:
                    ticket.worker.signal()
            raise
        if kind == "value":
            result: T = value
            return result
        if kind == "error":
            raise value if isinstance(value, Exception) else FunctionExited(value)
        raise WorkerError(str(value))

    async def close(self) -> None:
        """Kill the workers and refuse new calls."""
        with self._lock:
            self._closed = True
            _kill_each(self._idle)
            for worker in self._busy:
                worker.signal()
        await self._drivers.close()

    def _drive(self, data: bytes, timeout: float | None, ticket: _Ticket) -> tuple[str, Any]:
        worker, is_fit = self._take(ticket), False
        try:
            outcome = worker.call(data, timeout)
            is_fit = True
            return outcome
        except WorkerError:
            self.lost += not ticket.is_cancelled
            raise
        finally:
            with self._lock:
                ticket.worker = None
                self._busy.discard(worker)
                is_fit = is_fit and not ticket.is_cancelled and not self._closed
                if is_fit:
                    self._idle.append(worker)
            if not is_fit:
                worker.kill()

    def _take(self, ticket: _Ticket) -> CallWorker:
        while True:
            with self._lock:
                if self._closed or ticket.is_cancelled:
                    gone = "the call was cancelled" if ticket.is_cancelled else "it is closed"
                    raise WorkerError(f"the executor {self.name!r}: {gone}")
                worker = self._idle.pop() if self._idle else CallWorker()
                if worker.is_alive:
                    self._busy.add(worker)
                    ticket.worker = worker
                    return worker
            worker.kill()


def _kill_each(workers: list[CallWorker]) -> None:
    while workers:
        workers.pop().kill()


class WorkerProcess:
    """A Python process in a session of its own, and our end of a socket to it. It ends with this process."""

    def __init__(
        self, *program: str, stdout: int | None = None, variables: Mapping[str, str] | None = None
    ) -> None:
        """`program` is given the numbers of its socket and of the pipe that `end_with_parent` watches.

        `variables` are added to its environment.
        """
        ours, theirs = socket.socketpair()
        watched, lifeline = os.pipe()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", *program, str(theirs.fileno()), str(watched)],
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                env={**os.environ, **(variables or {})},
                pass_fds=(theirs.fileno(), watched),
                start_new_session=True,
            )
        except OSError as error:
            ours.close()
            os.close(lifeline)
            raise WorkerError(f"a worker process could not be started: {error}") from error
        finally:
            theirs.close()
            os.close(watched)
        self.connection, self._lifeline = ours, lifeline

    @property
    def is_alive(self) -> bool:
        """Asked without reaping the process, so that its group can still be killed safely."""
        if not hasattr(os, "waitid"):
            return self._process.poll() is None
        if self._process.returncode is not None:
            return False
        return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None

    @property
    def pid(self) -> int:
        """Its process id, which is its session's and its process group's, too."""
        return self._process.pid

    def signal(self) -> None:
        """Kill the process group; safe from any thread, and more than once."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def kill(self) -> None:
        """End the process and everything it started."""
        self.signal()
        self._process.wait()
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1

    def ending(self, patience: float) -> str:
        """How it ended; one that lives on after `patience` seconds is killed."""
        deadline = time.monotonic() + patience
        while self.is_alive and time.monotonic() < deadline:
            time.sleep(0.005)
        self.kill()
        code = self._process.returncode
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with status {code}"
        return f"a worker process {how}"


class CallWorker(WorkerProcess):
    """A worker that takes calls by pickle. Used by one driver thread at a time."""

    def __init__(self) -> None:
        if process_worker.is_reading:
            raise WorkerError(
                "a worker process tried to start workers of its own while it imported what it was to run; put "
                'what the script does behind `if __name__ == "__main__":`'
            )
        super().__init__(process_worker.__file__)
        _alive.add(self)
        self.send(pickle.dumps([path for path in sys.path if isinstance(path, str)]))

    def call(
        self, data: bytes, timeout: float | None, read_timeout: float = _START_SECONDS
    ) -> tuple[str, Any]:
        """Make a packed call: ("value", its result), ("error", what it raised) or ("lost", a text).

        `DeadlineExceeded` when that takes longer than `timeout`, counted from when the worker has read the
        call, for which it has `read_timeout`; it is still at it then, and has to be killed.
        """
        self.send(data)
        outcome = self.receive(read_timeout)
        if outcome is None:
            raise WorkerError(f"a worker process read no call within {read_timeout:g} seconds")
        if outcome == "started":
            outcome = self.receive(timeout)
        if outcome is not None and outcome[0] == "logged":
            user_log.add(outcome[1])
            outcome = self.receive(timeout)
        if outcome is None:
            raise DeadlineExceeded(f"no result within {timeout:g} seconds")
        kind, value = outcome
        return kind, value

    def send(self, data: bytes) -> None:
        try:
            process_worker.send(self.connection, data)
        except OSError as error:
            raise WorkerError(self._death_message()) from error

    def receive(self, timeout: float | None) -> Any:
        """The next message, or None when the deadline passes before its first byte is there."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._readable(deadline):
            if deadline is not None and time.monotonic() >= deadline:
                return None
            if not self.is_alive and not self._readable(0.0):
                raise WorkerError(self._death_message())
        try:
            data = process_worker.receive(self.connection)
        except (EOFError, OSError) as error:
            raise WorkerError(self._death_message()) from error
        try:
            return pickle.loads(data)
        except Exception as error:  # noqa: BLE001 - whatever user classes raise while unpickling
            return "lost", f"the result could not be read: {type(error).__name__}: {error}"

    def kill(self) -> None:
        """End it, and release what we hold."""
        super().kill()
        _alive.discard(self)
        self.connection.close()

    def _readable(self, deadline: float | None) -> bool:
        wait = _POLL_SECONDS
        if deadline is not None:
            wait = min(wait, max(0.0, deadline - time.monotonic()))
        poll = select.poll()
        poll.register(self.connection, select.POLLIN)
        return bool(poll.poll(wait * 1000))

    def _death_message(self) -> str:
        return f"{self.ending(1.0)} under its call"


class ScratchFolder:
    """A temporary folder that this process holds. One that a killed process has left is removed by the next
    process that makes a folder of the same prefix."""

    def __init__(self, prefix: str, parent: Path | None = None) -> None:
        self._prefix, parent = prefix, parent or Path(tempfile.gettempdir())
        remove_left_folders(parent, prefix)
        self.path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        lock = os.open(self.path, os.O_RDONLY)  # it ends with the process, however that ends
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._finalizer = weakref.finalize(self, _remove_held, self.path, lock)

    def remove_others(self) -> None:
        """Look again for what killed processes have left: the newest of it was too young at first."""
        remove_left_folders(self.path.parent, self._prefix)

    def remove(self) -> None:
        """Remove it with all that is in it; safe from any thread, and more than once."""
        self._finalizer()


def _remove_held(folder: Path, lock: int) -> None:
    for _ in range(5):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            break
        time.sleep(0.1)  # a process that was killed may still be at its last write
    os.close(lock)


def remove_left_folders(parent: Path, prefix: str) -> None:
    """Remove the scratch folders of this prefix that killed processes have left."""
    for folder in parent.glob(f"{prefix}*"):
        _remove_if_left(folder)


def _remove_if_left(folder: Path) -> None:
    with contextlib.suppress(OSError):  # it is held, gone, or another user's
        if time.time() - folder.stat().st_mtime < _LEFT_SECONDS:
            return
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(lock)


_alive: weakref.WeakSet[CallWorker] = weakref.WeakSet()


@atexit.register
def _kill_all() -> None:
    for worker in list(_alive):
        worker.signal()


_shared: ProcessExecutor | None = None
_shared_lock = threading.Lock()


def shared_processes() -> ProcessExecutor:
    """The executor that everything in this process shares: a worker for each core, two at least."""
    global _shared
    with _shared_lock:
        if _shared is None:
            _shared = ProcessExecutor(max(2, os.cpu_count() or 1), name="ludus-shared")
        return _shared
