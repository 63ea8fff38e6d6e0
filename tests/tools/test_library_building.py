"""What a recipe may write for tools, and what it is told when it is wrong."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ludus.core import ConfigError, Task, ToolCall, ToolContext, ToolResult, ToolSet, ToolSpec
from ludus.tools import Tool, tool
from ludus.tools.library import TOOLS, build_toolset

CONTEXT = ToolContext("e", Task.of("?"))


@tool
def shout(text: str) -> str:
    """Say it loudly."""
    return text.upper()


class Counter(Tool):
    """Count from a start."""

    def __init__(self, start: int = 0, step: int = 1) -> None:
        self.start, self.step = start, step
        super().__init__()

    def run(self, times: int) -> int:
        return self.start + times * self.step


class Elsewhere:
    """A tool set that records how it was made."""

    def __init__(self, address: str, token: str | None = None) -> None:
        self.address, self.token = address, token

    async def open(self, context: ToolContext) -> None: ...

    async def list(self, context: ToolContext) -> Sequence[ToolSpec]:
        return [ToolSpec("far", "", {})]

    async def call(self, call: ToolCall, context: ToolContext) -> ToolResult:
        return ToolResult(f"{self.address} {self.token}")

    async def close(self, context: ToolContext) -> None: ...


async def names(tools: ToolSet) -> list[str]:
    return [spec.name for spec in await tools.list(CONTEXT)]


async def test_short_names_references_and_objects_make_one_set(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def twice(n: int) -> int:\n    return 2 * n\n")
    tools = build_toolset(["calculator", f"{tmp_path}/mine.py:twice", shout, "python", "files"])
    assert await names(tools) == [
        *("calculator", "twice", "shout", "python"),
        *("view_file", "create_file", "replace_in_file", "insert_in_file"),
    ]
    await tools.open(CONTEXT)
    assert (await tools.call(ToolCall("twice", {"n": 4}), CONTEXT)).content == "8"
    assert (await tools.call(ToolCall("calculator", {"expression": "6*7"}), CONTEXT)).content == "42"
    await tools.close(CONTEXT)


async def test_one_thing_needs_no_list_and_none_is_no_tools() -> None:
    assert await names(build_toolset("calculator")) == ["calculator"]
    assert await names(build_toolset(shout)) == ["shout"]
    assert await names(build_toolset(None)) == []
    given = Elsewhere("x")
    assert build_toolset(given) is given


async def test_tables_give_options_to_classes(tmp_path: Path) -> None:
    tools = build_toolset({"tool": f"{__name__}:Counter", "start": 10, "step": 5})
    assert (await tools.call(ToolCall("counter", {"times": 2}), CONTEXT)).content == "20"
    renamed = build_toolset([{"tool": "python", "name": "run_python", "seconds": 3}])
    assert await names(renamed) == ["run_python"]


async def test_an_address_is_a_tool_server(monkeypatch: pytest.MonkeyPatch) -> None:
    remote = ModuleType("ludus.tools.remote")
    remote.RemoteTools = Elsewhere  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ludus.tools.remote", remote)
    tools = build_toolset(["http://host:1", "calculator"])
    assert await names(tools) == ["calculator", "far"]
    with_token = build_toolset({"tool": "https://host:2", "token": "secret"})
    assert (await with_token.call(ToolCall("far"), CONTEXT)).content == "https://host:2 secret"
    with pytest.raises(ConfigError, match="did you mean 'token'"):
        build_toolset({"tool": "http://host:1", "tokn": "x"})


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("pyhton", "Did you mean 'python'"),
        ({"tool": "python", "second": 3}, "did you mean 'seconds'"),
        ({"name": "python"}, "key 'tool'"),
        ({"tool": "calculator", "digits": 3}, "takes no options"),
        ({"tool": f"{__name__}:Counter", "stat": 3}, "did you mean 'start'"),
        ("no_such_module_at_all:x", "no module"),
        (3, "neither a function"),
        ([["python"]], "neither a function"),
        (["calculator", "calculator"], "two tools are called 'calculator': name it once"),
        ("sql", r"database: must be given(.|\n)*tool = \"sql\"(.|\n)*serve tools --config"),
        (["python", {"tool": "bash", "name": "python"}], "two tools are called"),
    ],
)
def test_mistakes_are_named(spec: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build_toolset(spec)


def test_every_short_name_loads() -> None:
    assert set(TOOLS) == {
        "python", "bash", "files", "sql", "calculator", "search", "web_search", "visit"
    }  # fmt: skip
    for name in TOOLS:
        assert TOOLS.load(name) is not None
