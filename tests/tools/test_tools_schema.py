"""What a model is told of a function."""

from __future__ import annotations

import enum
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NotRequired, Optional, Union

import pytest
from pydantic import BaseModel, Field
from typing_extensions import TypedDict

from ludus.core import ConfigError, ToolContext, ToolResult
from ludus.tools import Tool, tool
from ludus.tools.json_schema import children


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclass
class Point:
    x: int
    title: str = "origin"


class Row(TypedDict):
    key: str
    value: NotRequired[float]


class Tree(BaseModel):
    """A tree."""

    at: Point
    kids: list[Tree] = []


def parameters(function: Any) -> dict[str, Any]:
    return tool(function).spec.parameters


def test_every_supported_hint_has_its_schema():
    @tool
    def everything(
        a: str,
        b: int,
        c: float,
        d: bool,
        e: None,
        f: Any,
        g: Literal["x", 2],
        h: Colour,
        i: Optional[int],  # noqa: UP045 - both spellings must work
        j: Union[int, str],  # noqa: UP007
        k: list[int],
        l: dict[str, float],  # noqa: E741
        m: tuple[int, str],
        n: set[int],
        o: Point,
        p: Row,
    ) -> str:
        return ""

    schema = everything.spec.parameters
    assert schema["required"] == list("abcdefghijklmnop")
    assert schema["additionalProperties"] is False
    point = {
        "type": "object",
        "properties": {"x": {"type": "integer"}, "title": {"type": "string", "default": "origin"}},
        "required": ["x"],
        "additionalProperties": False,
    }
    row = {
        "type": "object",
        "properties": {"key": {"type": "string"}, "value": {"type": "number"}},
        "required": ["key"],
        "additionalProperties": False,
    }
    assert schema["properties"] == {
        "a": {"type": "string"},
        "b": {"type": "integer"},
        "c": {"type": "number"},
        "d": {"type": "boolean"},
        "e": {"type": "null"},
        "f": {},
        "g": {"enum": ["x", 2]},
        "h": {"type": "string", "enum": ["red", "blue"]},
        "i": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "j": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
        "k": {"type": "array", "items": {"type": "integer"}},
        "l": {"type": "object", "additionalProperties": {"type": "number"}},
        "m": {
            "type": "array",
            "prefixItems": [{"type": "integer"}, {"type": "string"}],
            "minItems": 2,
            "maxItems": 2,
        },
        "n": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True},
        "o": point,
        "p": row,
    }


def test_a_recursive_model_keeps_its_definition_and_loses_its_titles():
    def plant(tree: Tree) -> str:
        return ""

    schema = parameters(plant)
    assert set(schema["$defs"]) == {"Tree"}
    assert schema["$defs"]["Tree"]["properties"]["kids"]["items"] == {"$ref": "#/$defs/Tree"}
    assert schema["$defs"]["Tree"]["properties"]["at"]["properties"]["title"]["type"] == "string"
    pending = [schema]
    while pending:
        node = pending.pop()
        assert not isinstance(node.get("title"), str)
        pending.extend(children(node))


def test_the_openai_form():
    @tool
    def add(a: int, b: int = 2) -> int:
        """Add two numbers."""
        return a + b

    assert add.spec.as_openai() == {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer", "default": 2}},
                "required": ["a"],
                "additionalProperties": False,
            },
        },
    }


GOOGLE = """Look something up.

    It may take a while.

    Args:
        query: What to look for,
            in words.
        limit (int): How many results.

    Returns:
        Some text.
    """
NUMPY = """Look something up.

    It may take a while.

    Parameters
    ----------
    query : str
        What to look for,
        in words.
    limit : int, optional
        How many results.

    Returns
    -------
    str
        Some text.
    """
REST = """Look something up.

    It may take a while.

    :param query: What to look for,
        in words.
    :param limit: How many results.
    :returns: Some text.
    """


@pytest.mark.parametrize("style", [GOOGLE, NUMPY, REST], ids=["google", "numpy", "rest"])
def test_docstrings_of_three_styles_say_the_same(style: str):
    def look_up(query: str, limit: int = 3) -> str:
        return ""

    look_up.__doc__ = style
    spec = tool(look_up).spec
    assert spec.description == "Look something up.\n\nIt may take a while."
    assert spec.parameters["properties"]["query"]["description"] == "What to look for, in words."
    assert spec.parameters["properties"]["limit"]["description"] == "How many results."


def test_annotated_text_wins_over_the_docstring_and_constraints_stay():
    def move(
        by: Annotated[int, "How far."], to: Annotated[int, Field(ge=0, description="Where to.")], on: int
    ) -> str:
        """Move.

        Args:
            by: other words
            to: other words
            on: from the docstring
        """
        return ""

    properties = parameters(move)["properties"]
    assert [properties[name]["description"] for name in ("by", "to", "on")] == [
        "How far.",
        "Where to.",
        "from the docstring",
    ]
    assert properties["to"]["minimum"] == 0


def test_defaults_are_shown_where_json_has_words_for_them():
    def f(
        a: Colour = Colour.RED,
        b: Point = Point(1),  # noqa: B008
        c: list[int] = [1],  # noqa: B006
        d: str | None = None,
        e=3,
        g: Any = object(),  # noqa: B008
    ) -> None: ...

    properties = parameters(f)["properties"]
    assert properties["a"]["default"] == "red"
    assert properties["b"]["default"] == {"x": 1, "title": "origin"}
    assert properties["c"]["default"] == [1]
    assert properties["d"]["default"] is None
    assert properties["e"] == {"type": "integer", "default": 3}
    assert "default" not in properties["g"]
    json.dumps(properties)


def test_env_and_context_are_hidden_from_the_model():
    class World: ...

    def act(n: int, env: World, context: ToolContext) -> None: ...
    def act_elsewhere(n: int, where: ToolContext, context: str, env: Missing) -> None: ...  # noqa: F821

    assert list(parameters(act)["properties"]) == ["n"]
    assert list(parameters(act_elsewhere)["properties"]) == ["n", "context"]


def test_parameter_names_that_clash_with_libraries_are_fine():
    def f(json: int, model_config: int, schema: int, _private: int, copy: int, class_: int) -> None: ...

    assert list(parameters(f)["properties"]) == [
        "json",
        "model_config",
        "schema",
        "_private",
        "copy",
        "class_",
    ]


def test_a_subclass_is_described_by_its_class_and_its_run():
    class WebSearch(Tool):
        """Search the web."""

        def run(self, query: str) -> str:
            """:param query: What to look for."""
            return query

    spec = WebSearch().spec
    assert (spec.name, spec.description) == ("web_search", "Search the web.")
    assert spec.parameters["properties"]["query"]["description"] == "What to look for."


class Odd: ...


def callback(run: Callable[[int], int]) -> None: ...
def arbitrary(thing: Odd) -> None: ...
def nested(things: list[Odd]) -> None: ...
def starred(*names: str) -> None: ...
def double_starred(**names: str) -> None: ...
def bare(thing) -> None: ...
def unknown(thing: Nowhere) -> None: ...  # noqa: F821
def text_env(env: str) -> None: ...
def yields(n: int):
    yield n


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (callback, "'run'.*Callable"),
        (arbitrary, "'thing'.*Odd.*dataclass"),
        (nested, "'things'.*Odd"),
        (starred, r"'\*names'.*write each parameter out"),
        (double_starred, r"'\*\*names'.*write each parameter out"),
        (bare, "'thing' has no type hint"),
        (unknown, "'thing'.*Nowhere"),
        (text_env, "another name"),
        (yields, "generator"),
        (lambda: 1, "name="),
    ],
)
def test_what_cannot_be_offered_is_refused_when_decorating(function: Any, words: str):
    with pytest.raises(ConfigError, match=f"(?s){words}"):
        tool(function)


def test_a_subclass_is_refused_when_it_is_defined():
    with pytest.raises(ConfigError, match="'run'"):

        class Bad(Tool):
            def run(self, run: Callable[[], None]) -> None: ...


@pytest.mark.parametrize(
    "options",
    [
        {"timeout": 0},
        {"max_concurrency": 0},
        {"max_chars": 0},
        {"max_tokens": 0},
        {"retries": -1},
        {"name": "two words"},
        {"deadline": 3},
        {"process": True},
    ],
)
def test_impossible_options_are_refused(options: dict[str, Any]):
    def fine(n: int) -> int:
        return n

    with pytest.raises(ConfigError):
        tool(**options)(fine)


def test_a_decorated_function_is_still_that_function():
    @tool(timeout=5)
    def turn(a: int, b: int = 2) -> int:
        """Turn."""
        return a * 10 + b

    assert turn(1) == 12
    assert turn(1, b=3) == 13
    assert (turn.__name__, turn.__doc__) == ("turn", "Turn.")


@dataclass
class Holder:
    items: list[int] = field(default_factory=list)

    @tool
    def put(self, n: int) -> str:
        """Put one in."""
        self.items.append(n)
        return "ok"


def test_a_method_is_bound_to_its_object():
    one, other = Holder(), Holder()
    assert one.put(3) == "ok"
    assert (one.items, other.items) == ([3], [])
    assert list(one.put.spec.parameters["properties"]) == ["n"]
    assert Holder.put.is_unbound and not one.put.is_unbound


def test_the_return_hint_is_the_schema_of_results():
    @tool
    def found(key: str) -> list[Row]:
        """Find."""
        return [Row(key=key)]

    @tool
    async def counted() -> int:
        """Count."""
        return 1

    returns = found.spec.returns
    assert returns is not None and returns["type"] == "array"
    assert returns["items"]["properties"].keys() == {"key", "value"}
    assert returns["items"]["required"] == ["key"]
    assert counted.spec.returns == {"type": "integer"}
    assert "returns" not in json.dumps(found.spec.as_openai())  # what the model reads is as before


def test_a_return_hint_that_says_nothing_of_results_is_no_schema():
    def nothing(): ...
    def none() -> None: ...
    def result() -> ToolResult: ...
    def anything() -> Any: ...
    def unknown() -> NoSuchThing: ...  # noqa: F821
    def thing() -> threading.Lock: ...

    for function in (nothing, none, result, anything, unknown, thing):
        assert tool(function).spec.returns is None, function.__name__


def test_the_schema_of_results_travels():
    from ludus.tools.wire import spec_from_json, spec_to_json

    @tool
    def near(x: int) -> Point:
        """Near."""
        return Point(x)

    assert near.spec.returns is not None
    assert spec_from_json(json.loads(json.dumps(spec_to_json(near.spec)))) == near.spec
