"""What a task says about its tests.

    "def test_a(): ..."                              source, see `inside.seen`
    ["assert f(1) == 2", "def test_b(): ..."]        sources, each with tests or to prepare those after it
    [{"stdin": "1 2", "stdout": "3"}]                programs that read and write ("input"/"output" as well)
    [{"args": [1, 2], "kwargs": {}, "expected": 3}]  calls of `function`
    {"function": "f", "cases": [...]}                the same with what the cases share
    {"inputs": [...], "outputs": [...], "fn_name": "f"}    as APPS has it; without fn_name for stdin
    {"source": "...", "entry": "f"}                  source that is given the function, as HumanEval has it

All of these may also be JSON text. `ValueError` says what cannot be read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ludus.core.task import Task

MOST_CASES = 1_000


@dataclass(frozen=True, slots=True)
class StdinCase:
    """What the program reads, and what it should write."""

    stdin: str
    stdout: str


@dataclass(frozen=True, slots=True)
class CallCase:
    """What a function is called with, and what it should return."""

    function: str
    args: tuple[Any, ...]
    expected: Any
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SourceTests:
    """Tests that are Python. With `one_each`, the statements of a source are one test together."""

    sources: tuple[str, ...]
    entry: str | None = None
    one_each: bool = False


Tests = list[StdinCase] | list[CallCase] | SourceTests


def tests_of(task: Task, key: str, function: str | None = None) -> Tests:
    """The tests that a task holds in its metadata under `key`, or as its target."""
    raw = task.metadata.get(key, task.target)
    entry = function or _text_or_none(task.metadata.get("entry_point", task.metadata.get("function")))
    if raw is None:
        raise ValueError(f"the task has no tests: neither metadata {key!r} nor a target")
    return parse_tests(raw, entry)


def parse_tests(raw: Any, function: str | None = None) -> Tests:
    """Tests in one of the forms above."""
    raw = _from_json(raw)
    if isinstance(raw, str):
        return SourceTests((raw,), function)
    if isinstance(raw, Mapping):
        return _from_table(raw, function)
    if not isinstance(raw, Sequence) or not raw:
        raise ValueError(f"tests are text, a list or a table, and not empty: {raw!r:.80}")
    if len(raw) > MOST_CASES:
        raise ValueError(f"there are {len(raw)} tests; at most {MOST_CASES}")
    if all(isinstance(one, str) for one in raw):
        return SourceTests(tuple(raw), function, one_each=True)
    if all(isinstance(one, Mapping) and "expected" in one for one in raw):
        return [_call_case(one, function) for one in raw]
    if all(isinstance(one, Mapping) for one in raw):
        return [_stdin_case(one) for one in raw]
    raise ValueError("tests are either all text or all tables")


def _from_json(raw: Any) -> Any:
    if not isinstance(raw, str) or not raw.lstrip().startswith(("{", "[")):
        return raw
    try:
        found = json.loads(raw)
    except ValueError:
        return raw
    return found if isinstance(found, list | dict) and found else raw


def _from_table(raw: Mapping[str, Any], function: str | None) -> Tests:
    function = _text_or_none(raw.get("function", raw.get("fn_name"))) or function
    if "source" in raw:
        return SourceTests((str(raw["source"]),), _text_or_none(raw.get("entry")) or function)
    if "cases" in raw:
        return parse_tests(raw["cases"], function)
    if "inputs" in raw and "outputs" in raw:
        inputs, outputs = list(raw["inputs"]), list(raw["outputs"])
        if len(inputs) != len(outputs) or not inputs:
            raise ValueError(f"there are {len(inputs)} inputs and {len(outputs)} outputs")
        if function is None:
            return [StdinCase(_joined(i), _joined(o)) for i, o in zip(inputs, outputs, strict=True)]
        return [CallCase(function, tuple(i), o) for i, o in zip(inputs, outputs, strict=True)]
    known = "'source', 'cases', or 'inputs' and 'outputs'"
    raise ValueError(
        f"a table of tests has {known}; this one has {', '.join(map(str, raw)) or 'nothing'}"
    )


def _call_case(raw: Mapping[str, Any], function: str | None) -> CallCase:
    name = _text_or_none(raw.get("function")) or function
    if name is None:
        raise ValueError("a case with arguments needs the name of the function")
    args, kwargs = raw.get("args", ()), raw.get("kwargs", {})
    if not isinstance(args, list | tuple) or not isinstance(kwargs, Mapping):
        raise ValueError("a case's args are a list, and its kwargs a table")
    return CallCase(name, tuple(args), raw["expected"], dict(kwargs))


def _stdin_case(raw: Mapping[str, Any]) -> StdinCase:
    stdin, stdout = raw.get("stdin", raw.get("input", "")), raw.get("stdout", raw.get("output"))
    if stdout is None:
        raise ValueError("a case has 'stdin' and 'stdout', or 'args' and 'expected'")
    return StdinCase(_joined(stdin), _joined(stdout))


def _joined(value: Any) -> str:
    """Text; some task sets give lines as a list."""
    if isinstance(value, list | tuple):
        return "\n".join(str(line) for line in value)
    return str(value)


def _text_or_none(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None
