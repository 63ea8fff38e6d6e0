"""Sessions: state that stays, forks that are independent, ends that leave nothing; and that for a long time."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import itertools
import os
import random
import shutil
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from attacks import host
from attacks.case import INTERNALS
from hypothesis import given, settings
from hypothesis import strategies as st

from ludus.sandbox import (
    CannotFork,
    Limits,
    Outcome,
    Sandbox,
    SandboxConfig,
    SandboxError,
    SandboxUnavailable,
    Session,
    SessionEnded,
    SessionLost,
    Snapshot,
    close_shared_sandboxes,
    shared_sandbox,
)
from ludus.sandbox.processes import isolation

_GUARD_SECONDS = 50.0
_LIMITS = Limits(wall_seconds=20, cpu_seconds=20, memory_mb=256)


in_both = pytest.mark.parametrize("sandbox", ["namespaces", "bare"], indirect=True)
"""Without namespaces too; of the other tests, the slow ones."""


@contextlib.contextmanager
def arranged(arrangement: str) -> Iterator[None]:
    """With namespaces, or as on a machine that refuses them."""
    orders = isolation.arrangements
    host.arrange(bare=arrangement == "bare")
    try:
        yield
    finally:
        isolation.arrangements = orders


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A place for temporary files that nobody else uses, and that every user can enter."""
    place = Path(tempfile.mkdtemp(prefix="ludus-sessions-"))
    place.chmod(0o711)
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    yield place
    shutil.rmtree(place)


@pytest.fixture(params=["namespaces", pytest.param("bare", marks=pytest.mark.slow)])
async def sandbox(request: pytest.FixtureRequest, folder: Path) -> AsyncIterator[Sandbox]:
    """A sandbox after which nothing is left."""
    before = host.belongings()
    with arranged(request.param):
        box = Sandbox(SandboxConfig(workers=2, limits=_LIMITS))
        try:
            await box.start()
        except SandboxUnavailable as refused:
            if request.param == "bare":
                pytest.skip(f"this machine has too little without namespaces: {refused}")
            raise
        async with box, asyncio.timeout(_GUARD_SECONDS):
            yield box
    left = host.belongings()
    assert left.processes <= before.processes
    assert left.descriptors <= before.descriptors
    assert left.mounts <= before.mounts
    assert left.files <= before.files


async def shown(session: Session, code: str) -> object:
    """The value of an expression in a session."""
    said = await session.python(code)
    assert said.ok, said.text()
    return None if said.value is None else ast.literal_eval(said.value)


# --- a model of what sessions are ---


@dataclass
class World:
    """What a session's state must be."""

    variables: dict[str, int] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)
    shell: dict[str, str] = field(default_factory=dict)
    folder: str = "one"

    def copy(self) -> World:
        return World(dict(self.variables), dict(self.files), dict(self.shell), self.folder)


NAMES = st.sampled_from(["name", "code", "x", "path2"])
WHICH = st.integers(0, 5)
STEPS = st.one_of(
    st.tuples(st.just("variable"), WHICH, NAMES, st.integers(-5, 5)),
    st.tuples(st.just("file"), WHICH, NAMES, st.text("ab\n é", max_size=8)),
    st.tuples(st.just("shell"), WHICH, NAMES, st.text("ab $'\"\\", max_size=8)),
    st.tuples(st.just("folder"), WHICH, st.sampled_from(["one", "two"])),
    st.tuples(st.just("fork"), WHICH),
    st.tuples(st.just("snapshot"), WHICH),
    st.tuples(st.just("restore"), WHICH),
    st.tuples(st.just("crash"), WHICH),
    st.tuples(st.just("close"), WHICH),
)


class Tree:
    """Sessions and snapshots beside the model of each."""

    def __init__(self) -> None:
        self.sessions: list[tuple[Session, World]] = []
        self.snapshots: list[tuple[Snapshot, World]] = []

    async def begin(self, sandbox: Sandbox) -> None:
        session = await sandbox.session()
        await session.shell("mkdir one two; cd one; base=$(dirname $PWD)")
        await session.python("import os; base = os.getcwd(); os.chdir('one')")
        self.sessions.append((session, World()))

    async def step(self, sandbox: Sandbox, kind: str, which: int, *rest: object) -> None:
        if not self.sessions:
            await self.begin(sandbox)
        place = which % len(self.sessions)
        session, world = self.sessions[place]
        if kind == "variable":
            await session.python(f"{rest[0]} = {rest[1]}")
            world.variables[str(rest[0])] = int(str(rest[1]))
        elif kind == "file":
            await session.write(f"{rest[0]}.txt", str(rest[1]))
            world.files[f"{world.folder}/{rest[0]}.txt"] = str(rest[1])
        elif kind == "shell":
            await session.shell(f"IFS= read -r {rest[0]}", stdin=f"{rest[1]}\n")
            world.shell[str(rest[0])] = str(rest[1])
        elif kind == "folder":
            await session.python(f"os.chdir('../{rest[0]}')")
            await session.shell(f"cd ../{rest[0]}")
            world.folder = str(rest[0])
        elif kind == "fork":
            self.sessions.append((await session.fork(), world.copy()))
        elif kind == "snapshot":
            self.snapshots.append((await session.snapshot(), world.copy()))
        elif kind == "restore" and self.snapshots:
            snapshot, then = self.snapshots[which % len(self.snapshots)]
            self.sessions.append((await snapshot.restore(), then.copy()))
        elif kind == "crash":
            said = await session.python("os._exit(3)")
            assert said.lost
            await session.close()
            del self.sessions[place]
        elif kind == "close":
            await session.close()
            del self.sessions[place]

    async def compare(self) -> None:
        """Every living session is exactly what the model says."""
        for session, world in self.sessions:
            names = [name for name in ("name", "code", "x", "path2") if name in world.variables]
            assert await shown(session, f"{{n: globals().get(n) for n in {names!r}}}") == {
                name: world.variables[name] for name in names
            }
            assert await shown(session, "os.path.basename(os.getcwd())") == world.folder
            found = await shown(
                session,
                "{os.path.join(d, n): open(os.path.join('..', d, n), newline='').read()"
                " for d in ('one', 'two') for n in os.listdir(os.path.join('..', d))}",
            )
            assert found == world.files
            for name, value in world.shell.items():
                said = await session.shell(f'printf "%s" "${name}"')
                assert said.stdout == value, (name, value)
            assert (await session.shell("basename $PWD")).stdout.strip() == world.folder

    async def end(self) -> None:
        for thing, _ in (*self.snapshots, *self.sessions):
            await thing.close()


@pytest.mark.parametrize("arrangement", ["namespaces", "bare"])
@settings(max_examples=6)
@given(steps=st.lists(STEPS, min_size=5, max_size=14))
def test_sessions_are_what_the_model_says(arrangement: str, steps: list[tuple[object, ...]]) -> None:
    async def run() -> None:
        async with (
            asyncio.timeout(_GUARD_SECONDS),
            Sandbox(SandboxConfig(workers=1, limits=_LIMITS)) as box,
        ):
            tree = Tree()
            await tree.begin(box)
            for kind, which, *rest in steps:
                await tree.step(box, str(kind), int(str(which)), *rest)
            await tree.compare()
            await tree.end()
            assert box.alive == 0

    with arranged(arrangement):
        asyncio.run(run())


# --- single properties ---


@in_both
@pytest.mark.parametrize("closing", ["session", "snapshot", "twice"])
async def test_close_waits_for_all_templates_however_its_process_ended(
    sandbox: Sandbox, closing: str
) -> None:
    """Also where the end of the last one's process is known, and its callbacks have not yet run."""
    session = await sandbox.session()
    for number in range(3):  # three templates, one inside the other
        fork = await session.fork()
        await session.python(f"x = {number}")
        await fork.close()
    last: Session | Snapshot = session
    process = session._guest
    if closing == "snapshot":
        last = await session.snapshot()
        await session.close()
        process = last._template.guest
    process.kill()
    if closing == "twice":
        first = asyncio.ensure_future(session.close())
        await asyncio.sleep(0)
        await session.close()
        assert sandbox.alive == 0
        await first
    while not process.ended.done():  # noqa: ASYNC110 - an event would be set by a callback
        await asyncio.sleep(0)
    await last.close()
    assert sandbox.alive == 0


@in_both
async def test_an_interrupt_keeps_the_state_and_c_code_loses_it(sandbox: Sandbox) -> None:
    session = await sandbox.session()
    await session.python("kept = 41")
    said = await session.python("while True: pass", wall_seconds=0.2)
    assert (said.outcome, said.lost) == (Outcome.TIMEOUT, False)
    said = await session.shell("sleep 100", wall_seconds=0.2)
    assert (said.outcome, said.lost) == (Outcome.TIMEOUT, False)
    assert await shown(session, "kept + 1") == 42
    said = await session.python("10 ** 9 in iter(int, 1)", wall_seconds=0.2)
    assert (said.outcome, said.lost, session.alive) == (Outcome.TIMEOUT, True, False)
    assert "gone" in said.text()
    again = await session.python("kept")
    assert again.lost and not again.ok, "it was the code's doing, so it is told, and nothing is raised"
    await session.close()
    with pytest.raises(SessionLost):
        await session.python("kept")


@in_both
async def test_a_fork_has_everything_and_shares_nothing(sandbox: Sandbox) -> None:
    session = await sandbox.session(files={"given": "0123456789"})
    await session.python(
        "import os, random, sys\nrandom.seed(7)\nos.mkdir('below')\n"
        "reader = open('given')\nreader.read(4)\n"
        "writer = open('log', 'a+')\nwriter.write('start ')\nwriter.flush()\n"
        "os.chdir('below')\nenv = os.environ\nenv['MARK'] = 'set'\nsys.setrecursionlimit(1234)"
    )
    fork = await session.fork()
    for one in (session, fork):
        assert await shown(one, "reader.read(2), os.path.basename(os.getcwd()), env['MARK']") == (
            "45",
            "below",
            "set",
        )
        assert await shown(one, "sys.getrecursionlimit()") == 1234
    assert await shown(session, "random.random()") == await shown(fork, "random.random()")
    for one, word in ((session, "one"), (fork, "two")):
        await one.python(f"writer.write('{word}')\nwriter.flush()\nopen('own-{word}', 'w').close()")
    for one, word in ((session, "one"), (fork, "two")):
        assert await one.read("../log") == f"start {word}".encode()
        assert await shown(one, "os.listdir('.')") == [f"own-{word}"]
    await session.close()
    assert await shown(fork, "reader.read()") == "6789"
    await fork.close()


async def test_preloaded_generators_differ_between_executions_and_not_between_forks() -> None:
    pytest.importorskip("numpy")
    config = SandboxConfig(workers=1, preload=("numpy.random", "ssl"), limits=_LIMITS)
    draw = (
        "import numpy, random, ssl, uuid\n"
        "[float(numpy.random.random()), float(numpy.random.default_rng().random()), random.random(),"
        " ssl.RAND_bytes(8).hex(), str(uuid.uuid4())]"
    )
    async with asyncio.timeout(_GUARD_SECONDS), Sandbox(config) as sandbox:
        runs = [await sandbox.python(draw) for _ in range(4)]
        numbers = [number for said in runs for number in ast.literal_eval(said.value or "")]
        assert len(set(numbers)) == len(numbers) == 20
        session = await sandbox.session()
        await session.python("import numpy, random\nnumpy.random.random()")
        fork = await session.fork()
        both = "float(numpy.random.random()), random.random()"
        assert await shown(session, both) == await shown(fork, both)
        await session.close()
        await fork.close()


async def test_a_fork_of_a_fork_has_the_files_of_its_own_parent(sandbox: Sandbox) -> None:
    session = await sandbox.session()
    fork = await session.fork()
    await session.write("late", "x")
    further = await fork.fork()
    await fork.write("later", "x")
    listed = [await shown(one, "__import__('os').listdir('.')") for one in (session, fork, further)]
    assert listed == [["late"], ["later"], []]
    for one in (session, fork, further):
        await one.close()


REFUSALS = {
    "thread": (
        "import threading, time\nthreading.Thread(target=time.sleep, args=(60,)).start()",
        "thread",
    ),
    "child": ("import subprocess\np = subprocess.Popen(['sleep', '60'])", "child"),
    "pipe": ("import os\nends = os.pipe()", "pipe"),
    "socket": ("import socket\nends = socket.socketpair()", "socket"),
    "deleted file": ("import os\nf = open('x', 'w')\nos.remove('x')", "deleted"),
}


async def test_what_cannot_be_forked_is_refused_by_name(sandbox: Sandbox) -> None:
    for code, word in REFUSALS.values():
        session = await sandbox.session()
        await session.python("kept = 5")
        assert (await session.python(code)).ok
        with pytest.raises(CannotFork) as refusal:
            await session.fork()
        assert word in refusal.value.reason
        with pytest.raises(CannotFork):
            await session.snapshot()
        assert await shown(session, "kept") == 5
        await session.close()


@in_both
async def test_snapshots_outlive_what_they_were_taken_from(sandbox: Sandbox) -> None:
    session = await sandbox.session()
    await session.python("x = 1\nopen('f', 'w').write('first')")
    snapshot = await session.snapshot()
    assert (await session.python("x = 2\nopen('f', 'w').write('second')\nimport os\nos._exit(9)")).lost
    await session.close()
    restored = [await snapshot.restore() for _ in range(5)]
    for number, one in enumerate(restored):
        assert await shown(one, "x, open('f').read()") == (1, "first")
        await one.python(f"x = {number + 10}")
    for number, one in enumerate(restored):
        assert await shown(one, "x") == number + 10
    again = await snapshot.restore()
    await snapshot.close()
    assert await shown(again, "x") == 1
    with pytest.raises(SandboxError):
        await snapshot.restore()
    for one in (*restored, again):
        await one.close()
    assert sandbox.alive == 0


@pytest.mark.parametrize(
    "ending",
    ["import os; os.kill(-1, 9)", "import os; os._exit(1)", "import ctypes; ctypes.string_at(0)"],
)
async def test_a_crash_spares_forks_and_siblings(sandbox: Sandbox, ending: str) -> None:
    assert sandbox.layers is not None
    if "kill(-1" in ending and not sandbox.layers.active["pid namespace"]:
        pytest.skip(
            "without namespaces the branches of a session can signal each other, as docs/sandbox.md says"
        )
    session = await sandbox.session()
    await session.python("x = 1")
    one, two = await session.fork(), await session.fork()
    third = await one.fork()
    await session.python(ending)
    assert await shown(one, "x") == 1
    await one.python(ending)
    assert [await shown(other, "x") for other in (two, third)] == [1, 1]
    for other in (session, one, two, third):
        await other.close()
    assert sandbox.alive == 0


async def test_chains_of_forks_end_with_a_typed_refusal_or_not_at_all(sandbox: Sandbox) -> None:
    chain = [await sandbox.session()]
    await chain[0].python("depth = 0")
    with contextlib.suppress(CannotFork):
        for depth in range(1, 41):
            chain.append(await chain[-1].fork())
            await chain[-1].python(f"depth = {depth}")
    assert len(chain) > 10
    for depth, session in enumerate(chain):
        assert await shown(session, "depth") == depth
    random.Random(0).shuffle(chain)
    for session in chain:
        await session.close()
    assert sandbox.alive == 0


@pytest.mark.timeout(120)
@pytest.mark.parametrize("arrangement", ["namespaces", "bare"])
def test_closing_in_every_order_leaves_nothing(arrangement: str) -> None:
    async def run() -> None:
        async with Sandbox(SandboxConfig(workers=1, limits=_LIMITS)) as box:
            idle = set(host.descendants(os.getpid()))
            orders = list(itertools.permutations(range(4)))
            for order in orders[:: 4 if arrangement == "namespaces" else 8]:
                first = await box.session()
                second = await first.fork()
                snapshot = await first.snapshot()
                fourth = await second.fork()
                things = [first, second, snapshot, fourth]
                for place in order:
                    await things[place].close()
                assert box.alive == 0, order
                await _until(lambda: set(host.descendants(os.getpid())) <= idle)

    with arranged(arrangement):
        asyncio.run(run())


async def test_fifty_sessions_at_once_keep_apart(sandbox: Sandbox) -> None:
    async def life(number: int) -> None:
        async with await sandbox.session() as session:
            await session.python(f"x = {number}")
            await session.write("f", str(number))
            for turn in range(3):
                assert await shown(session, f"x + {turn}, open('f').read()") == (
                    number + turn,
                    str(number),
                )

    await asyncio.gather(*(life(number) for number in range(50)))
    assert sandbox.alive == 0


async def test_cancelled_callers_leave_nothing(sandbox: Sandbox) -> None:
    """Whenever the cancellation comes: while it waits, starts, runs, forks or ends."""
    steady = await sandbox.session()
    await steady.python("x = 1")
    before = host.belongings().descriptors
    dice = random.Random(1)

    async def forked() -> None:
        async with await steady.fork() as fork:
            await fork.python("x")

    for number in range(60):
        coroutine: Awaitable[object] = forked() if number % 3 == 0 else sandbox.python("1 + 1")
        task = asyncio.ensure_future(coroutine)
        await asyncio.sleep(dice.random() * 0.02)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, CannotFork):
            await task
    assert await shown(steady, "x") == 1
    await _until(lambda: host.belongings().descriptors <= before + 4)
    await steady.close()
    await _until(lambda: sandbox.alive == 0)
    assert (await sandbox.python("6 * 7")).value == "42"


async def test_a_cancelled_statement_ends_its_session(sandbox: Sandbox) -> None:
    session = await sandbox.session()
    task = asyncio.create_task(session.python("while True: pass"))
    await asyncio.sleep(0.2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await _until(lambda: not session.alive)
    with pytest.raises(SessionLost):
        await session.python("1")
    await session.close()


async def test_an_exit_is_told_the_same_before_and_after_a_fork(sandbox: Sandbox) -> None:
    session = await sandbox.session()
    fork = await session.fork()
    for one in (session, fork):
        said = await one.python("import os; os._exit(3)")
        assert (said.outcome, said.exit_code, said.lost) == (Outcome.EXITED, 3, True)
        await one.close()


@pytest.mark.parametrize("most", [1, 100])
async def test_closing_the_sandbox_answers_everybody(most: int) -> None:
    sandbox = Sandbox(SandboxConfig(workers=1, limits=_LIMITS, max_sessions=most))
    tasks = [asyncio.create_task(sandbox.python("import time; time.sleep(30)")) for _ in range(8)]
    await _until(lambda: sandbox.alive > 0)
    await sandbox.close()
    async with asyncio.timeout(20):
        results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(result, SandboxError) for result in results), results


async def test_orphans_do_not_use_up_the_processes(sandbox: Sandbox) -> None:
    session = await sandbox.session(limits=_LIMITS.model_copy(update={"processes": 16}))
    for _ in range(20):
        said = await session.shell("(true &); (true &)")
        assert said.ok, said.text()
    await session.close()


@in_both
async def test_what_runs_in_the_background_is_held_to_the_limits(sandbox: Sandbox) -> None:
    session = await sandbox.session(limits=_LIMITS.model_copy(update={"memory_mb": 128}))
    code = """
import os, time
for _ in range(8):
    if os.fork() == 0:
        time.sleep(0.5)
        x = bytearray(100_000_000)
        time.sleep(100)
        os._exit(0)
"""
    assert (await session.python(code)).ok
    await _until(lambda: not session.alive)
    await session.close()


HOSTILE_FORKS = {
    "no number": "p = 'x'",
    "of nobody": "p = 2**70",
    "its own": "p = os.getpid()",
    "of the dead": "p = os.fork()\n    if p == 0: os._exit(0)\n    os.waitpid(p, 0)",
    "of a plain child": "p = os.fork()\n    if p == 0: time.sleep(1000)",
}


@pytest.mark.parametrize("what", list(HOSTILE_FORKS))
async def test_lies_about_a_fork_harm_nobody_else(what: str) -> None:
    """With namespaces alone: where it fails without them, the machine would be harmed."""
    limits = _LIMITS.model_copy(update={"wall_seconds": 2.0})
    async with (
        asyncio.timeout(_GUARD_SECONDS),
        Sandbox(SandboxConfig(workers=1, limits=limits)) as sandbox,
    ):
        other, session = await sandbox.session(), await sandbox.session()
        await other.python("x = 1")
        said = await session.python(
            INTERNALS
            + f"""
def fork(link, *rest):
    import os, time
    frames.close_all(rest[-1])
    {HOSTILE_FORKS[what]}
    frames.send(link, {{"forked": p}})
    return link
assert "_fork" in inside
inside["_fork"] = fork
"""
        )
        assert said.ok, said.text()
        with pytest.raises((CannotFork, SandboxError, SessionEnded)):
            await session.fork()
        await session.close()
        assert await shown(other, "x") == 1
        await other.close()
        assert sandbox.replaced == 0


async def test_a_fork_that_never_answers_is_given_up(sandbox: Sandbox) -> None:
    session = await sandbox.session(limits=_LIMITS.model_copy(update={"wall_seconds": 1.0}))
    said = await session.python(
        INTERNALS
        + "import time\nassert '_reopen_files' in inside\n"
        + "inside['_reopen_files'] = lambda *a: time.sleep(1000)"
    )
    assert said.ok, said.text()
    with pytest.raises((CannotFork, SandboxError, SessionEnded)):
        await session.fork()
    await session.close()
    await _until(lambda: sandbox.alive == 0)


# --- workers that are killed ---


def workers() -> list[int]:
    """The processes of the warm interpreters: our children, and theirs."""
    found: list[int] = []
    for pid in _children(os.getpid()):
        found += [pid, *_children(pid)]
    return found


def _children(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


class Done:
    """How much of the work has been done."""

    def __init__(self) -> None:
        self.count = 0


async def one_shots(sandbox: Sandbox, count: int, at_once: int = 24, done: Done | None = None) -> None:
    """Executions with exactly one right result, whatever happens to the workers."""
    gate = asyncio.Semaphore(at_once)
    done = done or Done()

    async def one(number: int) -> None:
        async with gate:
            said = await sandbox.python(f"print({number} * 3)")
            assert (said.outcome, said.stdout) == (Outcome.OK, f"{number * 3}\n"), said.text()
            done.count += 1

    await asyncio.gather(*(one(number) for number in range(count)))


async def short_sessions(sandbox: Sandbox, count: int, at_once: int = 16) -> int:
    """Sessions that are right or lost, nothing between; how many were lost."""
    gate = asyncio.Semaphore(at_once)

    async def one(number: int) -> int:
        async with gate:
            try:
                async with await sandbox.session() as session:
                    await session.python(f"x = {number}")
                    if number % 5 == 0:
                        async with await session.fork() as fork:
                            assert await shown(fork, "x") == number
                    assert await shown(session, "x") == number
            except SandboxError:
                return 1
            return 0

    return sum(await asyncio.gather(*(one(number) for number in range(count))))


async def killer(sandbox: Sandbox, every_seconds: float, dice: random.Random, done: Done) -> None:
    """Kills workers by chance, but not faster than they get anything done, however slow the machine is."""
    before = -1
    while True:
        await asyncio.sleep(every_seconds)
        found = workers()
        if done.count > before and found and len(sandbox.backend.workers) == sandbox.config.worker_count:
            before = done.count
            with contextlib.suppress(ProcessLookupError):
                os.kill(dice.choice(found), signal.SIGKILL)


@pytest.mark.parametrize("arrangement", ["namespaces", pytest.param("bare", marks=pytest.mark.slow)])
def test_killed_workers_cost_no_execution(arrangement: str) -> None:
    leave_nothing_of_other_tests()
    before = pids_below()

    async def run() -> None:
        async with (
            asyncio.timeout(_GUARD_SECONDS),
            Sandbox(SandboxConfig(workers=2, limits=_LIMITS)) as box,
        ):
            done = Done()
            killing = asyncio.create_task(killer(box, 0.4, random.Random(3), done))
            await asyncio.gather(one_shots(box, 120, done=done), short_sessions(box, 40))
            killing.cancel()
            assert (await box.python("1 + 1")).value == "2"

    with arranged(arrangement):
        asyncio.run(run())
    assert pids_below() <= before


def pids_below() -> set[str]:
    """By number alone: what another test still has may have been killed by chance."""
    return {line.split()[0] for line in host.descendants(os.getpid())}


def leave_nothing_of_other_tests() -> None:
    """Close what tests on event loops that are gone have left shared: workers here are killed by chance."""

    async def close() -> None:
        shared_sandbox()
        await close_shared_sandboxes()

    asyncio.run(close())


async def _until(true: object, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():  # type: ignore[operator]
        assert time.monotonic() < deadline, "it did not come true"
        await asyncio.sleep(0.02)


# --- for a long time ---


def resident_mb(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


@pytest.mark.slow
@pytest.mark.timeout(1800)
async def test_soak() -> None:
    """20,000 executions and 2,000 sessions: memory stays flat; then the same with workers killed at random."""
    before = host.belongings()
    async with Sandbox(SandboxConfig(workers=2, limits=_LIMITS)) as box:
        await one_shots(box, 1000)
        await short_sessions(box, 200)
        warm = workers()
        start = [resident_mb(pid) for pid in (os.getpid(), *warm)]
        for _ in range(10):
            await one_shots(box, 1000)
            assert await short_sessions(box, 100) == 0
            assert box.alive == 0
        end = [resident_mb(pid) for pid in (os.getpid(), *warm)]
        assert box.replaced == 0
        grown = [after - first for first, after in zip(start, end, strict=True)]
        assert max(grown) < 8.0, f"megabytes more in host and workers: {grown}"
        done = Done()
        killing = asyncio.create_task(killer(box, 2.0, random.Random(5), done))
        for _ in range(9):
            await one_shots(box, 1000, done=done)
            await short_sessions(box, 100)
        killing.cancel()
        assert box.replaced > 0
        await one_shots(box, 1000)
        assert await short_sessions(box, 100) == 0
        assert resident_mb(os.getpid()) - start[0] < 16.0
        await _until(lambda: box.alive == 0)
    left = host.belongings()
    assert left.processes <= before.processes
    assert left.descriptors <= before.descriptors
    assert left.threads <= before.threads
