"""Programs in a container: by the engine's `exec`, up to a mark, a deadline or a flood of output.

The end of a program is a mark that a wrapper writes after it on both outputs, not their end: a process that it
left in the background may keep them open.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import json
import math
import os
import secrets
import shutil
import signal
import tempfile
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

from ludus.sandbox.config import Limits, SandboxError
from ludus.sandbox.containers.engines import Command, ContainerEngine
from ludus.sandbox.exchange import Execution, Outcome, OutputBuffer, bundle, call, execution_of

GRACE_SECONDS = 10.0
"""How long the engine may take beyond what a program may."""
KILLED = 128 + 9
"""The status of what SIGKILL ended."""
_CHUNK = 1 << 16
_INTERRUPT_SECONDS = 2.0
CROWDED = b"crowded"
# The mark comes after the program, on both outputs; on stdout with its status. Where bash (254) or timeout
# (125) could not fork because the container is full of processes, only commands of bash itself work.
_WRAPPER = """
exec 3>&2 2>/dev/null
mark=$1 wall=$2 cpu=$3 size=$4 most=$5; shift 5
ulimit -t "$cpu" -f "$size"
timeout -s KILL "$wall" "$@" 2>&3 3>&-
status=$?
if [ "$status" = 254 ] || [ "$status" = 125 ]; then
  read -r count < /sys/fs/cgroup/pids.current || read -r count < /sys/fs/cgroup/pids/pids.current
  [ "${count:-0}" -ge "$most" ] && status=crowded
fi
printf '%s%s\\n' "$mark" "$status"; printf '%s\\n' "$mark" >&3
"""
_INTERPRETER = "ludus.sandbox.guest.interpreter"
_PYTHON = bundle(_INTERPRETER, then=call(_INTERPRETER, "serve"))


@dataclass(slots=True)
class Ran:
    out: MarkedOutput
    err: MarkedOutput
    stopped: Outcome | None
    status: int | None
    """The engine's own exit status, where there was no mark."""
    seconds: float


class MarkedOutput(OutputBuffer):
    """An output up to a mark; what comes after it is `report`."""

    def __init__(self, limit: int, mark: bytes) -> None:
        super().__init__(limit)
        self._mark, self._held = mark, b""
        self.is_marked = False

    def feed(self, data: bytes) -> bool:
        """Take what was read; whether the end was seen."""
        self._held += data
        if not self.is_marked:
            before, mark, after = self._held.partition(self._mark)
            self.is_marked = bool(mark)
            if mark:
                self.keep(before)
                self._held = after
            elif (spare := len(self._held) - len(self._mark)) > 0:  # a mark may come in two pieces
                self.keep(self._held[:spare])
                self._held = self._held[spare:]
        return self.is_marked and b"\n" in self._held

    def end(self) -> None:
        """The output ended without a mark."""
        if not self.is_marked:
            self.keep(self._held)
            self._held = b""

    @property
    def report(self) -> bytes:
        return self._held.partition(b"\n")[0] if self.is_marked else b""

    @property
    def data(self) -> bytes:
        """All that was written, where it was within the limit."""
        return bytes(self._head + self._tail)


class ContainerPython:
    """A Python interpreter in a container, whose variables stay."""

    def __init__(self, engine: ContainerEngine, name: str, limits: Limits) -> None:
        self._engine, self._name, self._limits = engine, name, limits
        self._process: Process | None = None
        self._pid = b""

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def start(self) -> Ran | None:
        """Start it; what was said where it could not be started."""
        command = self._engine.execute(self._name, ["python3", "-u", "-c", _PYTHON])
        self._process = process = await spawned(command)
        assert process.stdout is not None and process.stderr is not None
        started = time.monotonic()
        self._pid = (await process.stdout.readline()).strip()
        if self._pid.isdigit():
            return None
        outputs = MarkedOutput(4_000, b"\x1e"), MarkedOutput(4_000, b"\x1e")
        outputs[1].feed(await process.stderr.read(4_000))
        outputs[1].end()
        await end_process(process)
        return Ran(*outputs, None, process.returncode, time.monotonic() - started)

    async def run(self, code: str, stdin: str, wall: float) -> tuple[Ran, Execution]:
        """Run statements; at the deadline they are interrupted, and ended where that does not help."""
        process = self._process
        assert process is not None and process.stdin is not None
        mark = new_mark()
        asked = {"code": code, "stdin": stdin, "mark": mark, "cpu_seconds": self._limits.cpu_seconds}
        started, limit = time.monotonic(), self._limits.output_bytes
        outputs = MarkedOutput(limit, mark.encode()), MarkedOutput(limit, mark.encode())
        with contextlib.suppress(ConnectionError):
            process.stdin.write(json.dumps(asked).encode() + b"\n")
            await process.stdin.drain()
        stopped = await _until_marked(process, outputs, wall)
        for sign in ("INT", "KILL") if stopped is Outcome.TIMEOUT else ():
            words = ["bash", "-c", 'kill -"$1" "$2"', "bash", sign, self._pid.decode()]
            await ask(self._engine.execute(self._name, words), seconds=30.0)
            if (
                await _until_marked(process, outputs, _INTERRUPT_SECONDS) is None
                and outputs[0].is_marked
            ):
                break
        if not outputs[0].is_marked:
            await end_process(process)
        ran = Ran(*outputs, stopped, process.returncode, time.monotonic() - started)
        return ran, _said(ran)

    async def close(self) -> None:
        if self._process is not None:
            await end_process(self._process)


def _said(ran: Ran) -> Execution:
    """The interpreter's report as a result, or how it ended. The code in it may have forged the report."""
    try:
        reported = json.loads(ran.out.report) if ran.out.report else {}
    except ValueError:
        reported = {}
    if isinstance(reported, dict) and reported:
        return execution_of(reported, ran.stopped)
    if ran.stopped is not None:
        return Execution(ran.stopped, error="the interpreter was ended: its variables are gone")
    if ran.status == KILLED:
        return Execution(Outcome.KILLED, signal="SIGKILL")
    return Execution(Outcome.EXITED, exit_code=ran.status)


async def _until_marked(
    process: Process, outputs: tuple[MarkedOutput, MarkedOutput], seconds: float
) -> Outcome | None:
    """Read both outputs until their marks or their ends; why that was given up, if it was."""
    streams = (process.stdout, process.stderr)

    async def read(stream: asyncio.StreamReader | None, output: MarkedOutput) -> None:
        assert stream is not None
        while not output.feed(b""):
            data = await stream.read(_CHUNK)
            if not data:
                output.end()
                return
            output.feed(data)
            if output.is_flooded:
                raise _Flooded

    reading = [asyncio.ensure_future(read(*pair)) for pair in zip(streams, outputs, strict=True)]
    try:
        async with asyncio.timeout(seconds):
            await asyncio.gather(*reading)
    except _Flooded:
        return Outcome.OUTPUT
    except TimeoutError:
        return Outcome.TIMEOUT
    finally:
        for task in reading:
            task.cancel()
        await asyncio.gather(*reading, return_exceptions=True)
    return None


class _Flooded(Exception):
    """A program wrote far more than is kept."""


async def _feed(process: Process, data: bytes) -> None:
    assert process.stdin is not None
    with contextlib.suppress(ConnectionError):
        process.stdin.write(data)
        await process.stdin.drain()
        process.stdin.close()


async def end_process(process: Process) -> None:
    """End a command of the engine and wait for it.

    asyncio reports the end only after both outputs have ended, and stops reading an output that has no reader:
    after a flood of output they have to be read to their ends.
    """
    kill(process.pid)
    streams = [stream for stream in (process.stdout, process.stderr) if stream is not None]
    await asyncio.gather(process.wait(), *(_drain(stream) for stream in streams))


async def _drain(stream: asyncio.StreamReader) -> None:
    while await stream.read(_CHUNK):
        pass


def kill(pid: int) -> None:
    """Kill a child that still runs.

    `Process.kill` would take the status of one that has just ended away from asyncio, which then says 255.
    """
    with contextlib.suppress(ChildProcessError, ProcessLookupError):
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            os.kill(pid, signal.SIGKILL)


def with_output(said: Execution, ran: Ran) -> Execution:
    outputs = (ran.out, ran.err)
    texts = [output.text() for output in outputs]
    return replace(
        said,
        stdout=texts[0],
        stderr=texts[1],
        truncated=any(output.truncated for output in outputs),
        seconds=ran.seconds,
    )


async def enter(command: Command, mark: str, stdin: bytes, wall: float, most_output: int) -> Ran:
    """Run what `wrapped` made, up to its mark, its deadline or a flood of output."""
    started = time.monotonic()
    process = await spawned(command)
    outputs = MarkedOutput(most_output, mark.encode()), MarkedOutput(most_output, mark.encode())
    writing = asyncio.ensure_future(_feed(process, stdin))
    try:
        stopped = await _until_marked(process, outputs, wall + GRACE_SECONDS)
        if not outputs[0].is_marked and stopped is None:
            await process.wait()
    finally:
        writing.cancel()
        await end_process(process)
    return Ran(*outputs, stopped, process.returncode, time.monotonic() - started)


def wrapped(argv: Sequence[str], mark: str, wall: float, limits: Limits) -> list[str]:
    """A program with its limits and its mark."""
    cpu, blocks = math.ceil(limits.cpu_seconds), limits.file_mb * 1024
    bounds = [mark, f"{wall:.3f}", str(cpu), str(blocks), str(limits.processes - 1)]
    return ["bash", "--norc", "--noprofile", "-c", _WRAPPER, "bash", *bounds, *argv]


def new_mark() -> str:
    return f"\x1e{secrets.token_hex(12)}:"


async def ask(command: Command, *, seconds: float) -> Execution:
    """Run a command of the engine itself."""
    process = await spawned(command)
    try:
        async with asyncio.timeout(seconds):
            out, err = await process.communicate(command.stdin)
    except BaseException as error:
        await end_process(process)
        if isinstance(error, TimeoutError):
            raise SandboxError(
                f"{' '.join(command.argv[:6])} did not end within {seconds:g} seconds"
            ) from None
        raise
    texts = [data.decode("utf-8", "backslashreplace") for data in (out, err)]
    outcome = Outcome.OK if process.returncode == 0 else Outcome.RAISED
    return Execution(outcome, texts[0], texts[1], exit_code=process.returncode)


async def spawned(command: Command) -> Process:
    """A command of the engine, out of reach of a terminal's signals, in a folder of its own."""
    folder = _folder()
    return await asyncio.create_subprocess_exec(
        *command.argv, cwd=folder, stdin=PIPE, stdout=PIPE, stderr=PIPE, start_new_session=True
    )


@cache
def _folder() -> str:
    made = tempfile.mkdtemp(prefix="ludus-engine-")
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return made
