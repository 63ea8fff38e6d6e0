"""What a tool returned, as text."""

from __future__ import annotations

import json
import re
import unicodedata
from dataclasses import dataclass
from enum import Enum
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import BaseModel

from ludus.core import ByteTokenizer, Media, ToolResult
from ludus.tools import OutputLimits
from ludus.tools.calling import cut, result_of, text_of

NOTE = re.compile(r"\n\.\.\. \[([\d,]+) characters left out\] \.\.\.\n")


@dataclass
class Point:
    x: int
    y: float


class Card(BaseModel):
    name: str


class Broken:
    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


class Colour(Enum):
    RED = "red"


def circle() -> list[Any]:
    ring: list[Any] = [1]
    ring.append(ring)
    return ring


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("text", "text"),
        (None, "done"),
        (3, "3"),
        (True, "true"),
        (2.5, "2.5"),
        (Colour.RED, "red"),
        ({"a": [1, "é"]}, '{"a":[1,"é"]}'),
        ([Point(1, 2.0), Card(name="x")], '[{"x":1,"y":2.0},{"name":"x"}]'),
        (float("nan"), '"NaN"'),
        ({"a": float("inf")}, '{"a":"Infinity"}'),
        (PurePosixPath("/a"), '"/a"'),
        (np.arange(3), "[0,1,2]"),
        ({"n": np.float32(1.5)}, '{"n":1.5}'),
        (b"caf\xc3\xa9 \xff", "café \\xff"),
        ({"raw": b"\xff"}, '{"raw": "\\\\xff"}'),
        (object(), '"<object>"'),
        (circle(), '[1, "..."]'),
        ([Broken()], '["<Broken>"]'),
    ],
)
def test_values_become_text(value: Any, expected: str):
    assert text_of(value) == expected


@pytest.mark.parametrize(
    "value", [10**6000, {"n": 10**6000}, {(1, 2): 3}, {"\udc80": "\udc80"}, {1, 2}], ids=range(5)
)
def test_odd_values_still_become_text(value: Any):
    assert OutputLimits().apply(text_of(value)).encode()


def test_a_deep_value_is_cut_off_rather_than_fatal():
    deep: list[Any] = []
    for _ in range(50_000):
        deep = [deep]
    assert json.loads(text_of(deep))


def test_results_and_media_pass_through():
    media = Media("image", "00")
    given_result = ToolResult("x", reward=0.5, terminated=True, media=(media,))
    assert result_of(given_result) is given_result
    assert result_of(media) == ToolResult("[image]", media=(media,))
    assert result_of(["look:", media]) == ToolResult("look:\n[image]", media=(media,))
    assert result_of(ToolResult({"a": 1})).content == '{"a":1}'  # type: ignore[arg-type]


@given(st.text(max_size=400), st.integers(1, 300))
def test_cutting_keeps_head_and_tail_and_counts_the_rest(text: str, limit: int):
    short = cut(text, limit)
    assert len(short) <= limit
    if len(text) <= limit:
        assert short == text
    elif note := NOTE.search(short):
        head, tail = short[: note.start()], short[note.end() :]
        assert text.startswith(head) and text.endswith(tail)
        assert len(head) + len(tail) + int(note[1].replace(",", "")) == len(text)
        assert abs(len(head) - len(tail)) <= 1
    else:
        assert text.startswith(short)


def test_the_note_reads_well():
    note = "\n... [12,345 characters left out] ...\n"
    assert note in cut("x" * (12_345 + 1_000 - len(note)), 1_000)


@given(st.text(st.characters(), max_size=200), st.integers(1, 120), st.integers(1, 80))
def test_the_limit_in_tokens_holds_and_text_is_clean(text: str, chars: int, tokens: int):
    encode = ByteTokenizer().encode
    short = OutputLimits(chars, tokens, encode).apply(text)
    assert len(short) <= chars and len(encode(short)) <= tokens
    short.encode("utf-8")


def test_a_hundred_megabytes_are_never_tokenized():
    seen: list[int] = []

    def encode(text: str) -> list[int]:
        seen.append(len(text))
        return list(text.encode())

    short = OutputLimits(max_tokens=1_000, encode=encode).apply("é" * 100_000_000)
    assert len(encode(short)) <= 1_000
    assert "99,999," in short
    assert max(seen) <= 20_000 and len(seen) < 20


@example("\ufdfa" * 20, 620)
@given(
    st.text(st.characters() | st.sampled_from("\ufdfa\u3300\uff1c"), max_size=60), st.integers(1, 200)
)
def test_the_limit_holds_for_tokenizers_that_write_text_out_in_full(text: str, tokens: int):
    def encode(text: str) -> list[int]:
        return list(unicodedata.normalize("NFKC", text).encode())

    short = OutputLimits(max_tokens=tokens, encode=encode).apply(text)
    assert len(encode(short)) <= tokens


def test_what_is_surely_short_is_not_tokenized():
    def encode(text: str) -> list[int]:
        raise AssertionError("nobody needs to know")

    assert len(OutputLimits(max_tokens=100, encode=str.encode).apply("x" * 101)) <= 100
    limits = OutputLimits(max_tokens=100, encode=encode)
    assert limits.apply("x" * 100) == "x" * 100
    assert limits.apply("é" * 4) == "é" * 4


def test_lone_surrogates_are_replaced():
    assert OutputLimits().apply("a\ud800b") == "a\N{REPLACEMENT CHARACTER}b"
