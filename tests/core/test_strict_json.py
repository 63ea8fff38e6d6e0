"""JSON of strangers: what cannot be sent on is refused with the reason."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ludus.core.strict_json import BadJson, check_json, read_object, whole_json

PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: (
        st.lists(inner) | st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), inner)
    ),
    max_leaves=20,
)


@given(st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), PLAIN))
def test_what_json_can_carry_is_read_as_it_is(value: Any) -> None:
    assert read_object(json.dumps(value).encode()) == value
    assert whole_json(f"  {json.dumps(value, ensure_ascii=False)}\n") == value


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "not valid JSON"),
        (b"{} x", "something follows"),
        (b"[]", "must be a JSON object"),
        (b"\xff", "not UTF-8"),
        ('{"a": 1}'.encode("utf-16"), "not UTF-8"),
        (b'{"a": NaN}', "NaN"),
        (b'{"a": -Infinity}', "Infinity"),
        (b'{"a": 1e999}', "too large"),
        (b'{"a": ' + b"9" * 5000 + b"}", "too many digits"),
        (b'{"a": 1, "a": 2}', "given twice"),
        (b'{"a": "\\ud800"}', "surrogate"),
        (b'{"\\udc80": 1}', "surrogate"),
        (b'{"a":' * 101 + b"1" + b"}" * 101, "more than 100 levels"),
        (b'{"a":' * 100_000, "more than 100 levels"),
        (b'{"a": [' + b"0," * 200_001 + b"0]}", "more than 200,000 keys and values"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_what_cannot_be_sent_on_is_refused(data: bytes, said: str) -> None:
    with pytest.raises(BadJson, match=said):
        read_object(data)


@pytest.mark.parametrize("value", [{"a": float("nan")}, [float("inf")], {"\ud800": 1}])
def test_values_that_were_read_by_others_are_checked(value: Any) -> None:
    with pytest.raises(BadJson):
        check_json(value)
