"""Many episodes with faults injected: every one is played, failures are typed, nothing is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import json
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterator
from itertools import count, cycle, islice
from pathlib import Path
from typing import Any, ClassVar

import aiohttp
import psutil
import pytest
from browser_site import Site
from world_play import play_expert

from ludus.chat import Renderer, load_format
from ludus.core import Boundary, ByteTokenizer, Message, Task, ToolCall, Trajectory
from ludus.engine import FakeEngine
from ludus.envs import WORLDS, Env, EnvPool, Step, load_env
from ludus.remote.processes import ScratchFolder
from ludus.rewards import Scorer, reward
from ludus.rollouts import Agent, Budgets, Episode, Rollout
from ludus.tools import as_toolset
from odd_env import Odd

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


class Frail(Env):
    """In one of 50 calls it hangs or its connection is lost; in one of 50 resets it cannot start."""

    draw = random.Random(5)

    async def reset(self, task: Task) -> str:
        if self.draw.random() < 0.02:
            raise OSError("cannot start")
        self.count = 0
        return "go"

    async def step(self, action: str) -> Step:
        fate = self.draw.random()
        if fate < 0.01:
            await asyncio.sleep(60)
        if fate < 0.02:
            raise ConnectionError("gone")
        self.count += 1
        return Step(str(self.count), terminated=self.count == 3)


# What all of these share ----------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def faults(
    inject: Callable[[int], Awaitable[str | None]], pause: Callable[[], Awaitable[None]]
) -> AsyncIterator[Counter[str]]:
    """Injects one after each pause; counts them by the name that `inject` gives (None: there was none)."""
    injected: Counter[str] = Counter()

    async def keep_injecting() -> None:
        for number in count():
            await pause()
            if (name := await inject(number)) is not None:
                injected[name] += 1

    injecting = asyncio.create_task(keep_injecting())
    try:
        yield injected
    finally:
        injecting.cancel()
        await asyncio.gather(injecting, return_exceptions=True)


class Progress:
    """A pause for `faults`, of so many episodes: on a busy machine there are not more faults to each."""

    def __init__(self, episodes: int) -> None:
        self._episodes, self._done, self._goes_on = episodes, 0, asyncio.Event()

    def __call__(self, played: Trajectory) -> None:
        self._done += 1
        if self._done % self._episodes == 0:
            self._goes_on.set()

    async def pause(self) -> None:
        await self._goes_on.wait()
        self._goes_on.clear()


def descendants() -> list[psutil.Process]:
    """Living processes that we started, and those that these did."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


class Leftovers:
    """Open files, threads, processes and temporary files that a test has left behind."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def begin(self) -> None:
        """What is there now is none."""
        self._files, self._threads = open_files(), threading.active_count()
        self._processes = {process.pid for process in descendants()}
        self._names = {path.name for path in self._folder.iterdir()}

    def found(self) -> dict[str, Any]:
        gc.collect()  # sockets of py4j that are in cycles
        processes = [p for p in descendants() if p.pid not in self._processes]
        opened = sorted((open_files() - self._files).elements())
        return {
            "files": opened if len(opened) > 2 else [],
            "threads": max(0, threading.active_count() - self._threads - 10),
            "processes": [(p.pid, p.name()) for p in processes],
            "temporary files": sorted({path.name for path in self._folder.iterdir()} - self._names),
        }

    async def none(self) -> None:
        """What was being made when a pool was closed is closed as soon as it is there."""
        end = time.monotonic() + 60
        while any(self.found().values()):
            assert time.monotonic() < end, f"left behind: {self.found()}"
            await asyncio.sleep(0.1)


_SET_CHILD_SUBREAPER = 36


@pytest.fixture
def leftovers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Leftovers]:
    """With a folder for temporary files; orphans of processes that are killed become ours, and are seen."""
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    monkeypatch.setenv("TMPDIR", str(folder))
    monkeypatch.setattr(tempfile, "tempdir", None)
    logging.disable()  # pytest keeps records, they keep tracebacks, and these keep the sockets of py4j
    ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield Leftovers(folder)
    finally:
        logging.disable(logging.NOTSET)
        ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        shutil.rmtree(folder, ignore_errors=True)


# Light environments ---------------------------------------------------------------------------------


@reward(name="success")
def done(env: Any) -> float:
    return float(env.count == 3)


@reward(name="success")
def counted(env: Any) -> float:
    return float(env.count == 3 + 3)


def rollout(pool: EnvPool, scored_by: Any, **settings: Any) -> Rollout:
    said = load_format("hermes").render_action("", [ToolCall("step", {"action": "on"})])
    return Rollout(
        engine=FakeEngine(lambda tokens, sampling, session: f"{said}<|im_end|>", ByteTokenizer()),
        renderer=Renderer(ByteTokenizer(), load_format("hermes")),
        scorer=Scorer([scored_by]),
        tools=as_toolset([]),
        pools={pool.name: pool},
        budgets=Budgets(max_turns=3),
        **settings,
    )


async def test_two_thousand_light_episodes_with_hangs_and_lost_connections() -> None:
    pool = EnvPool(Frail, name="frail", size=32, step_timeout=0.5, max_uses=50, spares=2)
    playing = rollout(pool, done, attempts=4, max_in_flight=32, retries=2)
    tasks = [Task.of("go", id=str(n)) for n in range(500)]
    groups = [group async for group in playing.groups(tasks, seed=1)]
    played = [t for group in groups for t in group.trajectories]
    assert len(played) == 2000
    failures = Counter(t.failure.boundary for t in played if t.failure is not None)
    assert set(failures) <= {Boundary.ENV, Boundary.TOOL} and failures.total() < 20
    assert all(t.rewards == {"success": 1.0} for t in played if t.failure is None)
    assert (pool.stats.in_use, pool.stats.waiting) == (0, 0)
    await pool.close()
    assert pool.stats.created == pool.stats.closed > 32


class Noting(Agent):
    """Notes in which processes environments live."""

    processes: ClassVar[list[int]] = []

    async def run(self, episode: Episode) -> None:
        self.processes.append(episode.context.envs["odd"].process_id)
        await super().run(episode)


def open_files() -> Counter[str]:
    """What they are: sockets, pipes and events without their numbers, others by their paths."""
    found: Counter[str] = Counter()
    for one in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found[str(one.readlink()).partition(":[")[0]] += 1
    return found


async def test_processes_that_are_killed_take_no_episode_along(leftovers: Leftovers) -> None:
    leftovers.begin()
    pool = EnvPool(Odd, name="odd", size=8, step_timeout=30, max_uses=20)
    playing = rollout(pool, counted, attempts=2, max_in_flight=8, retries=3, agent=Noting())
    tasks = [Task.of("go", id=str(n), envs={"odd": {"level": 3}}) for n in range(150)]
    draw = random.Random(3)

    async def kill(number: int) -> str | None:
        recent = Noting.processes[-8:]
        with contextlib.suppress(ProcessLookupError):
            if recent:
                os.kill(draw.choice(recent), signal.SIGKILL)
                return "killed"
        return None

    async with faults(kill, lambda: asyncio.sleep(0.3)) as injected:
        groups = [group async for group in playing.groups(tasks, seed=1)]
    killed = injected.total()
    played = [t for group in groups for t in group.trajectories]
    failed = [t.failure for t in played if t.failure is not None]
    assert len(played) == 300 and killed >= 3
    assert {failure.boundary for failure in failed} <= {Boundary.ENV, Boundary.REWARD}
    assert len(failed) <= killed
    assert all(t.rewards["success"] == 1.0 for t in played if t.failure is None)
    await pool.close()
    assert pool.stats.created == pool.stats.closed
    await leftovers.none()


class Server:
    """`ludus serve env`, two replicas, killed and started again at the same port."""

    def __init__(self, env: str) -> None:
        self.env, self.port, self.starts = env, 0, 0
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "ludus", "serve", "env", self.env]
        options = ["--replicas", "2", "--size", "16", "--step-timeout", "30", "--port", str(self.port)]
        self.process = subprocess.Popen(
            [*command, *options, "--quiet"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        assert self.process.stdout is not None
        told = json.loads(self.process.stdout.readline())
        self.port, self.starts = int(told["address"].rpartition(":")[2]), self.starts + 1

    def replicas(self) -> list[int]:
        found = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return [int(pid) for pid in found.split()]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()

    async def drop(self, number: int) -> str | None:
        """A fault: all of it and one replica in turn."""
        if number % 2:  # its server replaces it
            with contextlib.suppress(ProcessLookupError, IndexError):
                os.kill(self.replicas()[number // 2 % 2], signal.SIGKILL)
                return "replica"
            return None
        await asyncio.to_thread(self.kill)
        await asyncio.sleep(0.3)
        await asyncio.to_thread(self.start)
        return "server"


async def test_a_server_that_is_killed_and_one_whose_steps_hang_take_no_episode_along(
    leftovers: Leftovers,
) -> None:
    leftovers.begin()
    server = Server(f"slow={Path(__file__).parent / 'soak_env.py'}:Slow")
    address = f"http://127.0.0.1:{server.port}"
    pool = EnvPool(load_env(f"{address}/slow"), name="slow", size=32, step_timeout=1.5, max_wait=600)
    playing = rollout(pool, done, attempts=4, max_in_flight=32, retries=8)
    tasks = [Task.of("go", id=str(n)) for n in range(500)]
    async with faults(server.drop, lambda: asyncio.sleep(2.0)) as killed:
        groups = [group async for group in playing.groups(tasks, seed=1)]
    played = [t for group in groups for t in group.trajectories]
    assert len(played) == 2000 and killed["server"] >= 1 and killed["replica"] >= 1
    failures = Counter(t.failure.boundary for t in played if t.failure is not None)
    print(f"\nkilled {dict(killed)}, lost {dict(failures)}, instances {pool.stats.created}")
    assert set(failures) <= {Boundary.ENV, Boundary.SERVER} and failures.total() < 20
    assert all(t.rewards == {"success": 1.0} for t in played if t.failure is None)
    assert (pool.stats.in_use, pool.stats.waiting) == (0, 0)
    await pool.close()
    assert pool.stats.created == pool.stats.closed
    async with aiohttp.ClientSession() as http, asyncio.timeout(60):
        token = Path.home() / ".local" / "state" / "ludus" / "token"
        headers = {"Authorization": f"Bearer {token.read_text().strip()}"}
        while (
            True
        ):  # sessions whose end was not told, because the server was down or the step hung, are few
            async with http.get(f"{address}/healthz", headers=headers) as answer:
                health = await answer.json()
            if health["sessions"] <= 2 and health["alive"] == 2:
                break
            await asyncio.sleep(0.2)
    await asyncio.to_thread(server.kill)  # its replicas end with it
    await leftovers.none()


# Heavy environments: browsers, Java, processes, servers ---------------------------------------------

HEAVY_EPISODES = 300
Fault = tuple[str, Callable[[list[str]], bool], signal.Signals]
"""What it is called, which processes it happens to (by their arguments), and how."""


def is_browser(arguments: list[str]) -> bool:
    is_child = any(one.startswith("--type=") or "crashpad" in one for one in arguments)
    return "chrom" in arguments[0] and not is_child


def is_driver(arguments: list[str]) -> bool:
    return "run-driver" in arguments


def is_java(arguments: list[str]) -> bool:
    return "py4j.GatewayServer" in arguments


def is_worker(arguments: list[str]) -> bool:
    return any("process_worker" in one for one in arguments)


BROWSER_FAULTS: tuple[Fault, ...] = (
    ("browser killed", is_browser, signal.SIGKILL),
    ("browser stopped", is_browser, signal.SIGSTOP),
    ("driver killed", is_driver, signal.SIGKILL),
)
JAVA_FAULTS: tuple[Fault, ...] = (
    ("simulator killed", is_java, signal.SIGKILL),
    ("simulator stopped", is_java, signal.SIGSTOP),
)
WORKER_FAULTS: tuple[Fault, ...] = (
    ("process killed", is_worker, signal.SIGKILL),
    ("process stopped", is_worker, signal.SIGSTOP),
)


def signalling(
    kinds: tuple[Fault, ...], drop: Callable[[int], Awaitable[str | None]] | None = None
) -> Any:
    """These faults in turn, each to a process drawn from those there are; then `drop`, where there is one."""
    draw = random.Random(11)

    async def inject(number: int) -> str | None:
        turn = number % (len(kinds) + (drop is not None))
        if turn == len(kinds):
            assert drop is not None
            return await drop(number // (len(kinds) + 1))
        name, fits, how = kinds[turn]
        found = []
        for process in descendants():
            with contextlib.suppress(psutil.Error, IndexError):
                if fits(process.cmdline()):
                    found.append(process)
        with contextlib.suppress(psutil.Error, IndexError):
            draw.choice(found).send_signal(how)
            return name
        return None

    return inject


def checked(played: list[Trajectory], tasks: list[Task], injected: Counter[str], started: float) -> None:
    """All are there; each has its full score or a typed failure, and these are few."""
    failed = Counter((t.failure.boundary, t.failure.kind) for t in played if t.failure is not None)
    seconds = time.monotonic() - started
    print(f"\n{len(played)} episodes in {seconds:.0f} s, faults {dict(injected)}, lost {dict(failed)}")
    for one in played:
        if one.failure is not None:
            print(f"  {one.task.id}, {one.failure.attempts} attempts: {one.failure.message[:200]}")
    assert Counter(t.task.id for t in played) == Counter(task.id for task in tasks)
    assert {boundary for boundary, _ in failed} <= {Boundary.ENV, Boundary.SERVER, Boundary.REWARD}
    assert all(t.rewards["success"] == 1.0 for t in played if t.failure is None)
    assert failed.total() <= HEAVY_EPISODES // 100


def needs(name: str) -> Any:
    missing = WORLDS[name].missing()
    marks = [pytest.mark.worlds, pytest.mark.skipif(bool(missing), reason=f"{name} needs {missing}")]
    return [*marks, pytest.mark.timeout(1800)]


@pytest.mark.parametrize(
    ("name", "kinds", "settings"),
    [
        pytest.param("miniwob", BROWSER_FAULTS, {}, marks=needs("miniwob")),
        pytest.param("scienceworld", JAVA_FAULTS, {}, marks=needs("scienceworld")),
        pytest.param(
            "alfworld",
            WORKER_FAULTS,
            {"isolation": "process", "max_uses": 20},
            marks=needs("alfworld"),
        ),
    ],
    ids=["miniwob", "scienceworld", "alfworld"],
)
async def test_heavy_worlds_lose_nothing_to_processes_that_die_or_hang(
    name: str,
    kinds: tuple[Fault, ...],
    settings: dict[str, Any],
    leftovers: Leftovers,
) -> None:
    world = WORLDS[name]
    short = [task for task in world.tasks("held_out") if task.metadata.get("subtask") not in LONG]
    for task in short if name == "scienceworld" else ():
        list(world.expert(task))  # worked out before, in a simulator of its own, which stays
    leftovers.begin()
    tasks = list(islice(cycle(short), HEAVY_EPISODES))
    pool = EnvPool(world.factory, name=name, size=8, step_timeout=20, reset_timeout=30, **settings)
    started = time.monotonic()
    progress = Progress(12)
    async with faults(signalling(kinds), progress.pause) as injected:
        played = await play_expert(
            name, tasks, max_turns=200, retries=30, pool=pool, on_episode=progress
        )
    checked(played, tasks, injected, started)
    assert set(injected) == {fault for fault, _, _ in kinds}
    assert pool.stats.created == pool.stats.closed
    await leftovers.none()


LONG = {
    *("change-state", "measure", "power-component", "test-conductivity", "grow", "chemistry-mix"),
    *("identify-life-stages", "inclined-plane", "mendelian-genetics"),
}
"""Sub-tasks of ScienceWorld whose gold paths take many turns."""


def find_the_price(task: Task) -> Generator[ToolCall | None, str, None]:
    from ludus.worlds.browser.tasks import SeenPage, act

    seen = SeenPage((yield None))
    for link in ("Item", "Back", "A lamp"):
        seen = SeenPage((yield act(f"click [{seen.id('link', link)}]")))
    yield act(f"stop [{seen.all('StaticText')[-1].name}]")


@pytest.mark.parametrize("name", [pytest.param("browser", marks=needs("browser"))])
async def test_a_browser_loses_nothing_to_a_site_that_goes_down(name: str, leftovers: Leftovers) -> None:
    leftovers.begin()
    site = Site()
    port = site.server.server_address[1]
    evaluation = {"eval_types": ["string_match"], "reference_answers": {"exact_match": "12.50"}}
    arguments = {"url": f"{site.url}/links", "objective": "The price?", "evaluation": evaluation}
    tasks = [
        Task(f"price-{n}", (Message("system", "Look."),), envs={"browser": arguments})
        for n in range(HEAVY_EPISODES)
    ]

    async def drop(number: int) -> str:
        nonlocal site
        await asyncio.to_thread(site.close)
        await asyncio.sleep(1.5)
        site = Site(port)
        return "site down"

    pool = EnvPool(WORLDS[name].factory, name=name, size=8, reset_retries=4)
    started = time.monotonic()
    progress = Progress(12)
    async with faults(signalling(BROWSER_FAULTS[:2], drop), progress.pause) as injected:
        played = await play_expert(
            name, tasks, retries=30, pool=pool, expert=find_the_price, on_episode=progress
        )
    site.close()
    checked(played, tasks, injected, started)
    assert set(injected) == {"browser killed", "browser stopped", "site down"}
    assert pool.stats.created == pool.stats.closed
    await leftovers.none()


@pytest.mark.parametrize("name", [pytest.param("scienceworld", marks=needs("scienceworld"))])
async def test_a_heavy_world_on_a_server_that_is_dropped(name: str, leftovers: Leftovers) -> None:
    world = WORLDS[name]
    short = [task for task in world.tasks("held_out") if task.metadata["subtask"] not in LONG]
    for task in short:
        list(world.expert(task))
    leftovers.begin()
    tasks = list(islice(cycle(short), HEAVY_EPISODES))
    server = await asyncio.to_thread(Server, name)
    address = f"http://127.0.0.1:{server.port}"
    pool = EnvPool(load_env(f"{address}/{name}"), name=name, size=8, step_timeout=20, max_wait=600)
    started = time.monotonic()
    progress = Progress(12)
    async with faults(signalling(JAVA_FAULTS, server.drop), progress.pause) as injected:
        played = await play_expert(
            name, tasks, max_turns=200, retries=30, pool=pool, on_episode=progress
        )
    checked(played, tasks, injected, started)
    assert {"simulator killed", "simulator stopped", "server", "replica"} == set(injected)
    assert pool.stats.created == pool.stats.closed
    await asyncio.to_thread(server.kill)
    for process in descendants():  # one that we have stopped cannot see that its server is gone
        process.send_signal(signal.SIGCONT)
    await asyncio.sleep(6)  # folders that are younger are left alone
    ScratchFolder("ludus-scienceworld-").remove()  # the next process removes what killed ones have left
    await leftovers.none()
