"""Runs in the sandbox: evaluates examples with the agent's code, and reports what each of them printed.

What an example should print is not known here, so code that takes this process over gains nothing. Each test
has a process of its own; the repository comes last in the path, so that its files hide no module of the
standard library.
"""

from __future__ import annotations

import io
import json
import os
import signal
import sys
import traceback

_MOST = 20_000
"""Characters that are kept of what an example prints."""


def main() -> None:
    """Read {"seconds": n, "tests": {name: [source, ...]}} from stdin; print {name: [[output, error], ...]}."""
    asked = json.load(sys.stdin)
    sys.dont_write_bytecode = True
    sys.path.append(os.getcwd())  # noqa: PTH109 - only text is wanted
    said = {name: _forked(sources, asked["seconds"]) for name, sources in asked["tests"].items()}
    os.write(1, json.dumps(said).encode())


def _forked(sources: list[str], seconds: int) -> list[list[str | None]]:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _quiet()
        signal.alarm(seconds)
        reported = json.dumps(_evaluated(sources)).encode()
        with os.fdopen(writer, "wb") as pipe:
            pipe.write(reported)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        data = pipe.read(len(sources) * 20 * _MOST)
    os.kill(child, signal.SIGKILL)  # whatever it still does, it has reported
    os.waitpid(child, 0)
    try:
        found = json.loads(data)
    except ValueError:  # it ended without a report
        return []
    return found if isinstance(found, list) else []


def _quiet() -> None:
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(nothing, fd)


def _evaluated(sources: list[str]) -> list[list[str | None]]:
    names: dict[str, object] = {"__name__": "__main__"}
    said: list[list[str | None]] = []
    for source in sources:
        printed, error = io.StringIO(), None
        sys.stdout = printed
        try:
            exec(compile(source, "<test>", "single"), names)
        except BaseException as raised:  # noqa: BLE001 - an example may expect any
            error = traceback.format_exception_only(type(raised), raised)[-1].strip()[:_MOST]
        said.append([printed.getvalue()[:_MOST], error])
    return said
