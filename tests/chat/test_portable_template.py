"""The template for other programs: token for token what the renderer makes of the same conversation."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from format_templates import PRESERVING, hf_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2 import TemplateError

from ludus.chat import CHATML, FORMATS, ActionFormat, HFTokenizer, ParsedAction, Renderer, load_format
from ludus.chat.portable_template import as_request, literal, portable_template
from ludus.core import Message, ToolCall, ToolResult, ToolSpec

PYTHON = ToolSpec(
    "python",
    'Run code, such as "é" or {% x %}.',
    {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]},
)
SEARCH = ToolSpec(
    "search",
    "Search\n  the archive.",
    {
        "type": "object",
        "properties": {"query": {"type": "string"}, "most": {"type": "integer", "default": None}},
    },
)
STEP = ToolSpec("step", "Move.", {"type": "object", "properties": {"action": {"type": "string"}}})
TOOLS = {"plain": [STEP], "fenced": [PYTHON]}
SYSTEM = "Be brief."
APART = {
    "qwen3_coder",
    "function",
    "glm",
    "glm45",
    "minimax",
    "deepseek_v32",
    "deepseek_v4",
    "lfm2",
    "pythonic",
}
"""Formats in which each argument has a place of its own: a template must write them itself."""
ONE_CALL = ("plain", "react", "harmony", "deepseek_v3", "deepseek_v31", "kimi", "mistral_list")
EXAMPLES = settings.default.max_examples // 5
"""For each of many templates and formats."""

WORDS = st.text("abcé .,:+\n", min_size=1, max_size=12).map(str.strip).filter(bool)
CALLS = st.lists(st.tuples(WORDS, WORDS), min_size=1, max_size=2)


def render(tokenizer: HFTokenizer, template: str, messages: list[Any], tools: Any = None) -> list[int]:
    found: list[int] = tokenizer.inner.apply_chat_template(
        messages, tools=tools, chat_template=template, add_generation_prompt=True, return_dict=False
    )
    return found


@cache
def made(kind: str, format: str) -> tuple[Renderer, HFTokenizer, list[ToolSpec], str]:
    tokenizer = hf_tokenizer(kind)
    renderer = Renderer(tokenizer, load_format(format), "keep")
    tools = TOOLS.get(format, [PYTHON, SEARCH])
    template = portable_template(renderer, tokenizer, [tools], system=SYSTEM)
    return renderer.bound(tools), tokenizer, tools, template


@pytest.mark.parametrize("format", sorted(APART))
def test_arguments_apart_are_refused_where_the_template_does_not_write_them(format: str) -> None:
    _, tokenizer, tools, template = made("chatml", format)
    call = Message("assistant", "", (ToolCall(tools[0].name, {"code": "1"}),)).as_chat()
    with pytest.raises(TemplateError, match="without tool_calls"):
        render(tokenizer, template, [{"role": "user", "content": "hi"}, call])


@pytest.mark.parametrize("family", ["qwen3_coder", "glm", "minimax", "harmony"])
def test_a_template_of_a_family_writes_calls_and_results_itself(family: str) -> None:
    renderer, tokenizer, tools, template = made(family, family)
    call = ToolCall("search", {"query": "rome", "most": "3"}, "callnine1")
    thought = "<think>\n\n</think>\n\n" if renderer.features.opens_thinking else ""
    acted = renderer.action_text(Message("assistant", thought, (call,)))
    conversation = [
        Message("system", SYSTEM),
        Message("user", "where?"),
        Message("assistant", acted, (call,)),
        Message("tool", "found", name="search", tool_call_id="callnine1"),
    ]
    asked = [as_request(message, renderer.format) for message in conversation]
    assert asked[2]["tool_calls"]
    assert render(tokenizer, template, asked) == renderer.prompt(conversation, tools)


@pytest.mark.parametrize("format", sorted(set(FORMATS) - APART))
@pytest.mark.parametrize("kind", sorted(PRESERVING))
@settings(max_examples=EXAMPLES)
@given(said=st.just("") | WORDS, made_calls=CALLS, question=WORDS, system=st.none() | WORDS)
def test_conversations_have_the_tokens_of_the_renderer(
    kind: str,
    format: str,
    said: str,
    made_calls: list[tuple[str, str]],
    question: str,
    system: str | None,
) -> None:
    renderer, tokenizer, tools, template = made(kind, format)
    argument = next(iter(tools[0].parameters["properties"]))
    calls = [ToolCall(tools[0].name, {argument: text}) for text, _ in made_calls]
    calls = calls[:1] if format in ONE_CALL else calls
    own = renderer.format
    conversation = [
        *([] if system is None else [Message("system", system)]),
        Message("user", question),
        Message("assistant", own.render_action(said, calls), tuple(calls)),
        *(own.render_result(c, ToolResult(r)) for c, (_, r) in zip(calls, made_calls, strict=False)),
    ]
    given_system = conversation if system is not None else [Message("system", SYSTEM), *conversation]
    expected = renderer.prompt(given_system, tools)
    asked = [as_request(message, own) for message in conversation]
    assert "tool_calls" in asked[-1 - len(calls)]
    listed = [tool.as_openai() for tool in tools]
    for one in listed:  # as servers pass them on
        one["function"] = {"strict": None, **one["function"]}
    assert render(tokenizer, template, asked) == expected
    assert render(tokenizer, template, asked, listed) == expected
    in_parts = [
        {**message, "content": [{"type": "text", "text": message["content"]}]} for message in asked
    ]
    assert render(tokenizer, template, in_parts, listed) == expected


def test_other_tools_are_listed_where_the_format_lists_any() -> None:
    renderer, tokenizer, _, template = made("trimming", "hermes")
    asked = [Message("user", "hi")]
    expected = renderer.prompt([Message("system", SYSTEM), *asked], [STEP])
    assert render(tokenizer, template, [asked[0].as_chat()], [STEP.as_openai()]) == expected
    none = renderer.prompt([Message("system", SYSTEM), *asked])
    assert render(tokenizer, template, [asked[0].as_chat()], []) == none


@pytest.mark.parametrize("format", ["tags", "fenced", "react"])
def test_other_tools_are_refused_where_it_has_no_place_for_them(format: str) -> None:
    _, tokenizer, _, template = made("trimming", format)
    with pytest.raises(TemplateError, match="trained with alone"):
        render(tokenizer, template, [{"role": "user", "content": "hi"}], [STEP.as_openai()])


def test_what_cannot_be_written_is_refused() -> None:
    call = {"type": "function", "function": {"name": "python", "arguments": {"code": "a\n```\nb"}}}
    _, tokenizer, _, template = made("chatml", "fenced")
    asked = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    with pytest.raises(TemplateError, match="a fence of its own"):
        render(tokenizer, template, asked)
    call["function"] = {"name": "python", "arguments": '{"code": "a"}'}
    with pytest.raises(TemplateError, match="as objects"):
        render(tokenizer, template, asked)
    call["function"] = {"name": "search", "arguments": {}}
    with pytest.raises(TemplateError, match="not trained with"):
        render(tokenizer, made("chatml", "plain")[3], asked)
    with pytest.raises(TemplateError, match="one call"):
        asked[1]["tool_calls"] = [call, call]
        render(tokenizer, made("chatml", "react")[3], asked)
    with pytest.raises(TemplateError, match="text only"):
        render(tokenizer, template, [{"role": "user", "content": [{"type": "image"}]}])


def test_results_inside_the_turn_are_refused() -> None:
    tokenizer = hf_tokenizer("chatml")
    template = portable_template(
        Renderer(tokenizer, load_format("hermes"), turns="inline"), tokenizer, [[PYTHON]]
    )
    result = {"role": "tool", "content": "4"}
    with pytest.raises(TemplateError, match="in its own turn"):
        render(tokenizer, template, [{"role": "user", "content": "hi"}, result])


def test_a_format_that_no_probe_understands_is_refused_where_it_calls() -> None:
    class Reversed(ActionFormat):
        name = "reversed"

        def parse(self, text: str) -> ParsedAction:
            return ParsedAction(text, (), text)

        def describe(self, tools: Any) -> str:
            return "Call backwards."

        def render_action(self, text: str, calls: Any = ()) -> str:
            return text + "".join(repr(call.arguments)[::-1] for call in calls)

    tokenizer = hf_tokenizer("chatml")
    renderer = Renderer(tokenizer, Reversed())
    template = portable_template(renderer, tokenizer, [[PYTHON]])
    hi = Message("user", "hi")
    assert render(tokenizer, template, [hi.as_chat()]) == renderer.prompt([hi], [PYTHON])
    call = Message("assistant", "", (ToolCall("python", {"code": "1"}),)).as_chat()
    with pytest.raises(TemplateError, match="without tool_calls"):
        render(tokenizer, template, [hi.as_chat(), call])


def test_variables_of_the_template_are_set_unless_a_request_does() -> None:
    source = CHATML + "{% if thinking %}<think>{% endif %}"
    tokenizer = HFTokenizer(
        hf_tokenizer("chatml").inner, chat_template=source, template_kwargs={"thinking": False}
    )
    template = portable_template(Renderer(tokenizer, load_format("hermes")), tokenizer)
    text = [{"role": "user", "content": "hi"}]
    assert "<think>" not in tokenizer.decode(render(tokenizer, template, text))
    shown = tokenizer.inner.apply_chat_template(
        text, chat_template=template, tokenize=False, thinking=True
    )
    assert shown.endswith("<think>")


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=9),
        lambda inner: (
            st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
        ),
        max_leaves=6,
    )
)
def test_literals_are_values_of_jinja(value: Any) -> None:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    compiled = ImmutableSandboxedEnvironment().compile_expression(
        literal(value), undefined_to_none=False
    )
    assert compiled() == value
