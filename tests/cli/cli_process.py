"""The command line, or a script, as a process of its own, in which Ctrl-C works.

It is forked from a server that has imported what a run needs, which takes seconds and is not what is tested.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PATIENCE = 120.0
"""Seconds, since on a busy machine a process takes long to start."""
COMMAND = "from ludus.cli.main import run; run()"
HEAVY = [
    "ludus.cli.main",
    "ludus.training.api",
    "matplotlib.figure",
    "pyarrow.parquet",
    "transformers.models.llama.modeling_llama",
]


def _run(
    program: str, arguments: list[str], folder: str, environment: dict[str, str], said: str
) -> None:
    for descriptor, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(f"{said}/{name}", os.O_WRONLY | os.O_CREAT), descriptor)
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv, sys.path[0] = ["-c", *arguments], ""
    # A background job of a shell begins with SIGINT ignored, one of nohup with SIGHUP, and both hand that on.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    exec(program, {"__name__": "__main__"})


class Started:
    """A process, and what it has written."""

    def __init__(self, program: str, *arguments: str, **environment: str) -> None:
        context: Any = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(HEAVY)
        self._said = tempfile.TemporaryDirectory()
        given = (program, list(arguments), str(Path.cwd()), environment, self._said.name)
        self._process = context.Process(target=_run, args=given)
        self._process.start()

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self._process.pid, number)

    def wait_until(self, is_so: Callable[[], bool]) -> None:
        """It has to come so far before it ends."""
        deadline = time.monotonic() + PATIENCE
        while not is_so():
            assert self.returncode is None, f"it ended early: {self.communicate()}"
            if time.monotonic() > deadline:
                self.send_signal(signal.SIGKILL)
                raise AssertionError("it did not come so far")
            time.sleep(0.05)

    def communicate(self) -> tuple[str, str]:
        """Wait for its end; its output and what it wrote to stderr."""
        self._process.join(PATIENCE)
        if self.returncode is None:
            self._process.kill()
            raise AssertionError("the process did not end")
        out, err = (Path(self._said.name, name).read_text() for name in ("out", "err"))
        return out, err
