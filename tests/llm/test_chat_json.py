"""JSON out of what models say, however they wrap it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, Field, TypeAdapter

from ludus.core import Message
from ludus.core.generation import ChatOptions
from ludus.llm import RemoteChatModel, UnusableReply, ask_json, parse_json
from ludus.llm.json_reply import json_values
from openai_server import chat, serving

ANY = TypeAdapter(dict[str, Any])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)
PROSE = st.text(st.characters(exclude_characters="{}[]<>"))


class Verdict(BaseModel, extra="forbid"):
    score: float = Field(ge=0, le=10)


@given(st.dictionaries(st.text(), VALUES), PROSE, PROSE, st.booleans())
def test_an_object_is_found_in_prose_and_fences(
    value: dict[str, Any], before: str, after: str, is_fenced: bool
) -> None:
    text = json.dumps(value, indent=2)
    said = f"```json\n{text}\n```" if is_fenced else text
    assert parse_json(before + said + after, ANY) == value


@pytest.mark.parametrize(
    ("said", "score"),
    [
        ('{"score": 7}', 7),
        ('First {"score": 1}. On reflection: {"score": 7}', 7),
        ('<think>{"score": 1}</think>{"score": 7}', 7),
        ('{"score": 7,}', 7),
        ('{"score": 7} as said in [1]', 7),
        ('{"score": 7}\n{"score": 99}', 7),  # out of range: not a verdict
        ('I saw {"verdict": "good"} and {x}, so {"score": 7}', 7),
    ],
)
def test_the_last_value_that_fits_counts(said: str, score: float) -> None:
    assert parse_json(said, Verdict).score == score


@pytest.mark.parametrize(
    "said",
    [
        "",
        "ten out of ten",
        '{"score": 70}',
        '{"score": NaN}',
        '{"score": 1e999}',
        '{"score": 3, "score": 9}',
        '{"score": "high"}',
        '{"score": 3',
        '<think>so {"score": 3}',
        "{" * 100_000,
        '{"a":' * 50_000,
        "[" * 100_000 + "]" * 100_000,
    ],
    ids=lambda said: said[:20],
)
def test_what_is_no_verdict_is_refused(said: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_json(said, Verdict)


@given(st.text('{}[]",:1 \\n<think/>', max_size=200))
def test_no_text_breaks_the_search(said: str) -> None:
    for value in json_values(said):
        assert isinstance(value, dict | list)


async def test_a_bad_answer_is_asked_for_again_with_what_was_wrong() -> None:
    said = iter(["ten", '{"score": 70}', '{"score": 7}'])
    with serving(lambda body: chat(next(said))) as server:
        model = RemoteChatModel(f"{server.url}#tiny")
        found = await ask_json(model, [Message("user", "judge")], Verdict, ChatOptions(max_tokens=50))
        await model.close()
    assert found.value.score == 7
    assert len(found.replies) == 3
    assert len(found.asked) == 3
    first, second, third = server.bodies
    assert [message["role"] for message in third["messages"]] == ["user", "assistant", "user"]
    assert "no JSON" in second["messages"][2]["content"]
    assert third["messages"][1]["content"] == '{"score": 70}'
    assert "less than or equal to 10" in third["messages"][2]["content"]
    assert first["response_format"] == {"type": "json_object"}


async def test_it_gives_up_with_a_typed_failure() -> None:
    with serving(lambda body: chat('{"score": ', "length")) as server:
        model = RemoteChatModel(f"{server.url}#tiny")
        with pytest.raises(UnusableReply, match=r"in 2 attempts.*be brief"):
            await ask_json(model, [Message("user", "judge")], Verdict, attempts=2)
        await model.close()
    assert len(server.asked) == 2
