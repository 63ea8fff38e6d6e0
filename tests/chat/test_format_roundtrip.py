"""What a format writes, it reads back as the same."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ludus.chat import load_format
from ludus.chat.formats import NATIVE
from ludus.chat.formats.base import THINK
from ludus.core import ToolCall, ToolSpec

NAMES = st.from_regex(r"[a-z][a-z0-9_]{0,8}", fullmatch=True)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
CALLS = st.builds(ToolCall, NAMES, st.dictionaries(TEXTS, VALUES, max_size=3))
SAID = st.text("abc .,\n", max_size=20).map(str.strip)
THOUGHTS = st.one_of(st.just(""), st.just(f"{THINK[0]}\nhm\n{THINK[1]}\n\n"))


@pytest.mark.parametrize("name", ["hermes", "llama3"])
@given(said=SAID, calls=st.lists(CALLS, min_size=1, max_size=3), thought=THOUGHTS)
def test_json_formats(name, said, calls, thought):
    format = load_format(name)
    parsed = format.parse(thought + format.render_action(said, calls))
    assert parsed.calls == tuple(calls)
    assert parsed.text == said


@pytest.mark.parametrize(
    "name", ["mistral", "mistral_list", "deepseek_v3", "deepseek_v31", "kimi", "lfm2", "pythonic"]
)
@given(said=SAID, calls=st.lists(CALLS, min_size=1, max_size=3), thought=THOUGHTS)
def test_formats_of_families_with_arguments_as_a_whole(name, said, calls, thought):
    format = load_format(name)
    assume(not format.unreachable([ToolSpec(call.name, "", {}) for call in calls]))
    parsed = format.parse(thought + format.render_action(said, calls))
    assert parsed.calls == tuple(calls)
    assert parsed.text == ("" if name == "pythonic" else said)


@given(said=SAID, call=CALLS, thought=st.text("ab\n", max_size=5).map(str.strip))
def test_harmony(said, call, thought):
    format = load_format("harmony")
    for calls in ([], [call]):
        parsed = format.parse(format.render_action(f"<think>{thought}</think>{said}", calls))
        assert (parsed.calls, parsed.thought, parsed.text) == (tuple(calls), thought, said)


TYPES = {
    "string": TEXTS,
    "integer": st.integers(-(2**70), 2**70),
    "number": st.floats(allow_nan=False, allow_infinity=False),
    "boolean": st.booleans(),
    "null": st.none(),
    "array": st.lists(VALUES, max_size=3),
    "object": st.dictionaries(TEXTS, VALUES, max_size=3),
}


@st.composite
def typed_tools(draw):
    """A tool with a schema, and calls that fit it."""
    kinds = draw(st.dictionaries(NAMES, st.sampled_from(sorted(TYPES)), max_size=4))
    properties = {key: {"type": kind} for key, kind in kinds.items()}
    tool = ToolSpec(draw(NAMES), "Do it.", {"type": "object", "properties": properties})
    arguments = st.fixed_dictionaries({key: TYPES[kind] for key, kind in kinds.items()})
    calls = draw(
        st.lists(arguments.map(lambda given: ToolCall(tool.name, given)), min_size=1, max_size=3)
    )
    return tool, calls


@pytest.mark.parametrize(
    "name", ["qwen3_coder", "function", "glm", "glm45", "minimax", "deepseek_v32", "deepseek_v4"]
)
@given(said=SAID, made=typed_tools(), thought=THOUGHTS)
def test_formats_of_families_with_arguments_as_text(name, said, made, thought):
    """The schema says which text is a number, and which a string that looks like one."""
    tool, calls = made
    format = load_format(name).bind([tool])
    parsed = format.parse(thought + format.render_action(said, calls))
    assert parsed.calls == tuple(calls)
    assert parsed.text == said


@given(said=SAID, call=CALLS)
def test_react(said, call):
    format = load_format("react")
    parsed = format.parse(format.render_action(said, [call]))
    assert (parsed.calls, parsed.text) == ((call,), said)


@given(
    said=SAID,
    blocks=st.lists(
        st.tuples(st.sampled_from(["python.code", "sql.query"]), TEXTS), min_size=1, max_size=3
    ),
)
@pytest.mark.parametrize("name", ["tags", "fenced"])
def test_block_formats(name, said, blocks):
    calls = tuple(ToolCall(t.split(".")[0], {t.split(".")[1]: text}) for t, text in blocks)
    format = load_format(name)
    parsed = format.parse(format.render_action(said, calls))
    assert parsed.calls == calls
    assert parsed.text == said


@pytest.mark.parametrize("take", ["text", "last_line", "label"])
@given(action=st.text("abc north", min_size=1).map(str.strip).filter(bool))
def test_plain(take, action):
    format = load_format("plain", take=take)
    call = ToolCall("step", {"action": action})
    assert format.parse(format.render_action("well", [call])).calls == (call,)


@pytest.mark.parametrize("name", ["tags", "fenced", "react", *NATIVE])
@given(answer=SAID)
def test_answers(name, answer):
    format = load_format(name)
    parsed = format.parse(format.render_action(answer))
    assert (parsed.answer, parsed.calls) == (answer, ())
