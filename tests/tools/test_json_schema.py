"""Arguments against JSON Schemas, those of strangers too."""

from __future__ import annotations

import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ludus.tools.json_schema import argument_problems, example_of

SIMPLE = st.recursive(
    st.sampled_from([{"type": kind} for kind in ("integer", "number", "string", "boolean", "null")])
    | st.lists(st.integers(), min_size=1, max_size=3).map(lambda options: {"enum": options}),
    lambda inner: (
        st.builds(lambda one: {"type": "array", "items": one}, inner)
        | st.dictionaries(st.sampled_from("abc"), inner, max_size=3).map(
            lambda some: {
                "type": "object",
                "properties": some,
                "required": sorted(some),
                "additionalProperties": False,
            }
        )
        | inner.map(lambda one: {"type": "object", "additionalProperties": one})
        | st.integers().map(lambda low: {"exclusiveMinimum": low, "exclusiveMaximum": low + 9})
    ),
    max_leaves=6,
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abcd"), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(SIMPLE, VALUES, st.integers(0, 3))
def test_arguments_are_checked_as_jsonschema_does(
    schema: dict[str, Any], value: Any, variant: int
) -> None:
    from jsonschema import Draft202012Validator

    validator = Draft202012Validator(schema)
    for one in (value, example_of(schema, variant)):
        assert bool(argument_problems(schema, one)) == (not validator.is_valid(one))


def test_hostile_schemas_cost_nothing() -> None:
    levels = {f"l{n}": {"anyOf": [{"$ref": f"#/$defs/l{n + 1}"}] * 4} for n in range(60)}
    explosion = {"$defs": {**levels, "l60": {"type": "string"}}, "$ref": "#/$defs/l0"}
    regex = {"type": "object", "properties": {"a": {"type": "string", "pattern": "(a+)+$"}}}
    circle = {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
    started = time.process_time()
    for schema in (
        explosion,
        regex,
        circle,
        {"$ref": "http://example.invalid/schema"},
        {"type": 5, "enum": 3},
    ):
        assert argument_problems(schema, {"a": "a" * 40 + "!"}) == []
    assert time.process_time() - started < 30  # it ends: either of the first two would take years


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ({"dial": "red", "to": 3}, ""),
        ({"dial": "red", "to": 3.0}, ""),
        ({"dial": "pink", "to": 3}, "dial: expected one of"),
        ({"dial": "red", "to": True}, "to: expected integer; got true"),
        ({"dial": "red"}, "to: missing"),
        ({"dial": "red", "to": 3, "x": 1}, "x: unknown argument"),
        ({"dial": "red", "to": 30}, "to: expected a number of at most 9"),
        ({"dial": "red", "to": 3, "tags": ["a", 2]}, "tags[1]"),
        ({"dial": "red", "to": 3, "note": 5}, "note: expected string"),
        ({"dial": "red", "to": 3, "note": None}, ""),
        ({"dial": "red", "to": 3, "share": 0}, "share: expected a number above 0"),
        ({"dial": "red", "to": 3, "share": 1}, "share: expected a number below 1"),
        ({"dial": "red", "to": 3, "share": 0.5}, ""),
        ({"dial": "red", "to": 3, "more": {"a": "x"}}, "more.a: expected integer"),
        ("red", "expected object"),
    ],
)
def test_arguments_against_a_schema(value: object, problem: str) -> None:
    schema = {
        "type": "object",
        "properties": {
            "dial": {"$ref": "#/$defs/Dial"},
            "to": {"type": "integer", "minimum": 0, "maximum": 9},
            "tags": {"type": "array", "items": {"type": "string"}},
            "share": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
            "more": {"type": "object", "additionalProperties": {"type": "integer"}},
            "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        },
        "required": ["dial", "to"],
        "additionalProperties": False,
        "$defs": {"Dial": {"enum": ["red", "green", "blue"], "type": "string"}},
    }
    found = argument_problems(schema, value)
    assert (problem in found[0]) if problem else not found, found


def test_schemas_can_be_hostile() -> None:
    loop = {"$ref": "#/$defs/A", "$defs": {"A": {"$ref": "#/$defs/A"}}}
    assert argument_problems(loop, {"a": 1}) == []
    assert argument_problems({"properties": 3, "enum": "x", "type": ["what"]}, {"a": 1}) == []
