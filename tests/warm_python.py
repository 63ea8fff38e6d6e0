"""Programs in processes of their own that import nothing again: copies of a Python that has done so.

A program is given as on Python's command line. What it finds is a process like any other: its own environment,
paths, working folder, standard output and error, and signals as ever. It is not started by `exec`, its parent
is the process that it is a copy of, and its interpreter ends at once.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import forkserver
from multiprocessing.connection import Connection

import pytest


class WarmProcess:
    """What tests use of `subprocess.Popen`; what the program says is in files that the caller has opened."""

    def __init__(
        self, command: Sequence[str], env: Mapping[str, str], *, stderr: int, stdout: int | None = None
    ) -> None:
        context = multiprocessing.get_context("forkserver")
        files = {1: stdout, 2: stderr}
        told = {number: Connection(os.dup(file)) for number, file in files.items() if file is not None}
        try:
            self._process = context.Process(
                target=_run, args=(tuple(command), dict(env), list(sys.path), told), daemon=True
            )
            self._process.start()
        finally:
            for file in told.values():
                file.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if (code := self._process.exitcode) is None:
            raise subprocess.TimeoutExpired("a warm process", timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


@contextmanager
def warm(*modules: str) -> Iterator[None]:
    """Import these modules once for all programs to come; within another one, that one's go on being used."""
    server = forkserver._forkserver  # type: ignore[attr-defined]
    if server._forkserver_pid is not None:
        yield
        return
    multiprocessing.get_context("forkserver").set_forkserver_preload(["pytest", *modules])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        forkserver.ensure_running()
    yield
    server._stop()


def _run(
    command: tuple[str, ...], env: dict[str, str], paths: list[str], told: dict[int, Connection]
) -> None:
    for number, file in told.items():
        os.dup2(file.fileno(), number)
        file.close()
    os.environ.clear()
    os.environ.update(env)
    sys.path[:] = paths
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    if command[0] == "-c":
        sys.argv[:] = ["-c", *command[2:]]
        exec(compile(command[1], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv[:] = list(command)
        runpy.run_path(command[0], run_name="__main__")
