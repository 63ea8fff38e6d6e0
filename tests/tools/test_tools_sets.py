"""Tool sets: what an episode opens, lists, calls and closes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from ludus.core import (
    ByteTokenizer,
    ConfigError,
    Fault,
    Task,
    ToolCall,
    ToolContext,
    ToolResult,
    ToolSet,
    ToolSpec,
)
from ludus.tools import CombinedTools, LocalTools, Tool, as_toolset, tool

CONTEXT = ToolContext("episode", Task.of("go"))


def add(a: int, b: int) -> int:
    """Add."""
    return a + b


@tool
def multiply(a: int, b: int) -> int:
    """Multiply."""
    return a * b


class Growing:
    """A tool set whose list changes during the episode, as that of a server may."""

    def __init__(self, name: str, log: list[str] | None = None, *, fails: str = "") -> None:
        self.name, self.fails = name, fails
        self.log = [] if log is None else log
        self.names = [name]

    async def open(self, context: ToolContext) -> None:
        self._do("open")

    async def list(self, context: ToolContext) -> Sequence[ToolSpec]:
        return [ToolSpec(name, "", {"type": "object", "properties": {}}) for name in self.names]

    async def call(self, call: ToolCall, context: ToolContext) -> ToolResult:
        self.names.append(f"{call.name}_more")
        return ToolResult(f"{self.name} did {call.name}")

    async def close(self, context: ToolContext) -> None:
        self._do("close")

    def _do(self, what: str) -> None:
        self.log.append(f"{what} {self.name}")
        if self.fails == what:
            raise RuntimeError(f"{what} {self.name} failed")


async def names(tools: ToolSet) -> list[str]:
    return [spec.name for spec in await tools.list(CONTEXT)]


async def test_functions_tools_and_sets_make_one_set():
    tools = as_toolset([add, multiply, Growing("grow")])
    await tools.open(CONTEXT)
    assert await names(tools) == ["add", "multiply", "grow"]
    assert (await tools.call(ToolCall("add", {"a": "1", "b": 2}), CONTEXT)).content == "3"
    assert (await tools.call(ToolCall("multiply", {"a": 2, "b": 3}), CONTEXT)).content == "6"
    assert (await tools.call(ToolCall("grow"), CONTEXT)).content == "grow did grow"
    await tools.close(CONTEXT)


async def test_one_thing_alone_will_do():
    for things in (add, multiply, [add], (multiply,), LocalTools([add])):
        assert len(await names(as_toolset(things))) == 1
    assert await names(as_toolset(None)) == []
    assert isinstance(as_toolset(add), ToolSet)


def test_what_is_no_tool_is_refused():
    class Search(Tool):
        def run(self, q: str) -> str:
            return q

    with pytest.raises(ConfigError, match="instance"):
        as_toolset([Search])
    with pytest.raises(ConfigError, match="neither"):
        as_toolset([3])


async def test_an_unknown_tool_is_answered_with_the_names_there_are():
    for tools in (as_toolset([add, multiply]), as_toolset([add, multiply, Growing("grow")])):
        await tools.open(CONTEXT)
        result = await tools.call(ToolCall("multiplyy"), CONTEXT)
        assert result.fault is Fault.UNKNOWN_TOOL
        assert "Did you mean 'multiply'?" in result.content and "add" in result.content
        huge = await tools.call(ToolCall("x\udc80" * 10**6), CONTEXT)
        assert len(huge.content.encode()) < 1_000


async def test_a_malformed_call_is_answered_with_its_problem():
    broken = ToolCall("", fault=Fault.MALFORMED_CALL, problem="The JSON is not closed.")
    for tools in (as_toolset([add]), as_toolset([add, Growing("grow")])):
        result = await tools.call(broken, CONTEXT)
        assert (result.content, result.fault) == ("The JSON is not closed.", Fault.MALFORMED_CALL)


async def test_the_list_may_change_during_an_episode():
    tools = CombinedTools([LocalTools([add]), Growing("grow")])
    await tools.open(CONTEXT)
    assert (await tools.call(ToolCall("grow_more"), CONTEXT)).fault is Fault.UNKNOWN_TOOL
    await tools.call(ToolCall("grow"), CONTEXT)
    assert (await tools.call(ToolCall("grow_more"), CONTEXT)).content == "grow did grow_more"
    assert "grow_more_more" in await names(tools)


async def test_duplicate_names_are_refused():
    with pytest.raises(ConfigError, match="'add'"):
        as_toolset([add, tool(name="add")(multiply.function)])
    log: list[str] = []
    twins = CombinedTools([Growing("same", log), Growing("same", log)])
    with pytest.raises(ConfigError, match="'same'"):
        await twins.open(CONTEXT)
    assert log == ["open same", "open same", "close same", "close same"]


async def test_a_set_that_cannot_open_closes_those_before_it():
    log: list[str] = []
    tools = CombinedTools([Growing("a", log), Growing("b", log, fails="open"), Growing("c", log)])
    with pytest.raises(RuntimeError, match="open b"):
        await tools.open(CONTEXT)
    assert log == ["open a", "open b", "close a"]


async def test_all_sets_are_closed_even_if_one_fails():
    log: list[str] = []
    tools = CombinedTools([Growing("a", log), Growing("b", log, fails="close")])
    await tools.open(CONTEXT)
    with pytest.raises(RuntimeError, match="close b"):
        await tools.close(CONTEXT)
    assert log[2:] == ["close b", "close a"]


async def test_missing_environments_are_noticed_when_the_episode_opens():
    @tool
    def act(env) -> None: ...

    class World:
        @tool
        def act(self) -> None: ...

    with pytest.raises(ConfigError, match="needs an environment"):
        await as_toolset([act]).open(CONTEXT)
    with pytest.raises(ConfigError, match=r"instance\.act"):
        await as_toolset([World.act]).open(CONTEXT)


async def test_results_are_limited_in_tokens_too():
    encode = ByteTokenizer().encode

    @tool(max_tokens=100)
    def speak() -> str:
        return "é" * 5_000

    result = await as_toolset([speak], encode=encode).call(ToolCall("speak"), CONTEXT)
    assert 90 < len(encode(result.content)) <= 100
