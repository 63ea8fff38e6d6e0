"""Exact match, F1 and containment, against a second implementation of SQuAD's definitions."""

from __future__ import annotations

import re
import string

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ludus.core import InfraError
from ludus.rewards import contains, exact_match, f1
from ludus.rewards.text_rewards import normalised, token_f1

words = st.lists(
    st.sampled_from(["The", "a", "an", "cat", "Cat!", "theory", "42", "é", "U.S.", "-", "\t", "\n"]),
    max_size=8,
).map(" ".join)
texts = words | st.text(max_size=30)


def reference_tokens(text: str) -> list[str]:
    """SQuAD's normalisation, step by step and character by character."""
    kept = "".join(c for c in text.lower() if c not in string.punctuation)
    return [t for t in re.sub(r"\b(a|an|the)\b", " ", kept).split() if t]


def reference_f1(one: str, other: str) -> float:
    left, right = reference_tokens(one), reference_tokens(other)
    pool, same = list(right), 0
    for token in left:
        if token in pool:
            pool.remove(token)
            same += 1
    if not same:
        return 0.0
    precision, recall = same / len(left), same / len(right)
    return 2 * precision * recall / (precision + recall)


@given(texts)
def test_normalisation_is_squads_wherever_that_leaves_anything(text):
    expected = reference_tokens(text)
    assume(expected)
    assert normalised(text).split() == expected


@given(texts)
def test_only_a_blank_text_normalises_to_nothing(text):
    assert bool(normalised(text)) == bool(text.split())


@given(texts, texts)
def test_f1_is_squads_and_symmetric_and_bounded(one, other):
    score = token_f1(one, other)
    assert 0.0 <= score <= 1.0
    assert score == token_f1(other, one)
    assume(reference_tokens(one) and reference_tokens(other))
    assert score == pytest.approx(reference_f1(one, other))


@given(texts, texts)
def test_exact_match_implies_full_f1_and_containment(one, other):
    assume(other.strip())
    matched = exact_match(one, other)
    assert matched in (0.0, 1.0)
    if matched:
        assert f1(one, other) == contains(one, other) == 1.0


@given(texts)
def test_every_text_matches_itself(text):
    assume(text.strip())
    assert exact_match(text, text) == f1(text, text) == contains(text, text) == 1.0


@pytest.mark.parametrize(
    ("answer", "target", "em", "overlap", "within"),
    [
        ("The Eiffel Tower!", "eiffel tower", 1.0, 1.0, 1.0),
        ("the tower", "eiffel tower", 0.0, 2 / 3, 0.0),
        ("A", "A", 1.0, 1.0, 1.0),
        ("A", "the", 0.0, 0.0, 0.0),
        ("+", "-", 0.0, 0.0, 0.0),
        ("", "a", 0.0, 0.0, 0.0),
        ("It was in the party.", "art", 0.0, 0.0, 0.0),
        ("It is Paris, France.", "paris france", 0.0, 2 / 3, 1.0),
        ("42", 42, 1.0, 1.0, 1.0),
        ("NYC", ["New York", "NYC"], 1.0, 1.0, 1.0),
        ("York", ("New York", "NYC"), 0.0, 2 / 3, 0.0),
    ],
)
def test_examples(answer, target, em, overlap, within):
    assert exact_match(answer, target) == em
    assert f1(answer, target) == pytest.approx(overlap)
    assert contains(answer, target) == within


@pytest.mark.parametrize("target", [None, "", "  ", [], ["x", ""], {"a": 1}, [None]])
async def test_a_task_without_a_usable_target_fails_instead_of_paying_silence(episode, target):
    trajectory = episode(answer=None, target=target)
    for made in (exact_match, f1, contains):
        with pytest.raises(InfraError, match="target"):
            await made.score(trajectory, trajectory.task, {})


def test_large_texts_are_no_trouble():
    big = "the cat " * 200_000
    assert exact_match(big, big) == f1(big, big) == 1.0
