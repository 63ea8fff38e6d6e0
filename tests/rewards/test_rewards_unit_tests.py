"""Judging Python: what must pass passes, and every way of cheating scores nothing for what it touches."""

from __future__ import annotations

import asyncio
import contextlib
import textwrap
import zlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st

from ludus.core import ConfigError, InfraError, Task
from ludus.rewards import build_reward, synthetic_episode
from ludus.rewards.code_tests import UnitTests
from ludus.rewards.code_tests.guest.plain_data import Decoder, Encoder, no_handles, read, refuse, write
from ludus.rewards.code_tests.guest.proxies import restore
from ludus.rewards.code_tests.test_cases import (
    CallCase,
    SourceTests,
    StdinCase,
    code_of,
    equal_outputs,
    equal_values,
    fenced_blocks,
    parse_tests,
)
from ludus.sandbox import SandboxConfig, SandboxError, SessionLost, shared_sandbox

CONFIG = SandboxConfig(workers=1)
on_sandbox = pytest.mark.asyncio(loop_scope="module")
"""One event loop for the module, and so one shared sandbox for its tests."""


@pytest_asyncio.fixture(autouse=True, loop_scope="module", scope="module")
async def _no_sandbox_is_left() -> AsyncIterator[None]:
    yield
    await shared_sandbox(CONFIG).close()


async def parts(code: str, tests: Any, **options: Any) -> dict[str, float]:
    metadata = options.pop("metadata", {})
    task = Task.of("Write it.", tests=tests, **metadata)
    answer = f"Here you are:\n\n```python\n{textwrap.dedent(code)}\n```\n"
    reward = UnitTests(**{"seconds": 0.3, "sandbox": CONFIG, **options})
    return await reward.score(synthetic_episode(task, answer), task, {})


async def share(code: str, tests: Any, **options: Any) -> float:
    return (await parts(code, tests, **options))["unit_tests"]


# What must pass -----------------------------------------------------------------------------------


@on_sandbox
async def test_partial_credit_or_all_or_nothing() -> None:
    tests = ["assert f(1) == 2", "assert f(2) == 3", "assert f(3) == 5"]
    code = "def f(x): return x + 1"
    assert await parts(code, tests) == {
        "unit_tests": pytest.approx(2 / 3),
        "unit_tests_passed": 2.0,
        "unit_tests_total": 3.0,
    }
    assert await share(code, tests, credit="all") == 0.0
    assert await share(code, tests[:2], credit="all") == 1.0


@on_sandbox
async def test_programs_that_read_and_write() -> None:
    code = "import sys\na, b = map(int, input().split())\nprint(a + b, 0.1 + 0.2)\nsys.exit(0)"
    cases = [{"stdin": "1 2\n", "stdout": "3  0.3\n"}, {"input": "2 2", "output": "5 0.3"}]
    assert await share(code, cases) == 0.5
    assert await share(code, {"inputs": ["1 2"], "outputs": ["3 0.3"]}) == 1.0
    assert await share("print(3); raise SystemExit(1)", [{"stdin": "", "stdout": "3"}]) == 0.0


@on_sandbox
async def test_calls_compare_plain_data() -> None:
    code = """
        from collections import defaultdict, namedtuple
        P = namedtuple("P", "x y")
        def f(kind):
            return {
                "tuple": (1, 2.0000000001), "named": P(1, [None, True]), "float": 0.1 + 0.2,
                "dict": defaultdict(int, {"a": (1,)}), "nan": float("nan"), "big": 10**40,
                "text": "ünï\\udc80",
            }[kind]
    """
    cases = [
        {"args": ["tuple"], "expected": [1, 2]},
        {"args": ["named"], "expected": [1, [None, True]]},
        {"args": ["dict"], "expected": {"a": [1]}},
        {"kwargs": {"kind": "float"}, "expected": 0.3},
        {"args": ["nan"], "expected": float("nan")},
        {"args": ["big"], "expected": 10**40},
        {"args": ["text"], "expected": "ünï\udc80"},
    ]
    assert await share(code, {"function": "f", "cases": cases}) == 1.0
    assert await share(code, [{"args": ["named"], "expected": [1, [None, 1]]}], function="f") == 0.0


@on_sandbox
async def test_methods_as_coding_sites_have_them() -> None:
    code = "class Solution:\n    def twice(self, n): return 2 * n"
    tests = {"fn_name": "Solution().twice", "inputs": [[1], [2]], "outputs": [2, 4]}
    assert await share(code, tests) == 1.0


@on_sandbox
async def test_tests_written_in_python() -> None:
    code = """
        class Stack:
            def __init__(self): self.items = []
            def push(self, x): self.items.append(x)
            def pop(self): return self.items.pop()
            def __len__(self): return len(self.items)
            def __add__(self, other):
                both = Stack(); both.items = self.items + other.items; return both
        class Empty(ValueError): pass
        def naturals():
            n = 0
            while True:
                yield n; n += 1
        def sort_in_place(items, table): items.sort(); items[0].append(9); table["x"] = 1
        def fail(): raise Empty("nothing here")
        LIMIT = (1, {"a": {2, 3}})
    """
    tests = """
        import itertools, pytest, solution
        from solution import Stack
        def test_objects():
            s = Stack(); s.push(1); s.push((2, 3))
            assert len(s) == 2 and s.pop() == (2, 3) and s.items == [1]
            assert isinstance(s, Stack) and len(s + s) == 2
        def test_generators():
            assert list(itertools.islice(naturals(), 100)) == list(range(100))
            n = naturals()
            assert (next(n), next(n)) == (0, 1)
        def test_arguments_are_changed_in_place():
            inner = [1]
            items, table = [[2], inner], {}
            sort_in_place(items, table)
            assert items == [[1, 9], [2]] and table == {"x": 1}
        def test_errors():
            with pytest.raises(solution.Empty, match="nothing"): fail()
            with pytest.raises(ValueError): fail()
        def test_constants(): assert solution.LIMIT == (1, {"a": {3, 2}})
        @pytest.mark.parametrize("n, expected", [(1, 0), (2, 1)])
        def test_cases(n, expected): assert list(itertools.islice(naturals(), n))[-1] == pytest.approx(expected)
        class TestMore:
            def setup_method(self): self.s = Stack()
            def test_empty(self): assert not self.s
        def test_that_fails():
            with pytest.raises(KeyError): fail()
    """
    assert (await parts(code, textwrap.dedent(tests)))["unit_tests_passed"] == 8.0
    assert (await parts(code, textwrap.dedent(tests)))["unit_tests_total"] == 9.0


@on_sandbox
async def test_unittest_classes_bare_assertions_and_humaneval() -> None:
    case = """
        import unittest
        from solution import f
        class Cases(unittest.TestCase):
            def setUp(self): self.one = 1
            def test_a(self): self.assertEqual(f(self.one), 2)
            def test_b(self): self.assertEqual(f(self.one), 3)
    """
    code = "def f(x): return x + 1"
    assert await share(code, textwrap.dedent(case)) == 0.5
    assert await share(
        code, "y = f(1)\nassert y == 2\nassert f(y) == 3\nassert f(y) == 4"
    ) == pytest.approx(2 / 3)
    check = {"source": "def check(candidate):\n    assert candidate(1) == 2\n", "entry": "f"}
    assert await share(code, check) == 1.0
    assert await share(code, check["source"], metadata={"entry_point": "g"}) == 0.0


@on_sandbox
async def test_names_of_the_tests_own_do_not_hide_the_solutions() -> None:
    tests = "def test_a():\n    count = 3\n    assert count == 3\ndef test_b(): assert count([1]) == 1\n"
    assert await share("def count(items): return len(items)", tests) == 1.0
    mine = "def count(items): return 1\ndef test_a(): assert count([]) == 1\n"
    assert await share("def count(items): return len(items)", mine) == 1.0


# What must not ------------------------------------------------------------------------------------

ONE = ["assert f(1) == 1"]


@pytest.mark.parametrize(
    "code",
    [
        "import sys; sys.exit(0)\ndef f(x): return 1",
        "import os; os._exit(0)\ndef f(x): return 1",
        "import sys\ndef f(x): sys.exit(0)",
        "import os\ndef f(x): os._exit(0)",
        "def f(x): raise KeyboardInterrupt",
        "def f(x):\n    while True: pass",
        "def f(x): return x, f(x)",
        "def f(x): return bytearray(10**10)",
        "def f(x:",
        "",
        "f = None",
        "def g(x): return 1",
        "import unittest\ndef f(x): raise unittest.SkipTest('not today')",
    ],
    ids=range(13),
)
@on_sandbox
async def test_not_answering_scores_nothing(code: str) -> None:
    assert await share(code, ONE) == 0.0
    assert await share(code, [{"args": [1], "expected": 1}], function="f") == 0.0


@on_sandbox
async def test_expected_errors_are_not_met_by_ending_the_process() -> None:
    test = "import pytest\ndef test_it():\n    with pytest.raises(BaseException): f(1)\n"
    for body in ("os._exit(0)", "os.kill(os.getpid(), 9)", "sys.exit(1)", "exec('while True: pass')"):
        assert await share(f"import os, sys\ndef f(x): {body}", test) == 0.0
    swallowing = "def test_it():\n    try: f(1)\n    except: pass\n"
    assert await share("import os\ndef f(x): os._exit(0)", swallowing) == 0.0


@on_sandbox
async def test_objects_that_lie_about_themselves() -> None:
    code = """
        class Equal:
            __eq__ = __lt__ = __le__ = __gt__ = __ge__ = __contains__ = __bool__ = lambda self, *other: True
            __ne__ = lambda self, other: False
            __hash__ = lambda self: 0
            __sub__ = __rsub__ = __add__ = __radd__ = __mul__ = __mod__ = lambda self, other: 0
            __abs__ = __float__ = __int__ = __index__ = lambda self: 0
            __iter__ = lambda self: iter(())
        class Text(str):
            __eq__ = startswith = endswith = __contains__ = lambda self, other: True
            __hash__ = str.__hash__
            split = lambda self, *a: ["abc"]
        class Number(int):
            __eq__ = __lt__ = __gt__ = lambda self, other: True
            __hash__ = int.__hash__
            __sub__ = lambda self, other: 0
        class Items(list):
            __eq__ = __contains__ = lambda self, other: True
            __len__ = lambda self: 3
            __iter__ = lambda self: iter("abc")
        class Table(dict):
            __eq__ = lambda self, other: True
            __getitem__ = get = lambda self, key, default=None: 1
        def equal(): return Equal()
        def text(): return Text("q")
        def number(): return Number(7)
        def items(): return Items()
        def table(): return Table()
    """
    tests = [
        "assert equal() == 5",
        "assert 5 == equal()",
        "assert not equal() != 5",
        "assert equal() == equal()",
        "assert abs(equal() - 5) < 1e-9",
        "assert abs(5 - equal()) < 1e-9",
        "assert equal() < 10",
        "assert 0 <= equal() <= 10",
        "assert 5 in equal()",
        "assert equal() in [5, 6]",
        "assert equal() in {5: 1}",
        "import math\nassert math.isclose(equal(), 0.0)",
        "assert sum([equal()]) == 0",
        "assert {equal()} == {5}",
        "import pytest\nassert equal() == pytest.approx(5)",
        "assert text() == 'abc'",
        "assert text().startswith('abc')",
        "assert 'abc' in text()",
        "assert text().split() == ['abc']",
        "assert number() == 5",
        "assert number() - 5 == 0",
        "assert number() < 5",
        "assert items() == [1, 2, 3]",
        "assert len(items()) == 3",
        "assert 5 in items()",
        "assert list(items()) == ['a', 'b', 'c']",
        "assert table() == {'a': 1}",
        "assert table().get('a') == 1",
    ]
    assert (await parts(code, tests))["unit_tests_passed"] == 0.0
    lists = [{"function": name, "expected": 5} for name in ("equal", "text", "number", "items", "table")]
    assert await share(code, lists) == 0.0


@on_sandbox
async def test_patching_builtins_and_test_tools_reaches_nobody() -> None:
    code = """
        import builtins, sys, types, unittest
        unittest.TestCase.assertEqual = unittest.TestCase.fail = lambda *a, **k: None
        fake = types.ModuleType("pytest"); fake.raises = fake.approx = lambda *a, **k: None
        sys.modules["pytest"] = fake
        builtins.AssertionError = ValueError
        builtins.abs = builtins.sum = builtins.sorted = lambda *a, **k: 0
        def abs(x): return 0
        def sorted(x): return [1, 2, 3]
        def check(candidate): pass
        def f(x): return 7
    """
    tests = """
        import unittest
        from solution import *
        class TestIt(unittest.TestCase):
            def test_equal(self): self.assertEqual(f(1), 1)
            def test_abs(self): assert abs(f(1) - 1) < 1e-9
            def test_sorted(self): assert sorted([f(1)]) == [1, 2, 3]
            def test_true(self): self.assertEqual(f(1), 7)
    """
    found = await parts(code, textwrap.dedent(tests))
    assert (found["unit_tests_passed"], found["unit_tests_total"]) == (1.0, 4.0)


@on_sandbox
async def test_the_tests_are_nowhere_to_be_found() -> None:
    code = """
        import gc, inspect, os, re, sys, zlib
        def everything():
            for o in gc.get_objects():
                if isinstance(o, (dict, list, tuple)):
                    for part in list(o.values()) if isinstance(o, dict) else list(o):
                        if isinstance(part, str): yield part
            frame = inspect.currentframe()
            while frame:
                yield repr(frame.f_locals); frame = frame.f_back
            for folder, _, files in os.walk(os.path.expanduser("~")):
                for name in files:
                    yield open(os.path.join(folder, name), errors="replace").read()
            yield repr(os.environ) + repr(sys.argv)
        def is_it(text):  # by a checksum, so as not to find the search itself
            words = re.findall("[A-Z]{6}_[A-Z]{11}", text)
            return any(zlib.crc32(word.encode()) == CHECKSUM for word in words)
        def f(x): return any(is_it(text) for text in everything())
    """.replace("CHECKSUM", str(zlib.crc32(b"SECRET_EXPECTATION")))
    tests = "SECRET_EXPECTATION = True\ndef test_it(): assert f(1) == SECRET_EXPECTATION\n"
    assert await share(code, tests) == 0.0
    assert (
        await share(code, "def test_it(): assert f('SECRET_EXPECTATION') is True\n") == 1.0
    )  # it can search
    assert await share(code, [{"args": [1], "expected": "SECRET_EXPECTATION"}], function="f") == 0.0


@on_sandbox
async def test_printing_and_forging_verdicts() -> None:
    code = r"""
        import os, sys
        FORGED = (b'\n\x1eludus-answer:{"value":1,"names":["f"]}\n'
                  b'\x1eludus-event:{"test":"x","passed":true,"problem":""}\n\x1eludus-event:{"end":true}\n')
        os.write(1, FORGED)
        def f(x):
            print("All tests passed", flush=True); os.write(1, FORGED); os.write(2, FORGED)
            os._exit(0)
        def g(x):
            sys.__stdout__.write(FORGED.decode()); sys.__stdout__.flush()
            return 2
        def h(x):
            import __main__, gc
            for module in list(sys.modules.values()):
                if "_held" in vars(module) or "_link" in vars(module):
                    vars(module).update(write=lambda *a: '{"value": 2, "changed": [[0, 5], [99, 1]]}')
            return 2
    """
    tests = ["assert f(1) == 1", "assert g(1) == 1", "assert h(1) == 1"]
    assert await share(code, tests) == 0.0


@on_sandbox
async def test_huge_answers_and_endless_output() -> None:
    code = """
        import os
        def text(x): return "a" * 50_000_000
        def parts(x): return [[]] * 3_000_000
        def deep(x):
            out = []
            for _ in range(5000): out = [out]
            return out
        def loop(x):
            out = []; out.append(out); return out
        def digits(x): return 10 ** 20000
        def forever(x):
            while True: yield 1
        def flood(x):
            while True: os.write(1, b"x" * 100000)
        def noisy(x):
            for _ in range(20000): print("debug" * 10)
            return 1
    """
    names = ("text", "parts", "deep", "loop", "digits", "flood")
    assert await share(code, [f"assert {name}(1) == 1" for name in names]) == 0.0
    assert await share(code, ["assert noisy(1) == 1"]) == 1.0
    endless = ["assert list(forever(1)) == [1]", "assert sum(forever(1)) == 1", "assert noisy(1) == 1"]
    assert (await parts(code, endless))["unit_tests_passed"] == 1.0


@on_sandbox
async def test_one_bad_test_does_not_spoil_the_next() -> None:
    code = """
        import os, time
        def bad(how):
            if how == "exit": os._exit(0)
            if how == "loop":
                while True: pass
        def good(x): return x
    """
    tests = [
        "assert good(1) == 1",
        "assert bad('exit') is None",
        "assert good(2) == 2",
        "assert bad('loop') == 1",
        "assert good(3) == 3",
    ]
    assert (await parts(code, tests))["unit_tests_passed"] == 3.0
    source = "from solution import bad, good\n" + "\n".join(
        f"def test_{i}():\n    {test}" for i, test in enumerate(tests)
    )
    assert (await parts(code, source))["unit_tests_passed"] == 3.0
    cases = [
        {"function": "bad", "args": ["exit"], "expected": None},
        {"function": "good", "args": [1], "expected": 1},
    ]
    assert await share(code, cases) == 0.5


@on_sandbox
async def test_a_solution_that_only_loads_once_fails_the_rest() -> None:
    code = """
        import os
        def f(x): os._exit(0)
        def g(x): return 1
    """
    source = "def test_a(): f(1)\n" + "".join(f"def test_{i}(): assert g(1) == 1\n" for i in range(3))
    assert await share(code, source) == 0.75
    assert await share("raise ValueError('no')", source) == 0.0


LYING = """
    class math: isclose = staticmethod(lambda *a, **k: True)
    class np: allclose = staticmethod(lambda *a, **k: True)
    class pytest: approx = staticmethod(lambda *a, **k: 0)
    def close(a, b): return True
    EXPECTED = 0
    def area(r): return 0
"""


@on_sandbox
async def test_modules_that_tests_use_without_importing_them_are_the_judges() -> None:
    tests = [
        "assert math.isclose(area(1), 3.14159, rel_tol=0.001)",
        "assert area(1) == pytest.approx(3.14)",
    ]
    assert await share(LYING, tests) == 0.0
    assert await share(LYING, "\n".join(tests)) == 0.0
    assert await share("def area(r): return 3.14 * r", tests) == 1.0
    # The same word for a function to be written is the solution's.
    assert await share("def bisect(x): return x", ["assert bisect(1) == 1"]) == 1.0
    stack = "class stack: push = staticmethod(lambda x: [x])\nqueue = stack"
    assert await share(stack, ["assert queue.push(1) == [1]"]) == 1.0


@on_sandbox
async def test_a_known_module_is_never_the_solutions() -> None:
    try:
        assert await share(LYING, ["assert np.allclose(area(1), 3.14)"]) == 0.0
    except InfraError as broken:  # where numpy is not installed in the sandbox
        assert "np" in str(broken)


@on_sandbox
async def test_what_earlier_sources_define_is_the_tests() -> None:
    helper = "def close(a, b): return abs(a - b) < 0.01\nEXPECTED = 3.14"
    tests = [helper, "assert close(area(1), 3.14)", "assert area(1) == EXPECTED"]
    found = await parts(LYING, tests)  # the helper prepares, and is no test itself
    assert (found["unit_tests_passed"], found["unit_tests_total"]) == (0.0, 2.0)
    assert await share("def area(r): return 3.14 * r", tests) == 1.0
    late = ["assert area(2) == 5\ndef close(a, b): return abs(a - b) < 0.01", tests[1]]
    assert await share(LYING, late) == 0.0
    assert await share("def area(r): return 3.14 * r", late) == 0.5


@on_sandbox
async def test_whole_numbers_are_compared_exactly() -> None:
    case = [{"stdin": "", "stdout": "1000001"}]
    assert await share("print(1000000)", case) == 0.0
    assert await share("print(1000001)", case) == 1.0
    assert await share("print(1000001.0000001)", case) == 1.0


@on_sandbox
async def test_every_statement_that_checks_something_is_a_test() -> None:
    tests = """
        import pytest
        def check_pair(x): assert f(x) == x + 1
        for x in range(3):
            assert f(x) == x + 1
        with pytest.raises(TypeError):
            f("a")
        if f(1) == 2:
            assert f(2) == 3
        try:
            f(None)
        except TypeError:
            pass
        else:
            raise AssertionError
        check_pair(5)
        for x in (1, 2): y = f(x)
        assert y == 3
    """
    code = "def f(x): return x + 1"
    assert await parts(code, textwrap.dedent(tests)) == {
        "unit_tests": 1.0,
        "unit_tests_passed": 6.0,
        "unit_tests_total": 6.0,
    }
    found = await parts("def f(x): return 2", textwrap.dedent(tests))
    assert (found["unit_tests_passed"], found["unit_tests_total"]) == (0.0, 6.0)
    called = "def check(candidate): assert candidate(1) == 2\ncheck(f)\n"
    assert (await parts(code, called, metadata={"entry_point": "f"}))["unit_tests_total"] == 1.0
    assert await share(code, called) == 1.0


@on_sandbox
async def test_coroutines_run_where_the_solution_is() -> None:
    code = """
        import asyncio
        async def f(x):
            await asyncio.sleep(0)
            return x
        async def fail(): raise KeyError("no")
    """
    tests = ["import asyncio\nassert asyncio.run(f(3)) == 3", "assert asyncio.run(f(4)) == 4"]
    assert await share(code, tests) == 1.0
    assert await share(code, [{"args": [5], "expected": 5}], function="f") == 1.0
    source = """
        import asyncio, pytest
        async def test_one(): assert await f(1) == 1
        async def test_more(): assert await asyncio.gather(f(1), f(2)) == [1, 2]
        async def test_error():
            with pytest.raises(KeyError): await fail()
        async def test_wrong(): assert await f(1) == 2
    """
    found = await parts(code, textwrap.dedent(source))
    assert (found["unit_tests_passed"], found["unit_tests_total"]) == (3.0, 4.0)


@pytest.mark.parametrize(
    ("tests", "total"),
    [
        (["assert f(1) == 1", "assert f(2) == 2"], 2),
        ("assert f(1) == 1\nfor x in (2, 3): assert f(x) == x\n", 2),
        ("def test_a(): assert f(1) == 1\nclass TestB:\n    def test_b(self): assert f(1) == 1\n", 2),
        (
            "import pytest\n@pytest.mark.parametrize('n', [1, 2, 3])\ndef test_a(n): assert f(n) == n\n",
            3,
        ),
        ({"source": "def check(c):\n    assert c(1) == 1\n    assert c(2) == 2", "entry": "f"}, 1),
        ({"function": "f", "cases": [{"args": [1], "expected": 1}] * 3}, 3),
    ],
)
@on_sandbox
async def test_the_total_is_the_same_for_what_does_not_load(tests: Any, total: int) -> None:
    for code, passed in (("def f(x): return x", total), ("def f(x:", 0)):
        found = await parts(code, tests)
        assert (found["unit_tests_passed"], found["unit_tests_total"]) == (passed, total)


@on_sandbox
async def test_ending_ones_own_process_between_two_requests_fails_the_test() -> None:
    for milliseconds in (0, 1, 4, 8):
        code = f"""
            import os, threading
            threading.Timer({milliseconds} / 1000, os._exit, (0,)).start()
            def f(x): return 0
        """
        assert await share(code, ONE) == 0.0
        assert await share(code, [{"args": [1], "expected": 1}], function="f") == 0.0
    code = """
        import os, threading, time
        def f(x):
            if x == 1: threading.Timer(0.001, os._exit, (0,)).start()
            return x
    """
    waits = "import time\ntime.sleep(0.1)\n"
    tests = ["assert f(1) == 1", waits + "assert f(2) == 2", "assert f(3) == 3"]
    assert (await parts(code, tests))["unit_tests_passed"] >= 1.0  # the one after the end starts afresh
    gone = "import sys\ndef f(x):\n    del sys.modules['solution'].f\n    return 0"
    assert await share(gone, ["assert f(1) == 1", "assert f(2) == 2"]) == 0.0


# Whose fault --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tests",
    [
        "def test_a(: pass",
        ["assert f(1) == 1", "return 1"],
        "import no_such_module\ndef test_a(): pass",
        "x = 1",
        None,
        [],
        [1, "a"],
        {"a": 1},
    ],
)
@on_sandbox
async def test_broken_tests_are_our_failure(tests: Any) -> None:
    with pytest.raises(InfraError, match="unit_tests"):
        await share("def f(x): return 1", tests)


@pytest.mark.parametrize("error", [SessionLost("gone"), SandboxError("no worker")])
@on_sandbox
async def test_a_lost_sandbox_is_never_a_zero(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    calls = 0

    async def lost(*args: object, **named: object) -> None:
        nonlocal calls
        calls += 1
        raise error

    monkeypatch.setattr("ludus.sandbox.Sandbox.session", lost)
    with pytest.raises(InfraError) as caught:
        await share("def f(x): return 1", ONE)
    assert caught.value.boundary == "sandbox"
    assert calls == 2  # judging keeps no state: it is tried again


@on_sandbox
async def test_more_answers_than_sessions_wait_for_each_other() -> None:
    config = SandboxConfig(workers=1, max_sessions=3)
    try:
        async with asyncio.timeout(30):
            scores = await asyncio.gather(
                *(share("def f(x): return 1", ONE, sandbox=config) for _ in range(8))
            )
        assert scores == [1.0] * 8
    finally:
        await shared_sandbox(config).close()


@on_sandbox
@pytest.mark.slow
async def test_waiting_for_room_is_bounded_and_never_a_zero() -> None:
    config = SandboxConfig(workers=1, max_sessions=2)
    box = shared_sandbox(config)
    try:
        async with await box.session(), await box.session():
            for tests in (ONE, [{"stdin": "", "stdout": "1"}], [{"args": [1], "expected": 1}]):
                with pytest.raises(InfraError, match="max_sessions") as caught:
                    await share(
                        "def f(x): return 1", tests, function="f", sandbox=config, total_seconds=0.2
                    )
                assert caught.value.retriable
        assert await share("def f(x): return 1", ONE, sandbox=config) == 1.0
    finally:
        await box.close()


def test_options_are_checked() -> None:
    with pytest.raises(ConfigError, match="max_sessions of its sandbox to 2"):
        build_reward({"reward": "unit_tests", "sandbox": {"max_sessions": 1}})
    assert isinstance(build_reward({"reward": "unit_tests", "credit": "all"}), UnitTests)
    for options in ({"credit": "some"}, {"compare": "fuzzy"}, {"module": "not a name"}, {"timeout": 3}):
        with pytest.raises(ConfigError):
            build_reward({"reward": "unit_tests", **options})
    with pytest.raises(ConfigError, match="did you mean 'workers'"):
        build_reward({"reward": "unit_tests", "sandbox": {"worker": 3}})


# Pure parts ---------------------------------------------------------------------------------------

plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.complex_numbers(allow_nan=False)
    | st.fractions()
    | st.decimals(allow_nan=False)
    | st.builds(range, st.integers(), st.integers(), st.integers(1, 5)),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.integers() | st.text(), inner, max_size=3)
        | st.sets(st.integers() | st.text(), max_size=3)
        | st.frozensets(st.integers(), max_size=3)
    ),
    max_leaves=12,
)


@given(plain)
def test_plain_data_survives_the_way(value: Any) -> None:
    text = write(Encoder(refuse).encode(value))
    assert "\n" not in text and text.isascii()
    back = Decoder(no_handles).decode(read(text))
    assert type(back) is type(value)
    assert back == value


@given(
    st.recursive(
        st.none() | st.integers() | st.text(max_size=3),
        lambda x: st.lists(x) | st.dictionaries(st.sampled_from("ifcbatszdrqmeh?"), x),
    )
)
def test_no_answer_breaks_the_reader(data: Any) -> None:
    with contextlib.suppress(ValueError):
        Decoder(no_handles).decode(read(write(data)))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "NaN",
        "[" * 100_000,
        "9" * 5000,
        '{"i": "zz"}',
        '{"b": "*"}',
        '{"c": []}',
        '{"r": ["0x0"]}',
        '{"q": ["0x1"]}',
        '{"m": "sNaN"}',
        '{"d": [[[], 1]]}',
    ],
)
def test_forged_texts_are_no_data(text: str) -> None:
    with pytest.raises(ValueError):
        Decoder(no_handles).decode(read(text))


def test_keys_that_collide_on_purpose_are_refused() -> None:
    keys = [{"i": hex(n * (2**61 - 1))} for n in range(1, 30_000)]
    for data in ({"s": keys}, {"d": [[key, 0] for key in keys]}):
        with pytest.raises(ValueError, match="collide"):
            Decoder(no_handles).decode(data)
    assert len(Decoder(no_handles).decode({"s": list(range(30_000))})) == 30_000


@given(plain)
def test_a_value_is_the_same_as_itself(value: Any) -> None:
    assert equal_values(value, value)


@pytest.mark.parametrize(
    ("found", "expected", "same"),
    [
        (0.1 + 0.2, 0.3, True),
        (1, 1.0, True),
        (True, 1, False),
        ("1", 1, False),
        ([1, 2], (1, 2), True),
        ([1, 2], {1, 2}, False),
        ({"a": 1.0}, {"a": 1}, True),
        ({"a": 1}, {"a": 1, "b": 2}, False),
        (10**30, 10**30 + 1, False),
        (10**400, 1e300, False),
        (float("inf"), float("inf"), True),
        (float("inf"), 1e308, False),
        (1 + 2j, 1 + 2.0000000001j, True),
        (None, 0, False),
        (b"a", "a", False),
    ],
)
def test_equality_as_tests_mean_it(found: Any, expected: Any, same: bool) -> None:
    assert equal_values(found, expected) is same


@pytest.mark.parametrize(
    ("found", "expected", "manner", "tolerance", "same"),
    [
        ("1 2\n3", "1  2 3\n", "tokens", None, True),
        ("1 2\n3", "1 2\n3\n", "exact", None, True),
        ("1 2 \n3", "1 2\n3\n", "exact", None, False),
        ("1 2 \r\n3\n\n", "1 2\n3\n", "lines", None, True),
        ("1\n2", "1 2", "lines", None, False),
        ("0.3000001", "0.3", "tokens", 1e-6, True),
        ("0.31", "0.3", "tokens", 1e-6, False),
        ("nan", "1", "tokens", 1e9, False),
        ("1000000", "1000001", "tokens", 1e-6, False),
        ("+1000001", "1000001", "lines", 1e-6, True),
        ("1000001.0", "1000001", "tokens", 1e-6, True),
        ("", "1", "tokens", None, False),
    ],
)
def test_outputs(found: str, expected: str, manner: Any, tolerance: float | None, same: bool) -> None:
    assert equal_outputs(found, expected, manner, tolerance) is same


def test_the_last_fenced_block_counts() -> None:
    text = "```python\na\n```\nor\n~~~py\nb\n~~~\n```text\nc\n```"
    assert fenced_blocks(text) == [("python", "a"), ("py", "b"), ("text", "c")]
    assert code_of(text, ("python", "py")) == "b"
    assert code_of("no fence", ("python",)) == "no fence"
    assert code_of("```python\ncut of", ("python",)) == "cut of"
    assert code_of("````\n```\ninner\n```\n````", ("python",)) == "```\ninner\n```"


def test_forms_of_tests() -> None:
    assert parse_tests('{"inputs": ["1"], "outputs": [["2", "3"]]}') == [StdinCase("1", "2\n3")]
    assert parse_tests(["a", "b"]) == SourceTests(("a", "b"), None, True)
    assert parse_tests([{"expected": 1}], "f") == [CallCase("f", (), 1)]
    assert parse_tests("[1, 2] == [1]") == SourceTests(("[1, 2] == [1]",))
    for wrong in ([{"expected": 1}], {"inputs": [1], "outputs": []}, [{"stdin": "x"}], [], 5):
        with pytest.raises(ValueError):
            parse_tests(wrong)


def test_restore_keeps_identity() -> None:
    inner: list[int] = [1]
    items: list[Any] = [inner, 2]
    restore(items, [[1, 5], 3, 4])
    assert items == [[1, 5], 3, 4] and items[0] is inner
