import json
import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from observe_strategies import texts, values

from ludus.observe import Opaque, dump_value, escape
from ludus.observe.episode_rows import load_value, unescape


@given(texts)
def test_escaped_text_is_utf8_without_nul_and_comes_back(text):
    assert b"\x00" not in escape(text).encode("utf-8")
    assert unescape(escape(text)) == text


@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x00␛")))
def test_ordinary_text_stays_as_it_is(text):
    assert escape(text) == text


@given(values)
def test_values_come_back_exactly_and_are_valid_json(value):
    text, exact = dump_value(value)
    assert exact
    json.loads(text, parse_constant=lambda name: pytest_fail(name))
    restored = load_value(text)
    assert restored == value
    assert repr(restored) == repr(value)  # types too: 1 == 1.0 == True, and a list is not a tuple


def pytest_fail(name):
    raise AssertionError(f"{name} is not JSON")


def test_numbers_that_json_has_no_word_for():
    text, exact = dump_value([math.inf, -math.inf, math.nan, np.int64(3), np.float32(0.5)])
    assert exact
    up, down, none, three, half = load_value(text)
    assert (up, down, three, half) == (math.inf, -math.inf, 3, 0.5)
    assert math.isnan(none)


def test_what_cannot_be_stored_is_shown_and_flagged():
    class Silent:
        def __repr__(self):
            raise RuntimeError("no")

    text, exact = dump_value({"a": {1, 2}, "b": Silent(), "huge": 10**6000})
    assert not exact
    restored = load_value(text)
    assert restored["a"] == Opaque("{1, 2}")
    assert "Silent" in restored["b"].text
    assert isinstance(restored["huge"], Opaque)
    assert dump_value(restored) == (text, False)  # storing it again changes nothing


def test_nesting_and_cycles_end():
    deep: list = []
    for _ in range(100_000):
        deep = [deep]
    text, exact = dump_value(deep)
    assert not exact
    assert "nested too deeply" in text
    cycle: dict = {}
    cycle["self"] = cycle
    assert load_value(dump_value(cycle)[0]) == {"self": Opaque("<a dict nested too deeply>")}
