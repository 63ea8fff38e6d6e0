"""Magnet: every path binds every required parameter from an earlier result or from the user."""

from __future__ import annotations

from random import Random
from typing import Any

import jsonschema_rs
from hypothesis import given, settings
from hypothesis import strategies as st

from ludus.core.messages import ToolSpec
from ludus.synth.paths.call_paths import (
    CallPath,
    FromResult,
    FromUser,
    PathPlanner,
    plan_paths,
    schema_values,
)
from ludus.synth.paths.signatures import ParameterNode, ReturnNode, SignatureGraph, fits, names_fit

FIELDS = ["flight_id", "city", "price", "user_id", "date_from", "seats"]
SCALARS: list[dict[str, Any]] = [
    {"type": "string"},
    {"type": "string", "minLength": 2},
    {"type": "string", "enum": ["a", "b"]},
    {"type": "string", "enum": ["a", "b", "c"]},
    {"type": "integer"},
    {"type": "integer", "minimum": 0, "maximum": 5},
    {"type": "number"},
    {"type": "boolean"},
    {"anyOf": [{"type": "string"}, {"type": "null"}]},
]
scalars = st.sampled_from(SCALARS)


def objects(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    def closed(fields: dict[str, Any], left_out: set[str]) -> dict[str, Any]:
        required = [name for name in fields if name not in left_out]
        return {
            "type": "object",
            "properties": fields,
            "required": required,
            "additionalProperties": False,
        }

    fields = st.dictionaries(st.sampled_from(FIELDS), inner, max_size=3)
    return st.builds(closed, fields, st.sets(st.sampled_from(FIELDS), max_size=2))


def arrays(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.builds(lambda items: {"type": "array", "items": items}, inner)


schemas = st.recursive(scalars, lambda inner: objects(inner) | arrays(inner), max_leaves=4)


@st.composite
def tool_specs(draw: st.DrawFn) -> list[ToolSpec]:
    names = draw(st.lists(st.sampled_from(["search", "book", "compare", "pay", "find_flight_id"]), min_size=1,
                          max_size=5, unique=True))  # fmt: skip
    return [ToolSpec(name, "", draw(objects(scalars)), draw(st.none() | schemas)) for name in names]


def sources_are_legal(path: CallPath, specs: dict[str, ToolSpec]) -> None:
    """Written from the definition: types by a validator's rules on the schemas, order by position."""
    for number, call in enumerate(path.calls):
        parameters = specs[call.tool].parameters
        assert set(parameters.get("required", ())) <= set(call.arguments), (
            "a required parameter is unbound"
        )
        assert set(call.arguments) <= set(parameters["properties"])
        for name, source in call.arguments.items():
            wanted = parameters["properties"][name]
            if isinstance(source, FromUser):
                jsonschema_rs.validate(wanted, source.value)
            else:
                assert isinstance(source, FromResult) and source.call < number
                schema: Any = specs[path.calls[source.call].tool].returns
                for step in source.place:
                    if "anyOf" in schema:
                        schema = next(one for one in schema["anyOf"] if one != {"type": "null"})
                    schema = schema["items"] if step == 0 else schema["properties"][step]
                words = name.replace("_", " ").split()
                said = [str(step) for step in source.place] + [path.calls[source.call].tool]
                assert any(word in "_".join(said) for word in words)


@settings(max_examples=60, deadline=None)
@given(tool_specs(), st.integers(0, 1000), st.integers(1, 4))
def test_every_path_binds_every_required_parameter(specs: list[ToolSpec], seed: int, turns: int) -> None:
    graph = SignatureGraph.of(specs)
    planner = PathPlanner(graph, schema_values(), Random(seed), max_calls=6)
    for path in plan_paths(planner, 6, max_turns=turns):
        assert 1 <= len(path.calls) <= 6 and sum(path.turns) == len(path.calls)
        assert len(path.turns) <= turns and min(path.turns) >= 1
        assert illegalities(path, graph) == []
        sources_are_legal(path, {spec.name: spec for spec in specs})


def values(schema: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Values that a schema allows."""
    if "anyOf" in schema:
        return st.one_of([values(one) for one in schema["anyOf"]])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    kind = schema["type"]
    if kind == "object":
        required = {name: values(schema["properties"][name]) for name in schema["required"]}
        rest = {name: values(one) for name, one in schema["properties"].items() if name not in required}
        return st.fixed_dictionaries(required, optional=rest)
    if kind == "array":
        return st.lists(values(schema["items"]), max_size=2)
    low, high = schema.get("minimum"), schema.get("maximum")
    return {"string": st.text(min_size=schema.get("minLength", 0), max_size=4), "boolean": st.booleans(),
            "integer": st.integers(low, high), "null": st.none(),
            "number": st.floats(allow_nan=False, allow_infinity=False)}[kind]  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(st.data(), schemas, schemas)
def test_what_fits_is_accepted_by_a_validator(
    data: st.DataObject, returned: dict[str, Any], wanted: dict[str, Any]
) -> None:
    for one, other in ((returned, wanted), (wanted, returned), (wanted, wanted)):
        if fits(one, other):
            jsonschema_rs.validate(other, data.draw(values(one)))


def test_what_does_not_fit_is_refused() -> None:
    text, number = {"type": "string"}, {"type": "number"}
    assert fits({"type": "integer"}, number) and not fits(number, {"type": "integer"})
    assert not fits({"anyOf": [text, {"type": "null"}]}, text)
    assert fits(text, {"anyOf": [text, {"type": "null"}]})
    assert fits({"enum": ["a"]}, {"enum": ["a", "b"]}) and not fits(text, {"enum": ["a"]})
    assert not fits({"type": "integer"}, {"type": "integer", "maximum": 9})
    assert not fits({"enum": [True]}, {"enum": [1]})
    assert not fits({"type": "object"}, {"type": "object", "properties": {"a": text}})
    assert not fits(text, {"type": "string", "contentEncoding": "base64"})  # a keyword it does not know


def returned(tool: str, *place: str | int) -> ReturnNode:
    return ReturnNode(tool, place, {"type": "string"})


def taken(tool: str, name: str) -> ParameterNode:
    return ParameterNode(tool, name, {"type": "string"})


def test_names_fit_as_words() -> None:
    assert names_fit(returned("search", "flightId"), taken("book", "flight_id"))
    assert names_fit(returned("search", "flights", 0, "id"), taken("book", "flight_id"))
    assert names_fit(returned("find_flight_id"), taken("book", "flight_id"))
    assert names_fit(returned("get_user", "id"), taken("delete_user", "id"))
    assert not names_fit(returned("get_user", "id"), taken("delete_product", "id"))
    assert not names_fit(returned("search", "hotel_id"), taken("book", "flight_id"))
    assert not names_fit(returned("search", "flights", 0, "price"), taken("book", "flight_id"))


def spec(name: str, takes: dict[str, str], returns: dict[str, str] | None) -> ToolSpec:
    def table(fields: dict[str, str]) -> dict[str, Any]:
        return {"type": "object", "properties": {k: {"type": v} for k, v in fields.items()},
                "required": list(fields), "additionalProperties": False}  # fmt: skip

    return ToolSpec(name, "", table(takes), None if returns is None else table(returns))


TRAVEL = [
    spec("search", {"city": "string"}, {"flight_id": "string"}),
    spec("compare_prices", {"flight_id": "string"}, {"offer_code": "string", "price": "number"}),
    spec("book", {"offer_code": "string", "passenger": "string"}, {"booking_id": "string"}),
    spec("send_itinerary", {"booking_id": "string"}, {"sent": "boolean"}),
]


def planner(seed: int = 0) -> PathPlanner:
    return PathPlanner(SignatureGraph.of(TRAVEL), schema_values({"city": ["Rome"]}), Random(seed))


def test_magnify_makes_a_chain_of_one_node() -> None:
    path = planner().magnify("book", depth=3)
    assert path.tools == ["search", "compare_prices", "book"]
    arguments = [pair for call in path.calls for pair in call.arguments.items()]
    said = [(name, one.value) for name, one in arguments if isinstance(one, FromUser)]
    assert said[0] == ("city", "Rome") and said[1][0] == "passenger"
    assert planner().magnify("book", depth=0).tools == ["book"]


def test_connect_finds_a_way_between_nodes_that_are_not_connected() -> None:
    graph = SignatureGraph.of(TRAVEL)
    assert "send_itinerary" not in graph.successors("search")
    path = planner().connect("search", "send_itinerary")
    assert path is not None and path.tools == ["search", "compare_prices", "book", "send_itinerary"]
    assert planner().connect("send_itinerary", "search") is None  # no data flows that way


def test_an_illegal_path_is_recognised() -> None:
    graph = SignatureGraph.of(TRAVEL)
    good = planner().magnify("book")
    late = CallPath(good.calls[::-1], "magnify")
    assert any("not earlier" in text for text in illegalities(late, graph))
    bare = CallPath((type(good.calls[0])("book", {}),), "magnify")
    assert sorted(illegalities(bare, graph)) == [
        "call 0: 'offer_code' is not bound",
        "call 0: 'passenger' is not bound",
    ]
    odd = CallPath(
        (
            *good.calls[:1],
            type(good.calls[0])("send_itinerary", {"booking_id": FromResult(0, ("flight_id",))}),
        ),
        "connect",
    )
    assert any("does not fit" in text for text in illegalities(odd, graph))


def illegalities(path: CallPath, graph: SignatureGraph) -> list[str]:
    """Why a path is not legal; nothing for every path that is planned. Written apart from the planner."""
    found: list[str] = []
    if sum(path.turns) not in (0, len(path.calls)):
        found.append("the turns do not add up to the calls")
    for number, call in enumerate(path.calls):
        if call.tool not in graph.specs:
            found.append(f"call {number}: there is no tool {call.tool!r}")
            continue
        known = {node.name: node for node in graph.parameters[call.tool]}
        required = {node.name for node in known.values() if node.is_required}
        found += [f"call {number}: {name!r} is not bound" for name in required - call.arguments.keys()]
        for name, source in call.arguments.items():
            if name not in known:
                found.append(f"call {number}: {call.tool!r} takes no {name!r}")
            elif isinstance(source, FromResult):
                found += _wrong_source(number, source, known[name], path, graph)
    return found


def _wrong_source(
    number: int, source: FromResult, taken: ParameterNode, path: CallPath, graph: SignatureGraph
) -> list[str]:
    if not 0 <= source.call < number:
        return [f"call {number}: {taken.name!r} comes from call {source.call}, which is not earlier"]
    tool = path.calls[source.call].tool
    node = next((one for one in graph.returns[tool] if one.place == source.place), None)
    if node is None:
        return [f"call {number}: {tool!r} returns nothing at {source.place}"]
    if not (names_fit(node, taken) and fits(node.schema, taken.schema)):
        return [f"call {number}: {source.place} of {tool!r} does not fit {taken.name!r}"]
    return []
