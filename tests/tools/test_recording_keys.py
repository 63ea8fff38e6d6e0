"""Keys of recorded calls: equal where the calls are equal, and nowhere else."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ludus.core import ConfigError, Fault, Media, Task, ToolContext, ToolResult, ToolSpec
from ludus.tools import Tool, tool
from ludus.tools.recording import label_of
from ludus.tools.recording.records import (
    BadRecord,
    decode_result,
    decode_specs,
    encode_result,
    encode_specs,
    next_history,
    result_digest,
    root_history,
)
from ludus.tools.versions import (
    Unkeyable,
    canonical,
    source_version,
    source_versions,
    spec_version,
)

text = st.text(st.characters(codec=None), max_size=20)  # lone surrogates included
leaves = st.none() | st.booleans() | st.integers() | st.floats() | text
values = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(text, inner, max_size=4),
    max_leaves=12,
)
arguments = st.dictionaries(text, values, max_size=5)
results = st.builds(
    ToolResult,
    content=text,
    reward=st.none() | st.floats(allow_nan=False),
    terminated=st.booleans(),
    fault=st.none() | st.sampled_from(Fault),
    media=st.lists(st.builds(Media, text, text, st.none() | st.binary(max_size=30)), max_size=2).map(
        tuple
    ),
    seconds=st.floats(0, 100),
)


def shuffled(value: Any, source: random.Random) -> Any:
    if isinstance(value, dict):
        items = [(key, shuffled(item, source)) for key, item in value.items()]
        source.shuffle(items)
        return dict(items)
    return [shuffled(item, source) for item in value] if isinstance(value, list) else value


def same(one: Any, other: Any) -> bool:
    """What a tool could tell apart: an independent, structural comparison."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float):
        if math.isnan(one) or math.isnan(other):
            return math.isnan(one) and math.isnan(other)
        return one == other and math.copysign(1, one) == math.copysign(1, other)
    return bool(one == other)


@given(arguments, st.randoms(use_true_random=False))
def test_the_order_of_keys_does_not_count(given: dict[str, Any], source: random.Random) -> None:
    other = shuffled(given, source)
    assert label_of("t", "1", "h", given) == label_of("t", "1", "h", other)


@given(arguments, arguments)
def test_canonical_texts_are_equal_exactly_where_values_are(one: Any, other: Any) -> None:
    assert (canonical(one) == canonical(other)) == same(one, other)
    assert same(json.loads(canonical(one)), one)


def test_what_looks_alike_is_told_apart() -> None:
    near = [1, 1.0, True, "1", [1], 0, 0.0, -0.0, False, None, "", {}, [], math.nan, math.inf, -math.inf]
    near += ["\u00e9", "e\u0301", "\ud800", "\ufffd", "a\x00", "a"]  # Unicode is not normalised
    assert len({canonical({"x": value}) for value in near}) == len(near)
    assert canonical({"x": math.nan}) == canonical({"x": float("nan")})
    assert canonical((1, (2,))) == canonical([1, [2]])


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def cyclic() -> Any:
    value: list[Any] = []
    value.append(value)
    return value


NOT_JSON: list[Any] = [
    {1: 2},
    {"x": {None: 1}},
    {"x": object()},
    {"x": b"y"},
    {"x": {1, 2}},
    {"x": 10**5000},
]


@pytest.mark.parametrize("bad", [*NOT_JSON, nested(100_000), cyclic()], ids=range(8))
def test_what_is_not_json_has_no_key(bad: Any) -> None:
    with pytest.raises(Unkeyable):
        canonical(bad)


@given(st.lists(text, min_size=4, max_size=4), st.lists(text, min_size=4, max_size=4))
def test_every_part_of_a_label_counts_and_parts_do_not_run_together(
    one: list[str], other: list[str]
) -> None:
    keys = [label_of(parts[0], parts[1], parts[2], {"x": parts[3]}).key for parts in (one, other)]
    assert (keys[0] == keys[1]) == (one == other)


@given(results, results)
def test_histories_agree_exactly_where_results_do(one: ToolResult, other: ToolResult) -> None:
    def seen(result: ToolResult) -> str:
        reward = None if result.reward is None else repr(result.reward)
        return repr([result.content, reward, result.terminated, result.fault, result.media])

    assert (next_history("k", one) == next_history("k", other)) == (seen(one) == seen(other))
    assert next_history("k", one) != next_history("l", one)


@given(results)
def test_results_survive_being_written(result: ToolResult) -> None:
    back = decode_result(encode_result(result))
    assert back == result and result_digest(back) == result_digest(result)
    assert [medium.data for medium in back.media] == [medium.data for medium in result.media]


def test_long_results_and_media_survive() -> None:
    data = bytes(range(256)) * 4_000
    result = ToolResult(
        "née \U0001f600 " * 400_000, 0.5, True, Fault.LIMIT, (Media("image/png", "ab", data),), 1.5
    )
    back = decode_result(encode_result(result))
    assert back == result and back.media[0].data == data


@given(st.binary(max_size=60))
def test_damaged_records_are_named(data: bytes) -> None:
    for damaged in (data, b"j" + data, b"z" + data):
        with pytest.raises(BadRecord):
            decode_result(damaged)
        with pytest.raises(BadRecord):
            decode_specs(damaged)


@pytest.mark.parametrize(
    "raw",
    [
        b'j{"content":1,"reward":null,"terminated":false,"fault":null,"media":[],"seconds":0}',
        b'j{"content":"","reward":null,"terminated":false,"fault":"no such","media":[],"seconds":0}',
        b'j{"content":"","reward":null,"terminated":false,"fault":null,"media":[{"kind":1}],"seconds":0}',
        b'j{"tools":[["a","b",{}]]}',
        b'j{"tools":[["a","b",{},1]]}',
    ],
)
def test_records_of_another_shape_are_named(raw: bytes) -> None:
    with pytest.raises(BadRecord):
        decode_specs(raw) if b"tools" in raw else decode_result(raw)


def test_specs_survive_with_their_versions() -> None:
    specs = [
        (ToolSpec("a", "does ä", {"type": "object", "properties": {"x": {"type": "integer"}}}), "v1")
    ]
    back = decode_specs(encode_specs(specs))
    assert back == specs
    assert list(back[0][0].parameters) == ["type", "properties"]  # the model reads it in this order


def test_a_version_is_of_the_spec_and_of_what_is_added() -> None:
    spec = ToolSpec("a", "b", {"x": 1})
    others = [
        ToolSpec("a2", "b", {"x": 1}),
        ToolSpec("a", "b2", {"x": 1}),
        ToolSpec("a", "b", {"x": 1.0}),
    ]
    assert len({spec_version(one) for one in [spec, *others]} | {spec_version(spec, "2")}) == 5
    with pytest.raises(ConfigError, match="schema of the tool 'a'"):
        spec_version(ToolSpec("a", "b", {"x": object()}))


def context(task: Task, episode: str = "e") -> ToolContext:
    return ToolContext(episode, task)


def test_attempts_at_one_task_begin_alike_and_other_tasks_do_not() -> None:
    def root(task: Task, episode: str = "e", *, per_episode: bool = False) -> str:
        return root_history(context(task, episode), per_episode=per_episode)

    task = Task.of("go", 3, id="1", envs={"door": {"size": 2}}, system="be good", extra=object())
    assert root(task, "a") == root(task, "b")
    assert root(task, "a", per_episode=True) != root(task, "b", per_episode=True)
    reworded = Task.of("go", 3, id="1", envs={"door": {"size": 2}}, system="be bad", extra=object())
    assert root(task) == root(reworded)
    others = [
        Task.of("go on", 3, id="1", envs={"door": {"size": 2}}, extra=object()),
        Task.of("go", 4, id="1", envs={"door": {"size": 2}}, extra=object()),
        Task.of("go", 3, id="2", envs={"door": {"size": 2}}, extra=object()),
        Task.of("go", 3, id="1", envs={"door": {"size": 3}}, extra=object()),
        Task.of("go", 3, id="1", envs={"door": {"size": 2}}, extra=1),
    ]
    assert len({root(one) for one in [task, *others]}) == 6
    assert root(Task.of("go", 10**5000)) != root(Task.of("go", 10**5001))


class Search(Tool):
    """Search."""

    def __init__(self, index: str, secret: str = "", timeout: float = 3.0) -> None:
        self.index, self._secret, self.timeout = index, secret, timeout
        super().__init__()

    def run(self, query: str) -> str:
        return self.index + query


def test_source_and_settings_make_a_version() -> None:
    def one(x: int) -> int:
        """Do."""
        return x + 1

    first = source_versions([one])

    def one(x: int) -> int:  # type: ignore[no-redef]
        """Do."""
        return x + 2

    assert first.keys() == source_versions([one]).keys() == {"one"}
    assert first != source_versions([one])
    assert source_version(Search("a")) == source_version(Search("a", secret="other", timeout=9.0))
    assert source_version(Search("a")) != source_version(Search("b"))


def test_a_tool_without_source_has_a_version_too() -> None:
    names: dict[str, Any] = {}
    exec("def made(x: int) -> int:\n    'Made.'\n    return x\n", names)
    assert set(source_versions([names["made"]])) == {"made"}


def test_a_tool_that_acts_on_an_environment_is_refused() -> None:
    @tool
    def push(env: object, force: int) -> str:
        """Push."""
        return "moved"

    with pytest.raises(ConfigError, match="'push' acts on the episode's environment"):
        source_versions([push])
