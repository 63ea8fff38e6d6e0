"""Keys of randomness: any text has one, and it is stable."""

from __future__ import annotations

import hashlib

from hypothesis import given
from hypothesis import strategies as st

from ludus.core.random import key


@given(st.text())
def test_any_text_has_a_key(text: str) -> None:
    assert 0 <= key(1, text, 2) < 2**63
    assert key(text) == key(text) != key(text + "x")


def test_halves_of_surrogate_pairs_have_keys() -> None:
    """A task's id comes from a file, and JSON can hold them."""
    assert len({key("\ud800"), key("\udc80"), key("?"), key("\ufffd")}) == 4


def test_keys_are_those_of_earlier_runs() -> None:
    digest = hashlib.blake2b("int:1\x1fstr:tâche\x1fint:2".encode(), digest_size=8).digest()
    assert key(1, "tâche", 2) == int.from_bytes(digest, "big") >> 1
