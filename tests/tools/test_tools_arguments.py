"""Arguments as models write them."""

from __future__ import annotations

import dataclasses
import enum
import json
import math
from dataclasses import dataclass
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from ludus.core import Fault, Task, ToolContext, ToolFault
from ludus.tools import tool
from ludus.tools.signature import signature_of, validate_arguments

CONTEXT = ToolContext("episode", Task.of("go"))


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


@dataclass(frozen=True)
class Point:
    x: int
    y: float = 0.0


class Card(BaseModel):
    name: str
    points: list[Point] = []


def fitted(hint: Any, value: Any, **more: Any) -> Any:
    def function(value): ...

    function.__annotations__["value"] = hint
    return validate_arguments(signature_of(function, "f"), {"value": value, **more}, "f")["value"]


@pytest.mark.parametrize(
    ("hint", "given_value", "expected"),
    [
        (int, "3", 3),
        (int, " 3 ", 3),
        (int, 3.0, 3),
        (float, "3.5", 3.5),
        (float, 3, 3.0),
        (bool, "true", True),
        (bool, "False", False),
        (bool, 1, True),
        (str, 3, "3"),
        (str, 2.5, "2.5"),
        (str, True, "true"),
        (str, "[1]", "[1]"),
        (list[int], "[1, 2]", [1, 2]),
        (list[int], 4, [4]),
        (list[str], "one", ["one"]),
        (list[str], '["one"]', ["one"]),
        (list[Point], {"x": 1}, [Point(1)]),
        (set[int], "[1, 1]", {1}),
        (tuple[int, str], '["1", 2]', (1, "2")),
        (dict[str, int], '{"a": "1"}', {"a": 1}),
        (Point, '{"x": "1"}', Point(1)),
        (Card, '{"name": "a", "points": "[{\\"x\\": 2}]"}', Card(name="a", points=[Point(2)])),
        (int | str, "3", "3"),
        (list[int] | str, "[1]", "[1]"),
        (int | None, "3", 3),
        (list[int] | None, "[3]", [3]),
        (Literal[1, 2], "2", 2),
        (Literal["1", "2"], 2, "2"),
        (Colour, "red", Colour.RED),
        (Level, "2", Level.HIGH),
        (Any, "[1]", "[1]"),
    ],
)
def test_gentle_coercion(hint: Any, given_value: Any, expected: Any):
    result = fitted(hint, given_value)
    assert result == expected
    assert type(result) is type(expected)


@pytest.mark.parametrize(
    ("hint", "bad", "words"),
    [
        (int, "three", 'expected integer; got "three"'),
        (int, 3.5, "expected integer; got 3.5"),
        (int, None, "expected integer; got null"),
        (str, [1], "expected string; got a list of 1"),
        (bool, "maybe", 'expected boolean; got "maybe"'),
        (list[int], "abc", 'expected list of integer; got "abc"'),
        (list[int], '[1, "a"]', 'value[1]: expected integer; got "a"'),
        (Literal["up", "down"], "left", 'expected one of "up", "down"; got "left"'),
        (Colour, "green", 'expected one of "red", "blue"; got "green"'),
        (Point, {"x": 1, "z": 2}, "value.z: unknown argument; known: x, y"),
        (Point, {}, "value.x: missing; expected integer"),
        (int | None, "a", 'expected integer or null; got "a"'),
        (dict[str, int], [1], "expected object; got a list of 1"),
        (tuple[int, str], [1], "missing"),
    ],
)
def test_what_cannot_be_is_explained_without_jargon(hint: Any, bad: Any, words: str):
    with pytest.raises(ToolFault) as caught:
        fitted(hint, bad)
    assert caught.value.fault is Fault.BAD_ARGUMENTS
    text = str(caught.value)
    assert "value" in text and words in text
    assert not any(jargon in text for jargon in ("pydantic", "http", "Input should", "type="))


async def test_each_parameter_gets_a_line_of_its_own():
    @tool
    def book(hotel: str, nights: int, breakfast: bool = True) -> str:
        return "booked"

    result = await book.call({"hotel": ["x"], "breakfst": "yes"}, CONTEXT)
    assert result.fault is Fault.BAD_ARGUMENTS
    assert result.content.splitlines() == [
        "The arguments of book do not fit:",
        "- hotel: expected string; got a list of 1",
        "- nights: missing; expected integer",
        "- breakfst: unknown argument; did you mean breakfast?",
    ]


async def test_null_means_left_out_where_there_is_a_default():
    @tool
    def f(a: int = 5, b: int | None = 7) -> str:
        return f"{a} {b}"

    assert (await f.call({"a": None, "b": None}, CONTEXT)).content == "5 None"


def nested_list(depth: int) -> list[Any]:
    deep: list[Any] = []
    for _ in range(depth):
        deep = [deep]
    return deep


class Node(BaseModel):
    kids: list[Node] = []


def nested_nodes(depth: int) -> dict[str, Any]:
    deep: dict[str, Any] = {}
    for _ in range(depth):
        deep = {"kids": [deep]}
    return deep


@pytest.mark.parametrize(
    "arguments",
    [
        None,
        3,
        "not json",
        "[1]",
        "[" * 100_000,
        {"node": nested_list(100_000)},
        {"node": nested_nodes(20_000)},
        {"node": "[" * 500_000},
        {"node": '{"kids": [' * 50_000},
        {"node": {}, "n": 10**5000},
        {"node": {}, "n": "9" * 100_000},
        {"node": {}, "n": float("nan")},
        {"node": {}, "x" * 1_000_000: 1},
        {"node": {}, 5: 1},
        {"node": {}, "\udc80": 1},
        {"node": [{"bad": i} for i in range(5_000)]},
    ],
    ids=range(16),
)
async def test_hostile_arguments_are_answered_briefly(arguments: Any):
    @tool
    def f(node: Node, n: int = 0) -> str:
        return str(n.bit_length())

    result = await f.call(arguments, CONTEXT)
    assert len(result.content) < 5_000
    result.content.encode()
    assert result.fault in (Fault.BAD_ARGUMENTS, None)


async def test_arguments_as_a_json_string_are_read():
    @tool
    def f(n: int) -> int:
        return n + 1

    assert (await f.call('{"n": 1}', CONTEXT)).content == "2"


async def test_positional_only_parameters_can_be_filled():
    @tool
    def f(a: int, b: int = 1, /, *, c: int) -> str:
        return f"{a} {b} {c}"

    assert (await f.call({"a": 1, "c": 3}, CONTEXT)).content == "1 1 3"
    assert (await f.call({"c": 3, "b": 2, "a": 1}, CONTEXT)).content == "1 2 3"


# Round trips: what Python holds, written as JSON and given back, is what Python held -----------------


def as_json(value: Any) -> Any:
    """An independent writer: what a careful model would write for a value."""
    if isinstance(value, enum.Enum):
        return value.value
    if dataclasses.is_dataclass(value):
        return {f.name: as_json(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, BaseModel):
        return {name: as_json(getattr(value, name)) for name in type(value).model_fields}
    if isinstance(value, dict):
        return {str(as_json(key)): as_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [as_json(item) for item in value]
    return value


text = st.text(max_size=8)
numbers = st.floats(allow_nan=False, allow_infinity=False)
leaves: st.SearchStrategy[tuple[Any, st.SearchStrategy[Any]]] = st.sampled_from(
    [
        (str, text),
        (int, st.integers()),
        (float, numbers),
        (bool, st.booleans()),
        (None, st.none()),
        (Literal["a", "b", 3], st.sampled_from(["a", "b", 3])),
        (Colour, st.sampled_from(Colour)),
        (Level, st.sampled_from(Level)),
        (Point, st.builds(Point, st.integers(), numbers)),
        (Card, st.builds(Card, name=text, points=st.lists(st.builds(Point, st.integers()), max_size=2))),
        (str | None, st.none() | text),
        (int | float | str | bool, st.integers() | numbers | text | st.booleans()),
        (set[int], st.sets(st.integers(), max_size=3)),
    ]
)


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    def wrap(pair: tuple[Any, st.SearchStrategy[Any]]) -> st.SearchStrategy[Any]:
        hint, values = pair
        return st.sampled_from(
            [
                (list[hint], st.lists(values, max_size=3)),  # type: ignore[valid-type]
                (dict[str, hint], st.dictionaries(text, values, max_size=3)),  # type: ignore[valid-type]
                (dict[int, hint], st.dictionaries(st.integers(), values, max_size=3)),  # type: ignore[valid-type]
                (tuple[hint, int], st.tuples(values, st.integers())),  # type: ignore[valid-type]
                (tuple[hint, ...], st.lists(values, max_size=3).map(tuple)),  # type: ignore[valid-type]
            ]
        )

    return inner.flatmap(wrap)


typed_values = st.recursive(leaves, containers, max_leaves=3).flatmap(
    lambda pair: st.tuples(st.just(pair[0]), pair[1])
)


@settings(max_examples=2 * settings.default.max_examples)
@given(st.lists(typed_values, max_size=4))
def test_a_value_written_as_json_comes_back_equal(pairs: list[tuple[Any, Any]]):
    names = [f"p{i}" for i in range(len(pairs))]
    scope: dict[str, Any] = {}
    exec(f"def function({', '.join(names)}): ...", scope)
    function = scope["function"]
    function.__annotations__ = {name: hint for name, (hint, _) in zip(names, pairs, strict=True)}
    signature = signature_of(function, "f")
    written = json.loads(json.dumps({n: as_json(v) for n, (_, v) in zip(names, pairs, strict=True)}))
    result = validate_arguments(signature, written, "f")
    assert result == {name: value for name, (_, value) in zip(names, pairs, strict=True)}
    for name, (_, value) in zip(names, pairs, strict=True):
        assert type(result[name]) is type(value)
        assert allows(signature.schema["properties"][name], written[name])


def allows(schema: dict[str, Any], value: Any) -> bool:
    """An independent and simple validator for the part of JSON Schema that tools use."""
    if "anyOf" in schema:
        return any(allows(option, value) for option in schema["anyOf"])
    if "enum" in schema or "const" in schema:
        return value in schema.get("enum", [schema.get("const")])
    kinds = {
        "string": lambda: isinstance(value, str),
        "integer": lambda: isinstance(value, int) and not isinstance(value, bool),
        "number": lambda: isinstance(value, (int, float)) and not isinstance(value, bool),
        "boolean": lambda: isinstance(value, bool),
        "null": lambda: value is None,
        "array": lambda: isinstance(value, list) and all_items(schema, value),
        "object": lambda: isinstance(value, dict) and all_properties(schema, value),
    }
    return kinds[schema["type"]]() if "type" in schema else True


def all_items(schema: dict[str, Any], value: list[Any]) -> bool:
    if "prefixItems" in schema:
        pairs = zip(schema["prefixItems"], value, strict=True)
        return all(allows(inner, item) for inner, item in pairs)
    return all(allows(schema.get("items", {}), item) for item in value)


def all_properties(schema: dict[str, Any], value: dict[str, Any]) -> bool:
    known, rest = schema.get("properties", {}), schema.get("additionalProperties", True)
    others = [item for key, item in value.items() if key not in known]
    if others and rest is False:
        return False
    return (
        all(key in value for key in schema.get("required", ()))
        and all(allows(known[key], item) for key, item in value.items() if key in known)
        and (not isinstance(rest, dict) or all(allows(rest, item) for item in others))
    )


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=2 * settings.default.max_examples)
@given(anything | st.dictionaries(st.sampled_from(["a", "b", "c", "d"]), anything))
def test_any_json_at_all_is_either_fitted_or_refused_with_a_reason(arguments: Any):
    def function(a: int, b: list[Point], c: Literal["x", 1] = "x", d: dict[str, Card] | None = None): ...

    try:
        result = validate_arguments(signature_of(function, "f"), arguments, "f")
    except ToolFault as fault:
        assert fault.fault is Fault.BAD_ARGUMENTS
        assert len(str(fault)) < 10_000
        str(fault).encode()
    else:
        assert type(result["a"]) is int
        assert all(isinstance(point, Point) for point in result["b"])
        assert math.isfinite(result["a"])
