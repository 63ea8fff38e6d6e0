"""Answers that attack the judge: each is wrong, and must score 0. None may leave itself unscored."""

from __future__ import annotations

import importlib.util
import textwrap
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from ludus.core import Boundary, InfraError, Task
from ludus.rewards import synthetic_episode
from ludus.rewards.code_tests import Programs, SqlMatch, UnitTests
from ludus.rewards.code_tests.fault_attribution import SandboxBusy, SandboxFactory, score_with_control
from ludus.rewards.code_tests.test_cases import code_of
from ludus.sandbox import Sandbox, SandboxConfig, SessionLost, shared_sandbox

CONFIG = SandboxConfig(workers=1)
ENGINES = SandboxConfig(workers=1, preload=("duckdb",) if importlib.util.find_spec("duckdb") else ())
on_sandbox = pytest.mark.asyncio(loop_scope="module")
"""One event loop for the module, and so one shared sandbox for its tests."""


@pytest_asyncio.fixture(autouse=True, loop_scope="module", scope="module")
async def _no_sandbox_is_left() -> AsyncIterator[None]:
    yield
    await shared_sandbox(CONFIG).close()
    await shared_sandbox(ENGINES).close()


async def score(code: str, tests: Any, kind: type = UnitTests, **options: Any) -> float:
    task = Task.of("Write it.", tests=tests)
    answer = f"```\n{textwrap.dedent(code)}\n```\n"
    reward = kind(**{"seconds": 1.0, "sandbox": CONFIG, "name": "score", **options})
    parts = await reward.score(synthetic_episode(task, answer), task, {})
    return float(parts["score"])


CALLS = {"function": "f", "cases": [{"args": [1], "expected": 1}]}
SOURCE = "def test_a(): assert f(1) == 1"
HANDED_BACK = "def test_a(): assert f(f(1), f(2)) == 1"
ALL = {"calls": CALLS, "source": SOURCE, "handed back": HANDED_BACK}

# What a solution can raise or return ----------------------------------------------------------------

RAISED = {
    **{
        name: f"def f(*x): raise {name}"
        for name in (
            *("StopIteration", "StopAsyncIteration", "GeneratorExit", "KeyboardInterrupt", "SystemExit"),
            *("SystemExit(0)", "RecursionError", "MemoryError", "BaseException", "ModuleNotFoundError"),
            *("ExceptionGroup('a', [ValueError()])", "UnicodeDecodeError('a', b'', 0, 0, 'b')"),
            *("ImportError(name='pandas')", "AssertionError", "TimeoutError", "InterruptedError"),
        )
    },
    "a lying text": "class E(Exception):\n    def __str__(self): return 3\ndef f(*x): raise E",
    "a text that exits": "class E(Exception):\n    def __str__(self): raise SystemExit\ndef f(*x): raise E",
    "a lying class": "class E(Exception):\n    __class__ = AssertionError\ndef f(*x): raise E",
    "a nameless class": "E = type('', (Exception,), {})\ndef f(*x): raise E",
    "a lying name": """
        class M(type):
            __name__ = property(lambda self: [1])
        class E(Exception, metaclass=M): pass
        def f(*x): raise E
    """,
    "an odd name": "E = type('a\\ud800', (Exception,), {})\ndef f(*x): raise E",
    "endless recursion": "def f(*x): return f(*x)",
}
RETURNED = {
    "an integer without a text": "def f(*x): return 10**5000",
    "such integers in a list": "def f(*x): return [10**5000, {10**5000: -10**5000}]",
    "equal to all": "class A:\n    __eq__ = lambda *_: True\n    __hash__ = id\ndef f(*x): return A()",
    "a list equal to all": "class A(list):\n    __eq__ = lambda a, b: True\ndef f(*x): return A()",
    "an integer equal to all": "class A(int):\n    __eq__ = lambda a, b: True\ndef f(*x): return A(2)",
    "a lying length": "class A:\n    __len__ = lambda a: 10**30\ndef f(*x): return A()",
    "items without end": "import itertools\ndef f(*x): return itertools.count()",
    "deep": "def f(*x):\n    a = []\n    for _ in range(100000): a = [a]\n    return a",
    "itself": "def f(*x):\n    a = []\n    a.append(a)\n    return a",
    "half a character": "def f(*x): return '\\ud800'",
    "a memory address": (
        "class A:\n    __array_interface__ = {'data': (1, False), 'shape': (9,), 'typestr': '<i8'}\n"
        "def f(*x): return A()"
    ),
    "a coroutine": "async def f(*x): return 2",
    "a generator": "def f(*x): yield 2",
    "an exception": "def f(*x): return StopIteration",
    "not a number": "def f(*x): return float('nan')",
}


@pytest.mark.parametrize("code", [*RAISED.values(), *RETURNED.values()], ids=[*RAISED, *RETURNED])
@on_sandbox
async def test_whatever_a_wrong_solution_raises_or_returns_scores_0(code: str) -> None:
    for tests in ALL.values():
        assert await score(code, tests) == 0.0


# What a solution can say in the name of the code around it ------------------------------------------

FORGE = """
import sys
def forge(text):
    sys.modules["ludus.rewards.code_tests.guest.solution_main"].write = lambda answer: text
"""
FORGED = {
    "nothing": "''",
    "no data": "'{'",
    "an empty table": "'{}'",
    "a list": "'[]'",
    "raised a list": """'{"raised": []}'""",
    "raised unhashable": """'{"raised": {"nearest": [], "name": {}}}'""",
    "raised a loop's end": """'{"raised": {"nearest": "StopIteration", "name": "ValueError"}}'""",
    "a name with a NUL": """'{"raised": {"nearest": "ValueError", "name": "a\\\\u0000"}}'""",
    "a number without end": """'{"value": 1e400}'""",
    "a number of many digits": """'{"value": ' + '9' * 5000 + '}'""",
    "a large number": """'{"value": {"i": "0x' + 'f' * 900000 + '"}}'""",
    "a bad number": """'{"value": {"i": [1]}}'""",
    "a bad decimal": """'{"value": {"m": "sNaN"}}'""",
    "a wide decimal": """'{"value": {"m": "1e999999999999"}}'""",
    "a bad fraction": """'{"value": {"q": ["0x1", "0x0"]}}'""",
    "a bad range": """'{"value": {"r": ["0x0", "0x1", "0x0"]}}'""",
    "a handle that is none": """'{"value": {"h": 1e400}}'""",
    "a far handle": """'{"value": {"h": 99999999999999999999}}'""",
    "keys that are lists": """'{"value": {"d": [[[], 1]]}}'""",
    "changed arguments": """'{"value": 2, "changed": [[9, 1], [0.0, 1], "a"]}'""",
    "changed nothing": """'{"value": 2, "changed": {}}'""",
    "characters that grow": """'{"value": "' + '\\x7f' * 900000 + '"}'""",
    "quotes that grow": """'{"value": "' + '\\\\"' * 450000 + '"}'""",
    "letters that grow": """'{"value": "' + 'é' * 450000 + '"}'""",
    "an event": """'\\n\\x1eludus-event:{"end": true}'""",
    **{
        f"nested {depth} deep": f"""'{{"value": ' + '[' * {depth} + ']' * {depth} + '}}'"""
        for depth in (100, 900, 930, 960, 990, 400_000)
    },
}
WHEN = {
    "when asked": "def f(*x): forge({text})",
    "when loaded": "forge({text})",
    "as a value": "def f(*x):\n    if len(x) == 1: forge({text})\n    return 2",
}


@pytest.mark.parametrize("text", FORGED.values(), ids=FORGED)
@on_sandbox
async def test_whatever_a_solution_forges_scores_0(text: str) -> None:
    for when, tests in (("when asked", CALLS), ("when loaded", SOURCE), ("as a value", HANDED_BACK)):
        assert await score(FORGE + WHEN[when].format(text=text), tests) == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("depth", range(840, 1000, 4))
@on_sandbox
async def test_no_depth_of_an_answer_is_one_reader_s_and_not_the_next_one_s(depth: int) -> None:
    text = f"""'{{"value": ' + '[' * {depth} + ']' * {depth} + '}}'"""
    for when in WHEN.values():
        for tests in ALL.values():
            assert await score(FORGE + when.format(text=text), tests) == 0.0


@pytest.mark.parametrize(
    "names",
    ["'\\x7f' * 900000", "'é' * 400000", "'a' * 900000", "'f\", \"' + '\\x7f' * 900000"],
    ids=range(4),
)
@on_sandbox
async def test_names_that_a_solution_forges_are_not_carried_to_the_judge(names: str) -> None:
    code = FORGE + f"""forge('{{"names": ["' + {names} + '"]}}')"""
    assert await score(code, SOURCE) == 0.0


# What tests may take for the end of a loop ----------------------------------------------------------

SILENT = [
    "assert all(map(f, [1, 2]))",
    "for a, b in zip(map(f, [1, 2]), [1, 2]): assert a == b",
    "assert [*map(f, [1])] == []",
    "assert sum(map(f, [1, 2])) == 0",
    "assert not any(map(f, [1]))",
    "assert next(map(f, [1]), 7) == 7",
    "assert [*filter(f, [1])] == []",
    "assert max(map(f, [1]), default=0) == 0",
    "for x in iter(lambda: f(1), None): assert x == 1",
    "def test_a():\n    assert all(map(lambda x: f(x) == x, [1, 2]))",
    "import pytest\ndef test_a(): assert all(map(f, [1]))\n"
    "def test_b():\n    with pytest.raises(StopIteration): f(1)",
]


@pytest.mark.parametrize("tests", SILENT, ids=range(len(SILENT)))
@on_sandbox
async def test_the_end_of_a_loop_raised_by_a_solution_passes_no_test(tests: str) -> None:
    expected = 0.5 if "test_b" in tests else 0.0  # a test that names the exception may expect it
    assert await score("def f(x): raise StopIteration", tests) == expected
    odd = "class E(StopIteration): pass\nclass A:\n    def __call__(self, x): raise E(x)\nf = A()"
    assert await score(odd, tests) == expected


@pytest.mark.parametrize(
    "tests",
    [
        "import pytest\ndef test_a():\n    with pytest.raises(StopIteration): f(1)",
        "import pytest\ndef test_a(): pytest.raises(StopIteration, f, 1)",
        "def test_a():\n    try: f(1)\n    except StopIteration: return\n    assert False",
        "import unittest\nclass T(unittest.TestCase):\n"
        "    def test_a(self): self.assertRaises(StopIteration, f, 1)",
        "import contextlib\nwith contextlib.suppress(StopIteration):\n    f(1)\n    assert False",
    ],
    ids=range(5),
)
@on_sandbox
async def test_a_test_may_expect_the_end_of_a_loop(tests: str) -> None:
    assert await score("def f(x): raise StopIteration", tests) == 1.0
    assert await score("def f(x): return x", tests) == 0.0


@on_sandbox
async def test_iterators_of_a_solution_end() -> None:
    tests = "import pytest\ndef test_a():\n    i = f(2)\n    assert next(i) == 0 and [*i] == [1]\n"
    tests += "    with pytest.raises(StopIteration): next(i)"
    assert await score("def f(n): return iter(range(n))", tests) == 1.0


# Tests that a solution can empty, or break from inside the judge ------------------------------------


@pytest.mark.parametrize(
    ("code", "tests"),
    [
        (
            "CASES = []",
            "import pytest\n@pytest.mark.parametrize('n', CASES)\ndef test_a(n): assert f(n) == n",
        ),
        (
            "f = lambda: b'cnowhere\\nx\\n.'",
            "import pickle\ndef test_a(): assert pickle.loads(f()) == 1",
        ),
        ("f = lambda: 'import os; os._exit(0)'", "def test_a():\n    exec(f())\n    assert False"),
        ("f = lambda: 'raise SystemExit'", "def test_a():\n    exec(f())\n    assert False"),
        ("f = lambda: 'nowhere'", "import importlib\ndef test_a(): assert importlib.import_module(f())"),
        ("f = lambda: 10**9", "def test_a(): assert bytearray(f()) is None"),
        ("f = lambda: '(' * 100000", "import ast\ndef test_a(): assert ast.literal_eval(f()) == 1"),
        ("f = lambda: '(a*)*b'", "import re\ndef test_a(): assert re.match(f(), 'a' * 100)"),
    ],
    ids=["no cases", "pickle", "exit", "SystemExit", "module", "memory", "parser", "pattern"],
)
@on_sandbox
async def test_breaking_the_judge_scores_0(
    monkeypatch: pytest.MonkeyPatch, code: str, tests: str
) -> None:
    from ludus.rewards.code_tests import unit_tests

    limits = unit_tests._TESTS_PROCESS_LIMITS.model_copy(
        update={"wall_seconds": 2.0, "cpu_seconds": 1.0}
    )
    monkeypatch.setattr(unit_tests, "_TESTS_PROCESS_LIMITS", limits)
    assert await score(code, tests) == 0.0


# Programs -------------------------------------------------------------------------------------------

FRAME = """
import json, os, socket, time
def say(header, body=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    for fd in range(3, 10):  # wherever the way to the host is
        try:
            os.write(fd, len(text).to_bytes(4, "little") + len(body).to_bytes(4, "little") + text + body)
        except OSError:
            pass
    time.sleep(0.2)
"""
PROGRAMS = {
    "prints nothing": "pass",
    "a huge status": FRAME + "say({'done': 'exited', 'code': 10**4000})",
    "a status that is true": FRAME + "say({'done': 'exited', 'code': True})",
    "a far signal": FRAME + "say({'done': 'signal', 'signal': 10**100})",
    "a done that is a list": FRAME + "say({'done': [1]})",
    "half a character": FRAME + "say({'done': 'raised', 'error': '\\ud800', 'value': '\\udfff'})",
    "no table": FRAME + "say(b'[]')",
    "no frame": FRAME + "say(b'{' * 1000)",
    "nested": FRAME + "say(b'[' * 100000)",
    "digits": FRAME + "say(b'{\"done\": \"exited\", \"code\": ' + b'9' * 5000 + b'}')",
    "a body": FRAME + "say({'done': 'ok'}, b'a' * 1000000)",
    "descriptors": FRAME + "import array\nend = socket.socket(fileno=os.dup(3))\n"
    "socket.send_fds(end, [b'a'], [0] * 200)",
    "closes all": "import os\nos.closerange(0, 100)",
    "kills its group": "import os, signal\nos.killpg(0, signal.SIGKILL)",
    "kills all": "import os, signal\nos.kill(-1, signal.SIGKILL)",
    "no files": "import resource as r\nr.setrlimit(r.RLIMIT_NOFILE, (0, 0))\nopen('x')",
    "no memory": "import resource as r\nr.setrlimit(r.RLIMIT_AS, (1 << 20, 1 << 20))\nx = bytes(1 << 24)",
    "a stopped process": "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)",
    "not text": "import os\nos.write(1, bytes(range(256)) * 100)",
    "much text": "print('1\\n' * 10_000_000)",
    "a long number": "print('9' * 5000)",
    "a stream that is none": "import sys\nsys.stdout = None",
}


@pytest.mark.parametrize("code", PROGRAMS.values(), ids=PROGRAMS)
@on_sandbox
async def test_a_program_that_writes_nothing_right_scores_0(code: str) -> None:
    cases = [{"stdin": "1", "stdout": "3"}, {"stdin": "2", "stdout": "4"}]
    for kind in (UnitTests, Programs):
        assert await score(code, cases, kind, tolerance=1e-6, seconds=0.1, credit="all") == 0.0


COMMANDS = {
    "kills its parent": "kill -9 $PPID",
    "stops its parent": "kill -STOP $PPID",
    "kills all": "kill -9 -1",
    "no processes": "prlimit --pid $PPID --nproc=0:0",
    "no files": "prlimit --pid $PPID --nofile=0:0",
    "no memory": "prlimit --pid $PPID --as=1000000:1000000",
    "no file sizes": "prlimit --pid $PPID --fsize=0:0",
    "no processor": "prlimit --pid $PPID --cpu=0:0",
    "a full disk": "head -c 100000000 /dev/zero > full",
    "no program": "rm -f program* ; chmod 000 .",
    "another program": "echo 'exit 9' > program.sh",
    "a background": "(sleep 3; kill -9 $PPID) & disown; echo 3",
}


@pytest.mark.parametrize("code", COMMANDS.values(), ids=COMMANDS)
@on_sandbox
async def test_a_command_that_ruins_its_session_scores_0(code: str) -> None:
    cases = [
        {"stdin": "1", "stdout": "no"},
        {"stdin": "2", "stdout": "no"},
        {"stdin": "3", "stdout": "no"},
    ]
    assert await score(code, cases, Programs, language="bash", seconds=0.3, total_seconds=10) == 0.0


def test_an_answer_cannot_make_finding_its_code_slow() -> None:
    """200,000 characters backtracked over twice would take minutes, on the event loop."""
    for line in (
        "~~~" + " " * 100_000 + "a" * 100_000 + "`",
        "~" * 200_000 + "`",
        "```" + "a" * 200_000 + "`",
    ):
        assert code_of(line, ("python",)) == line[-200_000:]
    assert code_of("~~~~ python x\na\n~~~\n~~~~", ("python",)) == "a\n~~~"


# Whose doing an unknown breakage is -----------------------------------------------------------------


def _judge(broken: Callable[[str, int], Exception | None]) -> Any:
    """A judging that breaks as told; it notes the sandbox of each time."""
    boxes: list[Sandbox] = []

    async def judge(answer: str, box: SandboxFactory) -> dict[str, float]:
        sandbox = box(CONFIG)
        assert (await sandbox.python("print(1)")).stdout == "1\n"
        boxes.append(sandbox)
        error = broken(answer, len(boxes))
        if error is not None:
            raise error
        return {"a": 1.0, "a_passed": 3.0, "a_total": 3.0}

    return judge, boxes


ERRORS = [RuntimeError("the judge failed"), SessionLost("gone"), RecursionError(), ValueError("no data")]


@pytest.mark.parametrize("error", ERRORS, ids=[type(error).__name__ for error in ERRORS])
@on_sandbox
async def test_what_breaks_over_one_answer_alone_is_the_answers(error: Exception) -> None:
    judge, boxes = _judge(lambda answer, _: error if answer == "bad" else None)
    found = await score_with_control("a", judge, "bad", "harmless")
    assert found == {
        "a": 0.0,
        "a_passed": 0.0,
        "a_total": 3.0,
    }
    shared, before, again, after = boxes
    assert shared is shared_sandbox(CONFIG)
    assert before is again is after is not shared, "one new sandbox, where the repetition is alone"
    found = await score_with_control("a", judge, "good", "harmless")
    assert found == {
        "a": 1.0,
        "a_passed": 3.0,
        "a_total": 3.0,
    }


@pytest.mark.parametrize("error", ERRORS, ids=[type(error).__name__ for error in ERRORS])
@on_sandbox
async def test_what_breaks_over_every_answer_is_ours(error: Exception) -> None:
    judge, boxes = _judge(lambda answer, _: error)
    with pytest.raises(InfraError) as caught:
        await score_with_control("a", judge, "bad", "harmless")
    assert caught.value.boundary == ("sandbox" if isinstance(error, SessionLost) else "reward")
    assert len(boxes) == 2
    judge, _ = _judge(lambda answer, times: error if answer == "bad" or times > 3 else None)
    with pytest.raises(InfraError):  # the machine broke down meanwhile: the last control fails
        await score_with_control("a", judge, "bad", "harmless")


@on_sandbox
async def test_an_answer_that_ruins_its_sandbox_is_compared_in_another() -> None:
    judge, boxes = _judge(
        lambda answer, times: SessionLost("gone") if answer == "bad" or times == 4 else None
    )
    assert (await score_with_control("a", judge, "bad", "harmless"))["a"] == 0.0
    assert boxes[3] is boxes[2] and boxes[4] is not boxes[3]


@on_sandbox
async def test_a_machine_that_breaks_between_two_answers_is_ours() -> None:
    broken = False
    judge, _ = _judge(lambda answer, _: RuntimeError("broken") if broken or answer == "bad" else None)
    assert (await score_with_control("a", judge, "bad", "harmless"))["a"] == 0.0
    broken = True
    with pytest.raises(InfraError):  # although judging the harmless answer worked a moment ago
        await score_with_control("a", judge, "bad", "harmless")


@on_sandbox
async def test_no_room_for_the_repetition_is_ours() -> None:
    errors = [RuntimeError("broken"), None, SandboxBusy(Boundary.SANDBOX, "no room")]
    judge, _ = _judge(lambda _, times: errors[times - 1])
    with pytest.raises(InfraError, match="no room"):
        await score_with_control("a", judge, "bad", "harmless")


@on_sandbox
async def test_what_breaks_once_is_repeated() -> None:
    judge, boxes = _judge(lambda answer, times: RuntimeError("lost") if times == 1 else None)
    assert (await score_with_control("a", judge, "good", "harmless"))["a"] == 1.0
    assert len(boxes) == 3


# Queries --------------------------------------------------------------------------------------------

QUERIES = {
    "deep": "select " + "[" * 40 + "1" + "]" * 40,
    "deeper": "select " + "[" * 300 + "1" + "]" * 300,
    "nearly too deep": "select " + "[" * 460 + "1" + "]" * 460,
    "too deep": "select " + "[" * 3000 + "1" + "]" * 3000,
    "a struct": "select {'a': {'b': {'c': [1, 2]}}, 'd': map {'x': 1}}",
    "a large number": "select 170141183460469231731687303715884105727::hugeint, 1e400::double",
    "a number of many digits": f"select '{'9' * 5000}'::bignum",
    "a number without a float": f"select '{'9' * 400}'::bignum",
    "not a number": "select 'nan'::double, '-inf'::float",
    "a date before all": "select '-infinity'::timestamp, '290000-01-01 (BC)'::date",
    "an interval": "select interval 1000000000 year",
    "bits and blobs": "select '0101'::bit, '\\xAA'::blob, uuid()",
    "prints": "select 3 from (select printf('%s', 'a'))",
    "an error of its own": "select error('{\"failure\": 1}')",
    "a forged failure": 'select \'{"failure": "no"}\' as failure',
    "no text": "select chr(0), '\\ud800'",
    "long names": f'select 3 as "{"a" * 90_000}"',
    "much": "select repeat('a', 10000000) from range(100)",
    "settings": "set progress_bar_time = 0",
    "a pragma": "pragma enable_progress_bar",
}


@pytest.fixture(scope="module")
def databases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("databases")
    (folder / "a.sql").write_text("create table t(a integer); insert into t values (1);")
    return folder


async def matched(folder: Path, gold: str, predicted: str, **options: Any) -> dict[str, float]:
    reward = SqlMatch(**{"database": str(folder / "a.sql"), "sandbox": ENGINES, "seconds": 2, **options})
    task = Task.of("?", gold)
    return await reward.score(synthetic_episode(task, f"```sql\n{predicted}\n```"), task, {})


@pytest.mark.parametrize("engine", ["duckdb", "sqlite"])
@pytest.mark.parametrize("query", QUERIES.values(), ids=QUERIES)
@on_sandbox
async def test_whatever_a_wrong_query_gives_scores_0(databases: Path, query: str, engine: str) -> None:
    if engine == "duckdb":
        pytest.importorskip("duckdb")
    found = await matched(databases, "select 2.5 as a", query, engine=engine, column_order=False)
    assert found["sql_match"] == 0.0


@pytest.mark.parametrize("query", ["deep", "a struct", "a number without a float", "not a number"])
@on_sandbox
async def test_whatever_a_query_gives_can_be_compared(databases: Path, query: str) -> None:
    pytest.importorskip("duckdb")
    for rules in ({}, {"column_order": False}, {"order": "always"}):
        found = await matched(databases, QUERIES[query], QUERIES[query], engine="duckdb", **rules)
        assert found["sql_match"] == 1.0


@on_sandbox
async def test_a_query_that_takes_over_two_seconds_is_scored(databases: Path) -> None:
    """DuckDB then draws a progress bar, on the standard output."""
    pytest.importorskip("duckdb")
    slow = "select count(*) from range(30000000) a where md5(md5(md5(md5(a.range::text)))) = 'x'"
    found = await matched(databases, "select 1", slow, engine="duckdb", seconds=2.7)
    assert found == {"sql_match": 0.0, "sql_match_ran": 0.0}
