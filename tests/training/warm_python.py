"""Programs in processes of their own that need not import torch again: copies of a Python that has done so.

A program is given as on Python's command line. What it finds is a process like any other (environment, paths,
signals as ever, its standard error in a pipe); it is not started by `exec`, and its interpreter ends at once.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from multiprocessing import forkserver
from multiprocessing.connection import Connection

import pytest

_IMPORTED = [
    "pytest",
    "ludus.cli.options",
    "ludus.training.ranks.worker",
    "ludus.training.ranks.processes",
]


class WarmProcess:
    """What tests use of `subprocess.Popen`."""

    def __init__(self, command: tuple[str, ...], variables: dict[str, str]) -> None:
        context = multiprocessing.get_context("forkserver")
        read, write = os.pipe()
        self.stderr: TextIOWrapper = open(read)  # noqa: PTH123, SIM115 - a pipe
        with Connection(write, readable=False) as told:
            given = (command, {**os.environ, **variables}, sys.path, told)
            self._process = context.Process(target=_run, args=given, daemon=True)
            self._process.start()

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

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """(nothing, its standard error), once it has ended."""
        self.wait(timeout)
        return "", self.stderr.read()

    def send_signal(self, number: signal.Signals) -> None:
        os.kill(self._process.pid or 0, number)

    def kill(self) -> None:
        self._process.kill()

    def close(self) -> None:
        self.kill()
        self.wait()
        self.stderr.close()


@contextmanager
def warm_python() -> Iterator[None]:
    """The process that others are copies of."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(_IMPORTED)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        forkserver.ensure_running()
    yield
    forkserver._forkserver._stop()  # type: ignore[attr-defined]


def _run(
    command: tuple[str, ...], environment: dict[str, str], paths: list[str], told: Connection
) -> None:
    os.dup2(told.fileno(), 2)
    told.close()
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:] = paths
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if command[0] == "-c":
        sys.argv[:] = ["-c", *command[2:]]
        exec(compile(command[1], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv[:] = list(command)
        runpy.run_path(command[0], run_name="__main__")
