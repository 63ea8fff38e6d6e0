"""One call: who runs it, for how long, and whose fault it is."""

from __future__ import annotations

import asyncio
import importlib
import json
import math
import re
import sys
import threading
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import process_samples
import pytest

import ludus
from ludus.core import (
    Boundary,
    ConfigError,
    Failure,
    Fault,
    InfraError,
    Task,
    ToolContext,
    ToolFault,
    ToolResult,
)
from ludus.remote.threads import shared_threads
from ludus.tools import Tool, tool
from ludus.tools.calling import forget_errors
from ludus.tools.tool import Limiter

CONTEXT = ToolContext("episode", Task.of("go"))


async def call(one: Tool, context: ToolContext = CONTEXT, **arguments: Any) -> ToolResult:
    return await one.call(arguments, context)


async def until(condition, seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never happened"
        await asyncio.sleep(0.01)


def both_kinds(body):
    """The same tool as a sync and as an async function."""

    def plain() -> Any:
        return body()

    async def later() -> Any:
        await asyncio.sleep(0)
        return body()

    return [tool(retries=1)(plain), tool(retries=1)(later)]


def raiser(error: BaseException):
    def body():
        raise error

    return body


@pytest.mark.parametrize("one", both_kinds(lambda: {"a": 1}))
async def test_sync_and_async_functions_give_results(one: Tool):
    result = await call(one)
    assert (result.content, result.fault) == ('{"a":1}', None)
    assert result.seconds > 0


@pytest.mark.parametrize("error", [ValueError("no such key"), SystemExit(2), KeyboardInterrupt("stop")])
async def test_what_a_tool_raises_is_told_to_the_model(error: BaseException):
    for one in both_kinds(raiser(error)):
        result = await call(one)
        assert result.fault is Fault.TOOL_RAISED
        assert result.content.startswith(type(error).__name__) and str(error) in result.content


async def test_long_and_broken_exceptions_stay_short():
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    for error in (ValueError("x" * 10**7 + "\udc80"), Mute()):
        for one in both_kinds(raiser(error)):
            content = (await call(one)).content
            assert content.encode() and len(content) <= 2_000


async def test_a_tool_fault_keeps_its_kind():
    for one in both_kinds(raiser(ToolFault("only letters, please", Fault.BAD_ARGUMENTS))):
        assert await call(one) == ToolResult(
            "only letters, please", fault=Fault.BAD_ARGUMENTS, seconds=pytest.approx(0, abs=30)
        )


@pytest.mark.parametrize(
    ("error", "boundary"),
    [
        (ConnectionResetError("peer"), Boundary.TOOL),
        (InfraError(Boundary.SANDBOX, "lost"), Boundary.SANDBOX),
    ],
)
async def test_failures_of_ours_are_retried_and_then_raised(error: Exception, boundary: Boundary):
    for kind in (0, 1):
        attempts: list[int] = []

        def body(attempts=attempts):
            attempts.append(1)
            raise error

        with pytest.raises(InfraError) as caught:
            await call(both_kinds(body)[kind])
        assert len(attempts) == caught.value.attempts == 2
        assert caught.value.boundary is boundary


async def test_a_failure_that_passes_is_not_seen_by_the_model():
    attempts: list[int] = []

    @tool
    def flaky() -> str:
        attempts.append(1)
        if len(attempts) < 3:
            raise ConnectionError("not yet")
        return "there"

    assert (await call(flaky)).content == "there"


async def test_a_reward_that_is_no_number_is_our_failure():
    @tool
    def f() -> ToolResult:
        return ToolResult("x", reward=float("nan"))

    with pytest.raises(InfraError, match="nan"):
        await call(f)


async def test_a_hanging_sync_tool_is_the_models_fault_and_blocks_nobody():
    let_go = threading.Event()

    @tool(timeout=0.1)
    def hang() -> None:
        let_go.wait()

    @tool
    def quick() -> str:
        return "quick"

    before = shared_threads().abandoned
    results = await asyncio.gather(*(call(hang) for _ in range(20)), *(call(quick) for _ in range(20)))
    assert [r.fault for r in results[:20]] == [Fault.TOOL_TIMEOUT] * 20
    assert [r.content for r in results[20:]] == ["quick"] * 20
    assert "0.1 seconds" in results[0].content
    let_go.set()
    await until(lambda: shared_threads().abandoned <= before)


async def test_a_hanging_async_tool_is_cancelled():
    ended: list[str] = []

    @tool(timeout=0.05)
    async def hang() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            ended.append("cleaned up")

    assert (await call(hang)).fault is Fault.TOOL_TIMEOUT
    assert ended == ["cleaned up"]


async def test_a_tool_that_raises_timeout_or_cancels_itself_did_raise():
    @tool
    async def times_out() -> None:
        raise TimeoutError("the server is slow")

    @tool
    async def cancels() -> None:
        raise asyncio.CancelledError

    assert (await call(times_out)).fault is Fault.TOOL_RAISED
    assert (await call(cancels)).fault is Fault.TOOL_RAISED


async def test_cancelling_a_call_stops_the_coroutine_and_frees_its_slot():
    running: list[int] = []

    @tool(max_concurrency=1)
    async def work(n: int) -> int:
        running.append(n)
        try:
            if n == 0:
                await asyncio.sleep(3600)
        finally:
            running.remove(n)
        return n

    first = asyncio.create_task(call(work, n=0))
    await until(lambda: running == [0])
    waiting = [asyncio.create_task(call(work, n=n)) for n in (1, 2, 3)]
    await asyncio.sleep(0.01)
    waiting[0].cancel()
    first.cancel()
    done = await asyncio.gather(first, *waiting, return_exceptions=True)
    assert [isinstance(result, asyncio.CancelledError) for result in done] == [True, True, False, False]
    assert running == []
    assert (await call(work, n=4)).content == "4"


@pytest.mark.parametrize("is_async", [False, True])
async def test_no_more_calls_run_at_once_than_allowed(is_async: bool):
    lock, now, most = threading.Lock(), 0, 0

    def enter(by: int) -> None:
        nonlocal now, most
        with lock:
            now += by
            most = max(most, now)

    async def slow_async() -> None:
        enter(1)
        await asyncio.sleep(0.005)
        enter(-1)

    def slow_sync() -> None:
        enter(1)
        time.sleep(0.005)
        enter(-1)

    one = tool(max_concurrency=3)(slow_async if is_async else slow_sync)
    await asyncio.gather(*(call(one) for _ in range(20)))
    assert most == 3


async def test_a_slot_granted_to_somebody_who_is_just_cancelled_goes_to_the_next():
    limiter, order = Limiter(1), []

    async def hold(name: str) -> None:
        async with limiter.slot():
            order.append(name)

    async with limiter.slot():
        waiting = [asyncio.create_task(hold(name)) for name in ("cancelled", "next")]
        await asyncio.sleep(0.01)
    waiting[0].cancel()  # the slot is on its way to it
    await asyncio.wait_for(waiting[1], 20)
    assert order == ["next"] and waiting[0].cancelled()


def test_the_limit_holds_over_event_loops():
    lock, now, most = threading.Lock(), 0, 0

    @tool(max_concurrency=2)
    async def slow() -> None:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        await asyncio.sleep(0.01)
        with lock:
            now -= 1

    async def several() -> None:
        await asyncio.gather(*(call(slow) for _ in range(5)))

    threads = [threading.Thread(target=lambda: asyncio.run(several())) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert most == 2 and now == 0


async def test_huge_and_invalid_results_are_cut_and_cleaned():
    for one in both_kinds(lambda: "\udcff" + "x" * 100_000_000):
        content = (await call(one)).content
        assert len(content) <= 20_000 and "characters left out" in content
        content.encode()
    for one in both_kinds(lambda: b"\xff\x00ok"):
        assert (await call(one)).content == "\\xff\x00ok"


async def test_a_sync_function_that_returns_a_coroutine_is_awaited():
    async def inner() -> str:
        return "inner"

    assert (await call(tool(name="f")(lambda: inner()))).content == "inner"


# Environments and context --------------------------------------------------------------------------


class Cat: ...


class Dog: ...


@tool
def pet(env: Cat, times: int = 1) -> str:
    return type(env).__name__ * times


@tool
def pet_any(env) -> str:
    return type(env).__name__


@tool
def where(context: ToolContext) -> str:
    return context.episode


async def test_a_tool_gets_the_episodes_environment_and_context():
    zoo = ToolContext("e7", CONTEXT.task, {"dog": Dog(), "cat": Cat()})
    assert (await call(pet, zoo, times=2)).content == "CatCat"
    assert (await call(pet_any, ToolContext("e", CONTEXT.task, {"dog": Dog()}))).content == "Dog"
    assert (await call(where, zoo)).content == "e7"
    assert (await call(pet, zoo, env=3)).fault is Fault.BAD_ARGUMENTS


@pytest.mark.parametrize(
    ("one", "envs", "words"),
    [
        (pet, {}, "type Cat.*has none"),
        (pet_any, {"a": Cat(), "b": Dog()}, "type hint of 'env'"),
        (pet, {"a": Dog(), "b": Dog()}, "type Cat"),
        (pet, {"a": Cat(), "b": Cat()}, "type hint"),
    ],
)
def test_an_environment_that_cannot_be_found_is_a_config_error(one: Tool, envs: Any, words: str):
    with pytest.raises(ConfigError, match=words):
        one.check(ToolContext("e", CONTEXT.task, envs))


# Processes ----------------------------------------------------------------------------------------


async def test_a_process_tool_gives_its_result_from_another_process():
    result = await call(process_samples.add, pair={"a": 2})
    assert result.content.startswith("3 in ")
    assert result.content != f"3 in {__import__('os').getpid()}"
    assert (result.reward, result.terminated) == (0.5, True)
    assert (await call(process_samples.add_later, a=2)).content == "3"
    assert (await call(process_samples.Shout("!"), text="hey")).content == "HEY!"
    assert process_samples.add(process_samples.Pair(1)).reward == 0.5


async def test_a_hanging_process_tool_is_killed():
    assert (await call(process_samples.hang)).fault is Fault.TOOL_TIMEOUT


async def test_a_tool_that_kills_its_process_is_our_failure_after_retries(tmp_path: Path):
    with pytest.raises(InfraError, match="SIGKILL") as caught:
        await call(process_samples.die, log=str(tmp_path / "log"))
    assert caught.value.boundary is Boundary.TOOL
    assert caught.value.attempts == 2
    assert (tmp_path / "log").read_text() == "died\n" * 2


async def test_a_process_that_dies_once_is_replaced_and_nobody_notices(tmp_path: Path):
    assert (await call(process_samples.die_once, log=str(tmp_path / "log"))).content == "recovered"


@pytest.mark.parametrize(
    ("how", "fault", "words"),
    [
        ("raise", Fault.TOOL_RAISED, "LookupError: nothing there"),
        ("fault", Fault.LIMIT, "say please"),
        ("exit", Fault.TOOL_RAISED, "SystemExit: bye"),
        ("huge", None, "99,980,0"),
        ("bytes", None, "ok \\xff\\xfe"),
        ("unpicklable", None, "function"),
    ],
)
async def test_a_process_tool_may_misbehave(how: str, fault: Fault | None, words: str):
    result = await call(process_samples.misbehave, how=how)
    assert result.fault is fault
    assert words in result.content


async def test_an_infra_error_crosses_the_process_boundary():
    with pytest.raises(InfraError, match="sandbox is gone") as caught:
        await call(process_samples.misbehave, how="infra")
    assert caught.value.boundary is Boundary.SANDBOX


def test_process_is_refused_where_it_cannot_work():
    with pytest.raises(ConfigError, match="copy of its object"):

        class Thing:
            @tool(process=True)
            def act(self) -> None: ...

    with pytest.raises(ConfigError, match="another process"):

        class WithEnv(Tool):
            process = True

            def run(self, env: Cat) -> None: ...

        WithEnv()


async def test_a_tool_of_a_file_without_import_path_runs_in_a_process(tmp_path: Path):
    from ludus.core.registry import import_object

    file = tmp_path / "my tools.py"
    file.write_text(
        "from dataclasses import dataclass\n"
        "from ludus.tools import tool\n"
        "@dataclass\nclass N:\n    n: int\n"
        "@tool(process=True)\ndef double(n: N) -> int:\n    return 2 * n.n\n"
    )
    double = import_object(f"{file}:double")
    assert (await call(double, n={"n": "21"})).content == "42"
    assert "double" not in sys.modules


# -- whose an exception is -----------------------------------------------------------------------------------

PRICES = {"tea": 2}


@pytest.fixture
def shown(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    forget_errors()
    return caplog


def missing_name(text: str) -> Any:
    return undefined_name  # noqa: F821


def missing_attribute(text: str) -> Any:
    return asyncio.no_such_function(text)


def wrong_call(count: int) -> Any:
    return missing_name()  # type: ignore[call-arg]


def wrong_keyword(count: int) -> Any:
    return missing_name("tea", txt="tea")  # type: ignore[call-arg]


def wrapped(*args: Any, **kwargs: Any) -> Any:
    return missing_name(*args, txt="tea", **kwargs)


wrapped.__wrapped__ = missing_name  # type: ignore[attr-defined]


def missing_module(text: str) -> Any:
    import no_such_module  # noqa: F401


async def missing_later(text: str) -> Any:
    await asyncio.sleep(0)
    return Cat().no_such_method()  # type: ignore[attr-defined]


def missing_on_a_class(text: str) -> Any:
    return object.no_such_thing


async def missing_name_later(text: str) -> Any:
    await asyncio.sleep(0)
    return undefined_name  # noqa: F821


@pytest.mark.parametrize("function", [missing_name, missing_module, missing_name_later])
async def test_a_name_or_module_that_a_tool_lacks_is_not_charged_to_the_model(
    function: Any, shown: pytest.LogCaptureFixture
) -> None:
    made = tool(function)
    for _ in range(3):
        with pytest.raises(InfraError) as raised:
            await call(made, text="tea")
    line = function.__code__.co_firstlineno + (2 if function is missing_name_later else 1)
    assert f"{Path(__file__).name}:{line} in {function.__name__}" in str(raised.value)
    failure = Failure.of(raised.value, Boundary.AGENT)
    assert failure.boundary is Boundary.TOOL and str(line) in failure.message
    assert failure.kind in ("NameError", "ModuleNotFoundError")
    (told,) = [record.getMessage() for record in shown.records]
    assert "Traceback" in told and f"line {line}, in {function.__name__}" in told, "once, with its place"


async def test_a_bug_in_a_worker_process_is_not_charged_to_the_model(
    shown: pytest.LogCaptureFixture,
) -> None:
    with pytest.raises(InfraError, match=r"process_samples.py:\d+ in broken") as raised:
        await call(process_samples.broken, text="tea")
    assert Failure.of(raised.value, Boundary.AGENT).kind == "NameError"
    assert "Traceback" in shown.text and "return undefined_name[text]" in shown.text


PACKAGE = """
from ludus.tools import tool
from .parts import Shop
@tool
def price(item: str) -> str:
    return undefined_name[item]
@tool
def stock(item: str) -> str:
    return Shop().stok
@tool
def look_up(item: str) -> str:
    return {"tea": {"price": 2}}.get(item)["price"]
"""


@pytest.mark.parametrize("folder", ["site-packages", Path(ludus.__file__).parent])
async def test_the_package_of_a_tool_is_user_code_wherever_it_is(
    folder: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    name = f"shop_{tmp_path.name}"
    if folder == "site-packages":
        home = tmp_path / folder / name
        home.mkdir(parents=True)
        (home / "__init__.py").write_text("")
        (home / "tools.py").write_text(PACKAGE)
        (home / "parts.py").write_text("class Shop:\n    stock = 3\n")
        monkeypatch.syspath_prepend(home.parent)
        module = vars(importlib.import_module(f"{name}.tools"))
    else:  # a neighbour whose name begins as that of Ludus does
        module = {"__name__": name, "Shop": Cat}
        code = PACKAGE.replace("from .parts import Shop", "")
        exec(compile(code, f"{folder}_shop/tools.py", "exec"), module)
    with pytest.raises(InfraError, match=r"NameError: .*tools.py:6 in price") as raised:
        await call(module["price"], item="tea")
    assert Failure.of(raised.value, Boundary.AGENT).kind == "NameError"
    forget_errors()
    assert (await call(module["stock"], item="tea")).fault is Fault.TOOL_RAISED
    assert re.search(r"AttributeError: .*tools.py:9 in stock", caplog.text), "told with its place"
    assert (await call(module["look_up"], item="cake")).fault is Fault.TOOL_RAISED


def lookup(name: str) -> int:
    return PRICES[name]


def on_purpose(name: str) -> int:
    raise TypeError("a name has letters only")


def refused(name: str) -> int:
    raise ToolFault("no")


def named(name: str) -> int:
    raise ValueError("a name has ten letters")


def imported(name: str) -> Any:
    return importlib.import_module(name)


def attribute(name: str) -> Any:
    return getattr(PRICES, name)


def evaluated(code: str) -> Any:
    return eval(code)


def summed(items: list) -> Any:
    return sum(items)


# what Python says of mistakes in the code it says of arguments that the code cannot use, too


def price_in_a_table(name: str) -> Any:
    return {"tea": {"price": 2}}.get(name)["price"]  # type: ignore[index]


def order_number(text: str) -> Any:
    return re.search(r"order (\d+)", text).group(1)  # type: ignore[union-attr]


def query(payload: str) -> Any:
    return json.loads(payload)["query"].upper()


def is_before(first: str, second: str) -> Any:
    return datetime.fromisoformat(first) < datetime.fromisoformat(second)


def count_and_nothing(count: int) -> Any:
    return count + None  # type: ignore[operator]


def operation(name: str) -> Any:
    return getattr(math, name.lower())


def passed_on(tables: list) -> Any:
    return [lookup(**table) for table in tables]


def handled(payload: str) -> Any:
    return lookup(**json.loads(payload))


def constructed(payload: str) -> Any:
    return Failure(Boundary.TOOL, *json.loads(payload))


AMBIGUOUS: list[tuple[Any, dict[str, Any]]] = [
    (missing_attribute, {"text": "tea"}),
    (missing_later, {"text": "tea"}),
    (missing_on_a_class, {"text": "tea"}),
    (wrong_call, {"count": 1}),
    (wrong_keyword, {"count": 1}),
    (wrapped, {"text": "tea"}),
    (attribute, {"name": "no_such_thing"}),
    (operation, {"name": "Squareroot"}),
    (lookup, {"name": "coffee"}),
    (on_purpose, {"name": "1"}),
    (price_in_a_table, {"name": "coffee"}),
    (order_number, {"text": "which one?"}),
    (query, {"payload": "[1, 2]"}),
    (query, {"payload": "3"}),
    (query, {"payload": '{"query": 3}'}),
    (is_before, {"first": "2024-01-01", "second": "2024-01-01T00:00:00+00:00"}),
    (count_and_nothing, {"count": 1}),
    (summed, {"items": ["a"]}),
    (passed_on, {"tables": [{}]}),
    (handled, {"payload": '{"nam": "tea"}'}),
    (handled, {"payload": "{}"}),
    (constructed, {"payload": "[]"}),
]


@pytest.mark.parametrize(("function", "given"), AMBIGUOUS)
async def test_an_error_that_bad_arguments_may_cause_is_the_models_and_shown(
    function: Any, given: dict[str, Any], shown: pytest.LogCaptureFixture
) -> None:
    for _ in range(12):
        result = await call(tool(function), **given)
        assert result.fault is Fault.TOOL_RAISED and __file__ not in result.content
    assert shown.text.count("Traceback") == 1 and "10 times so far" in shown.text
    assert f"{function.__name__!r} has raised in each of its first 10 calls" in shown.text


async def test_a_search_without_a_match_is_told_in_words() -> None:
    for one in both_kinds(lambda: next(n for n in (1, 2) if n > 2)):
        result = await call(one)
        assert result.fault is Fault.TOOL_RAISED
        assert result.content == "StopIteration: there is no such item (next() found none)"
    result = await call(process_samples.misbehave, how="next")
    assert result.content.startswith("StopIteration: there is no such item")


@pytest.mark.parametrize(
    ("function", "given"),
    [
        (refused, {"name": "x"}),
        (named, {"name": "x"}),
        (imported, {"name": "no_such_module"}),
        (evaluated, {"code": "undefined_name + 1"}),
        (evaluated, {"code": "1 +"}),
        (evaluated, {"code": "None.x"}),
    ],
)
async def test_what_is_raised_on_purpose_and_what_text_or_libraries_raise_is_the_models(
    function: Any, given: dict[str, Any], shown: pytest.LogCaptureFixture
) -> None:
    result = await call(tool(function), **given)
    assert result.fault is Fault.TOOL_RAISED and __file__ not in result.content
    assert "Traceback" not in shown.text, "its own doing needs no trace"


async def test_an_accident_that_may_be_either_is_shown_once_and_counted(
    shown: pytest.LogCaptureFixture,
) -> None:
    def price(name: str) -> int:
        return PRICES["missing"]

    made = tool(price)
    for _ in range(12):
        assert (await call(made, name="tea")).fault is Fault.TOOL_RAISED
    assert shown.text.count("Traceback") == 1 and "10 times so far" in shown.text
    assert "'price' has raised in each of its first 10 calls" in shown.text


async def test_a_tool_says_whose_its_errors_and_time_outs_are() -> None:
    with pytest.raises(InfraError, match="KeyError: 'coffee'"):
        await call(tool(on_error="failure", retries=0)(lookup), name="coffee")
    assert (await call(tool(on_error="failure")(refused), name="x")).fault is Fault.TOOL_RAISED
    assert (await call(tool(on_error="fault")(missing_name), text="x")).fault is Fault.TOOL_RAISED
    with pytest.raises(InfraError, match="no_such_function"):
        await call(tool(on_error="failure", retries=0)(missing_attribute), text="x")

    async def slow() -> None:
        await asyncio.sleep(60)

    assert (await call(tool(timeout=0.01)(slow))).fault is Fault.TOOL_TIMEOUT
    with pytest.raises(InfraError, match=r"longer than 0\.01 seconds") as raised:
        await call(tool(timeout=0.01, on_timeout="failure", retries=1)(slow))
    assert raised.value.boundary is Boundary.TOOL and raised.value.attempts == 2
    with pytest.raises(ConfigError, match="on_timeout cannot be 'never'"):
        tool(on_timeout="never")(slow)  # type: ignore[call-overload]
