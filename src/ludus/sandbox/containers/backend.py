"""Sessions in containers: the tiers docker, podman and kubernetes, by the engine's command line.

A container waits; everything is run in it by the engine's `exec`. A program is stopped inside by `timeout`;
where that does not help, the container is removed, and the session is lost with it.

Whose fault it is: what a program does to its own container (memory, output, its processes) is a result. That
the engine cannot be reached, or that a container ends without having been killed, is an infrastructure failure.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import io
import os
import re
import subprocess
import tarfile
import time
from asyncio.subprocess import Process
from collections.abc import Awaitable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from ludus.sandbox.config import (
    Limits,
    SandboxConfig,
    SandboxError,
    SandboxUnavailable,
    SessionEnded,
    SessionLost,
)
from ludus.sandbox.containers.engines import READY, Command, is_leftover, make_engine, new_name
from ludus.sandbox.containers.execution import (
    CROWDED,
    GRACE_SECONDS,
    KILLED,
    ContainerPython,
    Ran,
    ask,
    end_process,
    enter,
    new_mark,
    spawned,
    with_output,
    wrapped,
)
from ludus.sandbox.exchange import Execution, Outcome, checked_argv, encode_argument, encode_text
from ludus.sandbox.guest.interpreter import SHELL_SCRIPT
from ludus.sandbox.sandbox import (
    Layers,
    SandboxBackend,
    Session,
)

T = TypeVar("T")
_MOST_READ = 64 << 20
_CPU = 128 + 24
_PROBE_SECONDS = 5.0
_WRITE = 'mkdir -p -- "$(dirname -- "$1")" && cat > "$1"'
_OOM = "cat /sys/fs/cgroup/memory.events /sys/fs/cgroup/memory/memory.oom_control 2>/dev/null; true"
_ERRORS = (
    errno.ENOENT, errno.EISDIR, errno.ENOTDIR, errno.EACCES, errno.ENOSPC, errno.EFBIG, errno.EROFS,
    errno.ENAMETOOLONG, errno.ELOOP, errno.EPERM,
)  # fmt: skip


class ContainerBackend(SandboxBackend):
    def __init__(self, config: SandboxConfig) -> None:
        super().__init__(config)
        self.engine = make_engine(config)
        self.version = ""
        self.names: set[str] = set()
        """Containers that have been made and not removed."""
        self._background: set[asyncio.Task[None]] = set()

    async def start(self) -> Layers:
        """See that the engine can be used, and remove what earlier processes of this machine left."""
        tier, program = self.config.tier, self.engine.program
        try:
            said = await ask(self.engine.check(), seconds=60.0)
        except FileNotFoundError:
            raise SandboxUnavailable(
                f'sandbox.tier = "{tier}" needs the program {program[0]!r}, which is not installed; '
                'install it, name it in sandbox.container.program, or use tier = "process"'
            ) from None
        if said.exit_code != 0 or said.stdout.strip() == "no":
            raise SandboxUnavailable(
                f'sandbox.tier = "{tier}": {" ".join(self.engine.check().argv)} failed: {said.text()[:500]}; '
                "is the engine running, and may this user use it?"
            )
        self.version = said.stdout.strip()
        await self._asked_well(self.engine.prepare(), "prepare the namespace")
        names = (await self._asked_well(self.engine.leftovers(), "list containers")).stdout.split()
        if old := [name for name in names if is_leftover(name)]:
            await self._asked_well(self.engine.remove(old), "remove leftover containers")
        active = {f"{self.version or tier}: a container for each session": True}
        active |= {
            "no network": not self.config.network,
            "no capabilities": not self.config.container.sudo,
        }
        reasons = {"no network": "sandbox.network", "no capabilities": "sandbox.container.sudo"}
        return Layers(active, reasons=reasons, settings={"namespaces": False})

    async def session(self, limits: Limits, image: str | None) -> ContainerSession:
        image = image or self.config.container.image
        if image is None:
            raise SandboxUnavailable(
                f'sandbox.tier = "{self.config.tier}" needs an image: set sandbox.container.image, or let '
                "the task name one"
            )
        session = ContainerSession(self, new_name(), limits)
        self.names.add(session.name)
        try:
            await session.open(image)
        except BaseException:
            await session.close()
            raise
        return session

    async def close(self) -> None:
        await super().close()
        await asyncio.gather(*self._background, return_exceptions=True)

    def abandon(self) -> None:
        if self.names:
            with contextlib.suppress(OSError, subprocess.SubprocessError):
                argv = self.engine.remove(sorted(self.names)).argv
                subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=30)
        self.names.clear()

    def later(self, work: Coroutine[Any, Any, None]) -> None:
        """Do something that only `close` waits for."""
        task = asyncio.get_running_loop().create_task(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _asked_well(self, command: Command | None, what: str) -> Execution:
        if command is None:
            return Execution(Outcome.OK)
        said = await ask(command, seconds=60.0)
        if said.exit_code != 0:
            raise SandboxError(f"{self.config.tier} could not {what}: {said.text()[:500]}")
        return said


class ContainerSession(Session):
    """A container: shell, programs, files, and a Python interpreter that starts at its first use."""

    def __init__(self, tier: ContainerBackend, name: str, limits: Limits) -> None:
        self.limits, self.name = limits, name
        self._tier = tier
        self._holder: Process | None = None
        """Where the container lives as long as it: its standard input stays open."""
        self._python: ContainerPython | None = None
        self._lock = asyncio.Lock()
        self._ended: Outcome | None = None
        """Why the container is gone, if that is its code's fault."""
        self._lost = ""
        """Why the container is gone, if the infrastructure is at fault."""
        self._oom_kills = 0
        self._has_run = False
        """Whether any code has run in it."""

    @property
    def alive(self) -> bool:
        return not (self.closed or self._ended or self._lost)

    @property
    def was_ended_inside(self) -> bool:
        return self._ended is not None and not self.closed

    async def open(self, image: str) -> None:
        engine, seconds = self._tier.engine, self._tier.config.container.start_seconds
        command = engine.start(self.name, image, self.limits)
        if not engine.is_attached:
            made = await ask(command, seconds=seconds)
            if made.exit_code != 0:
                raise SandboxError(f"a container of {image} could not be made: {made.text()[:500]}")
            await self._until_ready(image, seconds)
            return
        self._holder = await spawned(command)
        assert self._holder.stdout is not None and self._holder.stderr is not None
        try:
            async with asyncio.timeout(seconds):
                line = await self._holder.stdout.readline()
                if line.decode(errors="replace").strip() != READY:
                    said = (await self._holder.stderr.read(4000)).decode(errors="replace")
                    raise SandboxError(
                        f"a container of {image} could not be started: {' '.join(said.split())[:500] or line!r}"
                    )
        except TimeoutError:
            raise SandboxError(
                f"a container of {image} did not start within {seconds:g} seconds "
                "(sandbox.container.start_seconds)"
            ) from None

    async def _until_ready(self, image: str, seconds: float) -> None:
        command = self._tier.engine.ready(self.name)
        assert command is not None
        deadline = time.monotonic() + seconds
        while True:
            said = await ask(command, seconds=seconds + GRACE_SECONDS)
            if said.exit_code == 0:
                return
            # a job's pod is made a moment after the job
            if "no matching resources" not in said.stderr or time.monotonic() > deadline:
                raise SandboxError(f"a container of {image} could not be started: {said.text()[:500]}")
            await asyncio.sleep(0.5)

    async def python(
        self, code: str, *, stdin: str = "", wall_seconds: float | None = None
    ) -> Execution:
        async with self._lock:
            if gone := self._gone():
                return gone
            if self._python is None or not self._python.alive:
                self._python = ContainerPython(self._tier.engine, self.name, self.limits)
                if failed := await self._python.start():
                    self._python = None
                    return await self._judged(failed) or Execution(
                        Outcome.RAISED, stderr=failed.err.text(), exit_code=failed.status
                    )
            self._has_run = True
            ran, said = await self._guarded(self._python.run(code, stdin, self._wall(wall_seconds)))
            if ran.stopped is Outcome.OUTPUT or not ran.out.is_marked:
                lost = await self._judged(ran)
                if lost is not None:
                    return lost
            return with_output(said, ran)

    async def shell(
        self, command: str, *, stdin: str = "", wall_seconds: float | None = None
    ) -> Execution:
        state = f"/tmp/.{self.name}"  # a container's own folder
        script = ["bash", "--norc", "--noprofile", "-c", SHELL_SCRIPT, "bash", state]
        return await self._run(
            [*script, os.fsdecode(encode_argument(command))], encode_text(stdin), wall_seconds
        )

    async def run(
        self, argv: Sequence[str], *, stdin: str = "", wall_seconds: float | None = None
    ) -> Execution:
        return await self._run(checked_argv(argv), encode_text(stdin), wall_seconds)

    async def write(self, path: str, data: bytes | str) -> None:
        body = encode_text(data) if isinstance(data, str) else data
        await self._file(path, ["bash", "-c", _WRITE, "bash", _operand(path)], body)

    async def read(self, path: str, *, max_bytes: int = 1_000_000) -> bytes:
        if not 0 <= max_bytes <= _MOST_READ:
            raise ValueError(f"max_bytes = {max_bytes} is not between 0 and {_MOST_READ:,}")
        ran = await self._file(
            path, ["head", "-c", str(max_bytes), "--", _operand(path)], b"", max_bytes
        )
        return ran.out.data

    async def put(self, files: Mapping[str, bytes | str] | None) -> None:
        if not files:
            return
        made = io.BytesIO()
        with tarfile.open(fileobj=made, mode="w", format=tarfile.PAX_FORMAT) as archive:
            for path, data in files.items():
                body = encode_text(data) if isinstance(data, str) else data
                info = tarfile.TarInfo(path)
                info.size, info.mode, info.mtime = len(body), 0o644, int(time.time())
                archive.addfile(info, io.BytesIO(body))
        await self._file("the files", ["tar", "-xPf", "-", "--no-same-owner"], made.getvalue())

    async def end(self) -> None:
        await self._remove()
        self._tier.names.discard(self.name)

    async def _remove(self) -> None:
        if self._python is not None:
            await self._python.close()
        with contextlib.suppress(SandboxError, OSError):
            await ask(self._tier.engine.remove([self.name]), seconds=60.0)
        if self._holder is not None:
            await end_process(self._holder)

    def _wall(self, wall_seconds: float | None) -> float:
        wall = self.limits.wall_seconds if wall_seconds is None else wall_seconds
        if wall <= 0:
            raise ValueError(f"wall_seconds = {wall} leaves no time to run in")
        return wall

    async def _run(self, argv: list[str], stdin: bytes, wall_seconds: float | None) -> Execution:
        wall = self._wall(wall_seconds)
        async with self._lock:
            if gone := self._gone():
                return gone
            try:
                ran = await self._guarded(self._entered(argv, stdin, wall, self.limits.output_bytes))
            except OSError as error:  # the command line is too long for the system
                return Execution(Outcome.RAISED, error=f"{argv[0]}: {error.strerror}", exit_code=126)
            lost, self._has_run = await self._judged(ran), True
            return lost if lost is not None else with_output(await self._outcome(ran, wall), ran)

    async def _outcome(self, ran: Ran, wall: float) -> Execution:
        """How a program ended that left the container alive."""
        code = int(ran.out.report) if ran.out.report.isdigit() else ran.status
        if code == KILLED and ran.seconds >= wall:
            return Execution(Outcome.TIMEOUT)
        if code == KILLED and await self._is_out_of_memory():
            return Execution(Outcome.MEMORY, exit_code=code)
        if code == _CPU:
            return Execution(Outcome.CPU)
        if code == KILLED:
            return Execution(Outcome.KILLED, signal="SIGKILL")
        return Execution(Outcome.OK if code == 0 else Outcome.RAISED, exit_code=code)

    async def _judged(self, ran: Ran) -> Execution | None:
        """The result of a program that harmed its container; None where that is as before."""
        if ran.stopped is not None:
            # beyond its deadline: the wrapper had no room to stop it
            if ran.stopped is Outcome.TIMEOUT and await self._is_alive_without_others():
                return with_output(Execution(Outcome.TIMEOUT), ran)
            self._ended = ran.stopped
            await self._remove()
        elif ran.out.is_marked:
            if ran.out.report != CROWDED or not await self._is_alive_without_others():
                return None
            return with_output(Execution(Outcome.PROCESSES), ran)
        else:
            harm = await self._harm(ran)
            if harm is None:
                return None
            if self._ended is None:
                return with_output(Execution(harm), ran)
        return replace(with_output(Execution(self._ended), ran), lost=True)

    async def _harm(self, ran: Ran) -> Outcome | None:
        """How a program that ended without a mark has harmed its container; None if the container is well.

        `SessionLost` where it is not the code's fault: the container ended otherwise than by the kernel, or the
        engine itself does not work.
        """
        if self._holder is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.5):
                    await self._holder.wait()
        ended = self._holder.returncode if self._holder is not None else await self._ending()
        if ended == KILLED:  # only the kernel kills its first process, for memory
            self._ended = Outcome.MEMORY
            return self._ended
        if ended is None:
            probe = await self._guarded(self._entered(["true"], b"", _PROBE_SECONDS, 4_000))
            if probe.out.report == b"0":  # the code killed the wrapper, or there is no such program
                return None
            if probe.status in (126, 127):  # not even bash is left
                self._ended = Outcome.KILLED
                return self._ended
            if await self._is_alive_without_others():
                return Outcome.PROCESSES
        works = (await ask(self._tier.engine.check(), seconds=60.0)).exit_code == 0
        if ended is None and self._has_run and works:
            self._ended = Outcome.PROCESSES
            await self._remove()
            return self._ended
        said = " ".join(ran.err.text().split())[-300:]
        self._lost = f"its container ended or could not be reached (status {ran.status}): {said}"
        raise SessionLost(f"the session has ended: {self._lost}")

    async def _is_alive_without_others(self) -> bool:
        """Whether the container answers again when all of its processes but the first are killed."""
        if self._holder is None or self._holder.stdin is None:
            return False
        for attempt in range(3):
            with contextlib.suppress(ConnectionError):
                self._holder.stdin.write(b"\n")  # its first process kills all others
                await self._holder.stdin.drain()
            await asyncio.sleep(0.2 + attempt)
            probe = await self._guarded(self._entered(["true"], b"", _PROBE_SECONDS, 4_000))
            if probe.out.report == b"0":
                return True
        return False

    async def _ending(self) -> int | None:
        """The status of a container that is not attached, KILLED for its memory; None while it lives."""
        command = self._tier.engine.ending(self.name)
        assert command is not None
        reason = (await ask(command, seconds=30.0)).stdout.strip()
        return (KILLED if "OOMKilled" in reason else 1) if reason else None

    async def _is_out_of_memory(self) -> bool:
        """Whether the kernel has killed in this container since it was asked last."""
        ran = await self._guarded(self._entered(["bash", "-c", _OOM], b"", 5.0, 4_000))
        kills = sum(int(number) for number in re.findall(r"oom_kill (\d{1,9})", ran.out.text()))
        more, self._oom_kills = kills > self._oom_kills, kills
        return more

    async def _file(self, path: str, argv: list[str], body: bytes, most: int = 4_000) -> Ran:
        """A command about a file; `OSError` where it fails."""
        if "\0" in path:
            raise ValueError("embedded null byte")
        async with self._lock:
            if self._gone() is not None:
                raise SessionEnded("the code in the session has ended it")
            words = ["env", "LC_ALL=C", *argv]
            ran = await self._guarded(self._entered(words, body, self.limits.wall_seconds, most))
            if (harmed := await self._judged(ran)) is not None:
                if harmed.lost:
                    raise SessionEnded("the code in the session has ended it")
                raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN), path)
        if ran.out.report != b"0":
            said = ran.err.text()
            number = next((code for code in _ERRORS if os.strerror(code) in said), errno.EIO)
            raise OSError(number, os.strerror(number), path)
        return ran

    def _gone(self) -> Execution | None:
        """The result for a session that its code has ended; `SessionLost` where it is gone otherwise."""
        if self.closed:
            raise SessionLost("the session is closed")
        if self._lost:
            raise SessionLost(f"the session has ended: {self._lost}")
        if self._ended is not None:
            return Execution(self._ended, seconds=self.limits.wall_seconds, lost=True)
        return None

    async def _guarded(self, running: Awaitable[T]) -> T:
        """Await something that runs in the container; a cancelled caller ends it."""
        try:
            return await running
        except asyncio.CancelledError:
            self._lost = "an execution in it was cancelled"
            self._tier.later(self._remove())
            raise

    async def _entered(self, argv: list[str], stdin: bytes, wall: float, limit: int) -> Ran:
        mark = new_mark()
        words = wrapped(argv, mark, wall, self.limits)
        return await enter(self._tier.engine.execute(self.name, words), mark, stdin, wall, limit)


def _operand(path: str) -> str:
    """A path that is no option of a command."""
    return path if path.startswith("/") else f"./{path}"
