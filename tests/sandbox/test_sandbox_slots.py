"""Slots: prepared namespaces that one-shot programs use one after the other, if nothing of one is left."""

from __future__ import annotations

import ast
import asyncio
import json
import re
import sys
import traceback
import warnings

import pytest

from ludus.sandbox import Execution, Limits, Outcome, Sandbox, SandboxConfig

pytestmark = pytest.mark.skipif(
    sys.prefix.startswith(("/tmp/", "/home/.box/", "/dev/shm/")),
    reason="no slots: this interpreter lies where every session has files of its own",
)
_ONE = SandboxConfig(workers=1, max_starting=1)

# Everything of its surroundings that a program can see and that an earlier one could have changed.
_SEEN = """
import builtins, fcntl, json, os, resource, sys
places = (".", "/tmp", "/dev/shm", "/home/.box/state", "/home/.box")
limits = [resource.prlimit(who, kind) for who in (0, 1) for kind in range(16) if kind != resource.RLIMIT_CPU]
print(json.dumps({
    "files": [sorted(os.listdir(place)) for place in places],
    "modes": [os.stat(place).st_mode for place in places],
    "attributes": [os.listxattr(place) for place in places],
    "times": [os.stat(place).st_mtime > 1e9 and os.stat(place).st_atime > 1e9 for place in places],
    "free": [os.statvfs(".").f_bfree, os.statvfs(".").f_ffree],
    "processes": sorted({name for name in os.listdir("/proc") if name.isdigit()} - {"1", str(os.getpid())}),
    "limits": limits,
    "nice": [os.getpriority(os.PRIO_PROCESS, who) for who in (0, 1)],
    "affinity": [sorted(os.sched_getaffinity(who)) for who in (0, 1)],
    "policy": [os.sched_getscheduler(who) for who in (0, 1)],
    "folder": os.getcwd(), "mask": os.umask(0), "environment": dict(os.environ),
    "builtins": len(dir(builtins)), "leak": "leak" in sys.modules, "path": sys.path,
    "open": sorted(os.listdir("/proc/self/fd")), "input": [fcntl.fcntl(0, 11), fcntl.fcntl(0, fcntl.F_GETFL)],
}))
"""

_CHANGES = {
    "nothing": "pass",
    "a file": "open('leak', 'w').write('x')",
    "a file in /tmp": "open('/tmp/leak', 'w').write('x')",
    "shared memory": "open('/dev/shm/leak', 'w').write('x')",
    "the shell's state": "open('/home/.box/state/shell', 'w').write('leak=1')",
    "a pipe": "import os; os.mkfifo('leak')",
    "a file that came and went": "import os; open('leak', 'w').close(); os.unlink('leak')",
    "a mode": "import os; os.chmod('.', 0o777)",
    "an attribute": "import os; os.setxattr('.', 'user.leak', b'x')",
    "a time": "import os; os.utime('/tmp', (1, 1))",
    "a child": "import os, time\nif os.fork() == 0: time.sleep(100)",
    "a daemon": "import os, time\nif os.fork() == 0:\n  os.setsid(); os.fork(); time.sleep(100)",
    "a limit of the slot": "import resource; resource.prlimit(1, resource.RLIMIT_NOFILE, (20, 20))",
    "no processes for the slot": "import resource; resource.prlimit(1, resource.RLIMIT_NPROC, (0, 0))",
    "a priority of the slot": "import os; os.setpriority(os.PRIO_PROCESS, 1, 19)",
    "a priority of the user": "import os; os.setpriority(os.PRIO_USER, 0, 19)",
    "a policy of the slot": "import os; os.sched_setscheduler(1, os.SCHED_BATCH, os.sched_param(0))",
    "a processor of the slot": "import os; os.sched_setaffinity(1, {max(os.sched_getaffinity(0))})",
    "memory": "import builtins, sys; builtins.leak = 1; sys.modules['leak'] = sys; sys.path.append('leak')",
    "a folder and a mask": "import os; os.chdir('/tmp'); os.umask(0o777); os.environ['LEAK'] = 'x'",
    "no folder for shared memory": "import os; os.rmdir('/home/.box/shm')",
    "another name for a folder": "import os; os.rename('/home/.box/tmp', '/home/.box/x')",
    "no way into the folder": "import os; os.chmod('/home/.box', 0)",
    "its standard input": "import fcntl; fcntl.fcntl(0, 10, 42); fcntl.flock(0, fcntl.LOCK_EX)",
    "closed descriptors": "import os; os.closerange(0, 100)",
    "an end of its own": "import os; os._exit(3)",
    "a crash": "import ctypes; ctypes.string_at(0)",
    "an exception": "raise StopIteration",
}  # fmt: skip


async def seen(sandbox: Sandbox) -> object:
    said = await sandbox.python(_SEEN)
    assert said.ok, said.text()
    return json.loads(said.stdout)


async def needs_slots(sandbox: Sandbox) -> None:
    if not (await sandbox.start()).has_slots:
        pytest.skip("slots need namespaces, which this machine does not give")


async def test_a_slot_that_was_left_clean_is_used_again() -> None:
    async with Sandbox(_ONE) as sandbox:
        await needs_slots(sandbox)
        pids = [(await sandbox.python("import os; os.getpid()")).value for _ in range(4)]
        assert len(set(pids)) == 4, "each program has a process of its own"
        assert [int(str(pid)) for pid in pids] == sorted(int(str(pid)) for pid in pids)
        assert "1" not in pids, "the first process of the namespace runs no program"
        await sandbox.python("open('x', 'w').close()")
        after = (await sandbox.python("import os; os.getpid()")).value
        assert int(str(after)) <= int(str(pids[0])), "one that was changed is not"


async def test_nothing_of_a_program_is_there_for_the_next() -> None:
    async with Sandbox(_ONE) as sandbox:
        await needs_slots(sandbox)
        fresh = await seen(sandbox)
        for name, code in _CHANGES.items():
            said = await sandbox.python(code)
            assert said.outcome in (Outcome.OK, Outcome.RAISED, Outcome.EXITED, Outcome.KILLED), name
            assert await seen(sandbox) == fresh, f"after {name}: {said.text()}"


async def test_each_program_is_charged_for_itself_alone() -> None:
    limits = Limits(cpu_seconds=1, wall_seconds=20)
    async with Sandbox(_ONE) as sandbox:
        busy = "import time\nwhile time.process_time() < 0.3: pass"
        for _ in range(3):
            said = await sandbox.python(busy, limits=limits)
            assert said.ok and said.cpu_seconds is not None and 0.2 < said.cpu_seconds < 0.8, said
        said = await sandbox.python("import os; os.kill(os.getpid(), 9)", limits=limits)
        assert said.outcome is Outcome.KILLED and said.signal == "SIGKILL", said


async def test_free_slots_give_their_places_to_sessions() -> None:
    config = SandboxConfig(workers=1, max_sessions=2)
    async with Sandbox(config) as sandbox:
        await asyncio.gather(*(sandbox.python("1") for _ in range(4)))
        assert sandbox.alive == 0
        async with asyncio.timeout(20):
            async with await sandbox.session() as one, await sandbox.session() as two:
                assert (await one.python("1")).ok and (await two.python("2")).ok
            assert (await sandbox.python("3")).value == "3"


_SEARCH = """
import os, re, sys
marked, frame = re.compile({pattern!r}), sys._getframe()
found = 0
while frame is not None:
    found += sum(bool(marked.search(repr(value).encode())) for value in frame.f_locals.values())
    frame = frame.f_back
memory = os.open("/proc/self/mem", os.O_RDONLY)
own = 0
for line in open("/proc/self/maps").read().splitlines():
    span, mode = line.split()[:2]
    first, last = (int(number, 16) for number in span.split("-"))
    if mode.startswith("rw"):
        try:
            own += len(marked.findall(os.pread(memory, last - first, first)))
        except OSError:
            pass
print(found, own)
"""


@pytest.mark.parametrize(
    "program",
    [
        "# {secret}\n" * 500,
        "print('{secret}' * 100)",
        "'{secret}' * 100",
        "raise ValueError('{secret}' * 10)",
        "import sys; print(input())",
    ],
    ids=["source", "output", "value", "error", "input"],
)
async def test_a_program_finds_nothing_of_the_one_before_in_its_memory(program: str) -> None:
    secret = "the-gold-answer-is-" + "7301"
    pattern = f"{secret[:-1]}[{secret[-1]}]".encode()  # matches the secret, and not itself
    search = _SEARCH.format(pattern=pattern)
    async with Sandbox(_ONE) as box:
        own = await box.python(f"secret = {secret!r}\n{search}")
        assert all(int(count) > 0 for count in own.stdout.split()), "it finds what is there"
        await box.python(program.replace("{secret}", secret), stdin=secret)
        after = await box.python(search + "\nprint(os.getpid())")
    found, pid = after.stdout.splitlines()
    assert found == "0 0"
    assert int(pid) > 3, "it ran in the slot of the program before it"


async def test_a_slot_whose_program_was_stopped_is_not_used_again() -> None:
    limits = Limits(wall_seconds=0.2)
    async with Sandbox(_ONE) as box:
        for _ in range(3):
            stopped = await box.python("import time\nwhile True: time.sleep(1)", limits=limits)
            assert stopped.outcome is Outcome.TIMEOUT
            after = await box.python("import os; os.getpid()", limits=limits)
            assert (after.outcome, after.value) == (Outcome.OK, "2"), "the first program in a fresh slot"


_PROGRAMS = (
    "1 + 1",
    "x = 3\nx * 2",
    "x = 3\nx * 2\n\n   \n",
    "x = '''\nabc\n'''\nx",
    "x = '''\n1 + 1\n'''",
    "'''\n1 + 1\n'''",
    "def f():\n    return 1\n\nf()",
    "def f():\n    return 1\n\n    f()",
    "x = [\n1,\n2\n]",
    "x = (1\n+ 2)",
    "x = 1\n+ 2",
    "x = 1 \\\n+ 2",
    "if True:\n    5",
    "if 0:\n    pass\nelse:\n    y = 2\ny",
    "try:\n    1/0\nexcept ZeroDivisionError:\n    x = 9\nx",
    "x = 1; x + 1",
    "x = 5\nx; x + 1",
    "7\n# a comment",
    "# a comment\n7 # another",
    "import asyncio\nasync def f(): return 4\nawait f()",
    "import asyncio\nx = await asyncio.sleep(0, 3)\nx",
    "'''words'''\n__doc__",
    "from __future__ import annotations\ndef f(a: b): pass\nf.__annotations__['a']",
    "'\\d'",
    "x = 1\r\nx + 1",
    "x = 1\rx + 1",
    "\u00e9 = 1\n\u00e9",
    "for i in range(3): i",
    "x = 1\n1/0",
    "\n\n1/0",
    "1/0\nprint(2)",
    "def f():\n    1/0\n\nf()",
    "x = 1\nyield x",
    "x = 1\nx =",
    "  1",
    "x = (\n1",
    "1\n\u3000",
    "print(1) if x else print(2)",
)


def _reference(source: str) -> tuple[str | None, str | None]:
    """The last statement's value where it is an expression; of an error its kind and the program's lines."""
    names: dict[str, object] = {"__name__": "__main__"}
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT

    def run(tree: ast.AST, mode: str) -> object:
        value = eval(compile(tree, "<cell 1>", mode, flags, dont_inherit=True), names)
        return asyncio.run(value) if asyncio.iscoroutine(value) else value

    try:
        tree = ast.parse(source, "<cell 1>")
        last = tree.body[-1]
        if not isinstance(last, ast.Expr):
            run(tree, "exec")
            return None, None
        if tree.body[:-1]:
            run(ast.Module(tree.body[:-1], []), "exec")
        value = run(ast.Expression(last.value), "eval")
        return None if value is None else repr(value), None
    except SyntaxError as error:
        return None, f"{type(error).__name__} {error.lineno}"
    except Exception as error:  # noqa: BLE001 - the program's own
        lines = [
            str(f.lineno) for f in traceback.extract_tb(error.__traceback__) if f.filename == "<cell 1>"
        ]
        return None, f"{type(error).__name__} {' '.join(lines)}"


def test_a_program_means_the_same_however_it_is_compiled() -> None:
    async def run() -> list[Execution]:
        async with Sandbox(_ONE) as box:
            return [await box.python(program) for program in _PROGRAMS]

    for program, got in zip(_PROGRAMS, asyncio.run(run()), strict=True):
        with warnings.catch_warnings(action="ignore"):
            value, error = _reference(program)
        told = None
        if got.error is not None:
            lines = re.findall(r'"<cell 1>", line (\d+)', got.error)
            told = f"{got.error.splitlines()[-1].partition(':')[0]} {' '.join(lines)}"
        assert (got.value, told) == (value, error), program
        assert got.stderr.count("Warning") <= 1, program
