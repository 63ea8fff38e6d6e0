"""Programs as agents: a command or a function plays an episode against the model server, with a key of its own.

Who waits for whom. The server listens in the event loop that plays the episodes, from the first episode until
`close`. An episode opens a key, starts its program and waits for it to end, within `timeout`; the program waits
for the server, the server for the engine. Many programs run at once, each in a process group of its own, which
is killed when the episode is over, whatever is left in it. The kernel kills it when this process ends: each
program holds one end of a pipe, and this process alone the other. The kernel is told of a program once asyncio
says that it runs: one that was started within the last milliseconds outlives a SIGKILL of this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import logging
import os
import shlex
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from ludus.chat.api_fields import ApiError
from ludus.core.failures import Aborted, Boundary, ConfigError, InfraError
from ludus.core.task import Task
from ludus.core.trajectory import StopReason
from ludus.core.user_code import error_with_location, log_once
from ludus.remote.client import HttpClient
from ludus.remote.process_worker import kill_group_at_end_of
from ludus.remote.threads import DeadlineExceeded, run_sync
from ludus.rollouts.agent import Agent, ProgramConfig
from ludus.rollouts.episode import Episode
from ludus.sandbox import Limits, SandboxConfig, shared_sandbox
from ludus.serve.model.episodes import (
    CAN_TELL,
    FORWARD_BYTES,
    NO_REWARDS,
    EpisodeService,
    EpisodeSession,
    check_models,
)
from ludus.serve.model.server import ModelServer
from ludus.serve.service import ServerConfig
from ludus.tools.wire import task_to_json

log = logging.getLogger(__name__)

TASK = "LUDUS_TASK"
_MOST_VARIABLE = 100_000
"""Linux takes no environment variable longer than 128 KiB."""
_POLL_SECONDS = 0.01
_HELD_SECONDS = 1.0
"""How long the output of a program that has ended may be held open by what it left behind."""
_SHOWN = 1_500
_PYTHON = ("python", "python3")


class ProgramFailed(InfraError):
    """A program did not do its part: it crashed, hung, or never asked the model anything."""

    def __init__(self, message: str) -> None:
        super().__init__(Boundary.AGENT, message, retriable=False)


@dataclass(frozen=True, slots=True)
class Ended:
    """How a program ended: what it said, and what went wrong, if anything."""

    output: str | None
    problem: str | None = None


@dataclass(slots=True)
class _Serving:
    """The server of this event loop."""

    loop: asyncio.AbstractEventLoop
    service: EpisodeService
    server: ModelServer
    http: HttpClient
    places: asyncio.Semaphore | None


class ProgramAgent(Agent):
    """Plays each episode by a command, or by a function of (task, base_url, key)."""

    def __init__(
        self,
        program: str | Callable[..., Any],
        config: ProgramConfig | None = None,
        sandbox: SandboxConfig | None = None,
    ) -> None:
        self.config = config or ProgramConfig()
        self.reports_rewards = self.config.rewards is not False
        check_models(self.config.models)
        self._function = program if callable(program) else None
        self._argv = [] if callable(program) else _argv(program, self.config.sandbox)
        if self._function is not None and self.config.sandbox:
            raise ConfigError("agent.program.sandbox runs commands; a function runs in this process")
        if self.config.host not in ("127.0.0.1", "::1", "localhost"):
            log.warning("the model server listens on %s: the keys are random", self.config.host)
        self._sandbox = sandbox or SandboxConfig()
        is_process = self._function is None and not self.config.sandbox
        self._is_guarded = CAN_TELL and is_process and self.config.clients == "own"
        self._serving: _Serving | None = None
        self._locks: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()

    async def run(self, episode: Episode) -> None:
        serving = await self._started()
        async with serving.places or contextlib.nullcontext():
            tree = episode.conversations()
            may = self.config.rewards
            session = EpisodeSession(
                tree,
                self.config.models,
                temperature=episode.temperature,
                metrics=serving.service.metrics,
                http=serving.http,
                pixels=serving.service.pixels,
                takes_rewards=not episode.has_rewards if may is None else may,
            )
            if self._is_guarded:
                session.program = asyncio.get_running_loop().create_future()
            serving.service.open(session)
            try:
                ended = await self._play(episode.task, serving.server.address, session)
            finally:
                await serving.service.end(session)
        self._conclude(episode, session, ended)

    def _conclude(self, episode: Episode, session: EpisodeSession, ended: Ended) -> None:
        """How the episode ended. A budget that was used up explains whatever the program did next."""
        last = session.tree.last
        if session.stop is not None and last is not None:
            episode.end(session.stop)
            return
        if ended.problem is not None and session.failure is not None:
            raise session.failure  # infrastructure's: the program only passed it on
        if last is None:
            raise ProgramFailed(ended.problem or "the program ended without a reply of the model")
        if ended.problem is not None:
            if self.config.crash_reward is None:
                raise ProgramFailed(ended.problem)
            session.tree.reward(self.config.crash_reward)
            episode.end(StopReason.TERMINATED)
            return
        said = ended.output if self.config.answer == "stdout" else None
        answer = session.answer if session.answer is not None else said
        episode.answer(answer if answer is not None else last.reply.answer)

    async def _play(self, task: Task, address: str, session: EpisodeSession) -> Ended:
        """Run the program to its end."""
        try:
            async with asyncio.timeout(self.config.timeout) as deadline:
                if self._function is not None:
                    return await self._call(self._function, task, address, session)
                if self.config.sandbox:
                    return await self._run_in_sandbox(task, address, session.key)
                return await self._run(task, address, session)
        except TimeoutError:
            if not deadline.expired():
                raise
            limit = f"agent.program.timeout = {self.config.timeout:g}"
            return Ended(None, f"the program took longer than {limit} seconds")

    async def _call(
        self, function: Callable[..., Any], task: Task, address: str, session: EpisodeSession
    ) -> Ended:
        """A function that returns a text answers with it; a number is the episode's reward."""
        base, key = f"{address}/v1", session.key
        try:
            if inspect.iscoroutinefunction(function):
                found = await function(task, base, key)
            else:
                found = await run_sync(function, task, base, key, timeout=self.config.timeout)
        except DeadlineExceeded:
            return Ended(None, f"the function took longer than {self.config.timeout:g} seconds")
        except (InfraError, Aborted, ConfigError):
            raise
        except Exception as error:  # noqa: BLE001 - what the agent raises ends its episode alone
            log_once(log, "the agent", error)
            return Ended(None, f"the function raised {error_with_location(error)}")
        if isinstance(found, int | float) and not isinstance(found, bool):
            if not session.takes_rewards:
                raise ConfigError(f"the function returned the number {found:g}, a reward; {NO_REWARDS}")
            try:
                session.report({"reward": found})
            except ApiError as error:
                return Ended(None, f"the function returned {found!r:.80}: {error}")
            return Ended(None)
        if not isinstance(found, str | None):
            return Ended(
                None, f"the function returned {found!r:.80}: a text, a number or None is expected"
            )
        return Ended(found)

    async def _run(self, task: Task, address: str, session: EpisodeSession) -> Ended:
        told, key = self._told(task), session.key
        limit = self.config.output_bytes
        watched, lifeline = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                *self._argv,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env={**os.environ, **self._environment(told, address, key)},
                pass_fds=(watched,),
                start_new_session=True,
            )
            kill_group_at_end_of(watched, process.pid)
        except BaseException as error:
            os.close(lifeline)
            if isinstance(error, OSError):
                raise ConfigError(f"agent.loop: {self._argv[0]!r} cannot be run: {error}") from None
            raise
        finally:
            os.close(watched)
        if session.program is not None:
            session.program.set_result(process.pid)
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        printed, complained = bytearray(), bytearray()
        streams = [
            asyncio.ensure_future(_read(process.stdout, printed, limit, keeps_end=False)),
            asyncio.ensure_future(_read(process.stderr, complained, limit, keeps_end=True)),
            asyncio.ensure_future(_write(process.stdin, told.encode())),
        ]
        try:
            await _ended(process)
            _kill_group(process.pid)
            _, held = await asyncio.wait(streams, timeout=_HELD_SECONDS)
            if held:  # by a child that left the group
                _kill_marked(f"LUDUS_KEY={key}")
                await asyncio.wait(held, timeout=_HELD_SECONDS)
        finally:
            for stream in streams:
                stream.cancel()
            _kill_group(process.pid)
            os.close(lifeline)
            await asyncio.shield(_ended(process))
            process._transport.close()  # type: ignore[attr-defined]  # other processes may hold its pipes
        stdout, stderr = (kept.decode("utf-8", "replace") for kept in (printed, complained))
        code = process.returncode
        if code:
            how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
            return Ended(stdout, f"the program {how}: {_tail(stderr) or _tail(stdout) or 'no output'}")
        return Ended(stdout.strip())

    async def _run_in_sandbox(self, task: Task, address: str, key: str) -> Ended:
        told = self._told(task)
        variables = [f"{name}={value}" for name, value in self._environment(told, address, key).items()]
        seconds = min(self.config.timeout, 86_400)
        limits: Limits = self._sandbox.limits.model_copy(update={"wall_seconds": seconds})
        box = shared_sandbox(self._sandbox)
        found = await box.run(["env", *variables, *self._argv], stdin=told, limits=limits)
        if found.ok and not found.exit_code:
            return Ended(found.stdout.strip())
        why = _tail(found.stderr) or found.text()[-_SHOWN:]
        return Ended(found.stdout, f"the program failed in the sandbox ({found.outcome}): {why}")

    def _told(self, task: Task) -> str:
        """The task as a command reads it."""
        shown = {"id", "messages", *self.config.task_fields}
        return json.dumps({name: value for name, value in task_to_json(task).items() if name in shown})

    def _environment(self, task: str, address: str, key: str) -> dict[str, str]:
        found = {
            "OPENAI_BASE_URL": f"{address}/v1",
            "OPENAI_API_KEY": key,
            "ANTHROPIC_BASE_URL": address,
            "ANTHROPIC_API_KEY": key,
            "LUDUS_BASE_URL": address,
            "LUDUS_KEY": key,
            "NO_PROXY": "127.0.0.1,localhost,::1",
            **self.config.env,
        }
        if len(task) < _MOST_VARIABLE:
            found[TASK] = task
        return found

    async def _started(self) -> _Serving:
        """The server of this event loop; started by the first episode."""
        loop = asyncio.get_running_loop()
        if self._serving is not None and self._serving.loop is loop:
            return self._serving
        async with self._locks.setdefault(loop, asyncio.Lock()):
            if self._serving is not None and self._serving.loop is loop:
                return self._serving
            service = EpisodeService()
            config = ServerConfig(
                host=self.config.host, max_body_bytes=64_000_000, held_bytes=256_000_000
            )
            server = ModelServer(service, config)
            await server.start()
            http = HttpClient(purpose="another model", most_bytes=FORWARD_BYTES, limit=0)
            places = asyncio.Semaphore(most) if (most := self.config.max_running) is not None else None
            self._serving = _Serving(loop, service, server, http, places)
            return self._serving

    async def close(self) -> None:
        """Stop the server; the next episode starts another."""
        serving, self._serving = self._serving, None
        if serving is None or serving.loop is not asyncio.get_running_loop():
            return
        await serving.service.close()
        await serving.server.drain_and_stop()
        await serving.http.close()


def _argv(command: str, is_sandboxed: bool) -> list[str]:
    """The words of a command. `python` is the one that runs Ludus; in the sandbox it is the one there."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ConfigError(f"the command {command!r} cannot be read: {error}") from None
    if not words:
        raise ConfigError("the command is empty: write 'command: python my_agent.py'")
    own = words[0] in _PYTHON and not is_sandboxed
    return [sys.executable, *words[1:]] if own else words


async def _ended(process: asyncio.subprocess.Process) -> None:
    """Wait for the program itself. `process.wait()` also waits until no process holds its pipes open."""
    while process.returncode is None:  # noqa: ASYNC110  asyncio tells of it behind its pipes alone
        await asyncio.sleep(_POLL_SECONDS)


def _kill_group(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def _kill_marked(variable: str) -> None:
    """Kill the processes that were started with this environment variable."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # another user's, or gone
                if variable.encode() in (entry / "environ").read_bytes().split(b"\0"):
                    os.kill(int(entry.name), signal.SIGKILL)


async def _read(stream: asyncio.StreamReader, kept: bytearray, limit: int, *, keeps_end: bool) -> None:
    """All that a program prints is taken, and so much of it is kept."""
    while chunk := await stream.read(65_536):
        if keeps_end:
            kept[:] = (kept + chunk)[-limit:]
        else:
            kept += chunk[: limit - len(kept)]


async def _write(stream: asyncio.StreamWriter, data: bytes) -> None:
    with contextlib.suppress(ConnectionError):  # a program need not read it
        stream.write(data)
        await stream.drain()
    stream.close()


def _tail(text: str) -> str:
    return text.strip()[-_SHOWN:]
