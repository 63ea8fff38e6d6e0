"""Comparing texts: exact match, token F1 and containment, with the normalisation of SQuAD.

Normalising lowers the case, drops punctuation and the articles a, an, the, and joins what remains by
single spaces (Rajpurkar et al., "SQuAD", 2016). One difference: a text of which nothing would remain is
kept, so that the option "A" is not the same as "the", nor "+" the same as "-".
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Callable
from typing import Any

from ludus.rewards.function import reward

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")


def normalised(text: str) -> str:
    """`text` as SQuAD compares it; empty only if `text` is blank."""
    lowered = text.lower()
    plain = lowered.translate(_PUNCTUATION)
    for candidate in (_ARTICLES.sub(" ", plain), plain, lowered):
        joined = " ".join(candidate.split())
        if joined:
            return joined
    return ""


def targets_of(target: Any) -> list[str]:
    """The texts that are right: one, or several; numbers are written out."""
    several = target if isinstance(target, list | tuple | set | frozenset) else [target]
    texts: list[str] = []
    for one in several:
        if not isinstance(one, str | int | float):
            raise TypeError(f"a target must be text or a number (or a list of these), not {one!r:.60}")
        texts.append(str(one))
    if not texts or not all(text.strip() for text in texts):
        raise ValueError("the task has no target, or a blank one, which no answer at all would match")
    return texts


def _best(compare: Callable[[str, str], float], answer: str, target: Any) -> float:
    return max(compare(answer, one) for one in targets_of(target))


@reward
def exact_match(answer: str, target: Any) -> float:
    """1 if the normalised answer is a normalised target."""
    return _best(lambda a, b: float(normalised(a) == normalised(b)), answer, target)


@reward
def f1(answer: str, target: Any) -> float:
    """The harmonic mean of precision and recall over tokens; the best over several targets."""
    return _best(token_f1, answer, target)


@reward
def contains(answer: str, target: Any) -> float:
    """1 if a normalised target occurs in the normalised answer as a run of whole words.

    An answer that lists everything contains the target too: use it where the answer is short.
    """
    return _best(lambda a, b: float(f" {normalised(b)} " in f" {normalised(a)} "), answer, target)


def token_f1(one: str, other: str) -> float:
    """The overlap of two texts as multisets of tokens, from 0 to 1; symmetric."""
    left, right = normalised(one).split(), normalised(other).split()
    if not left or not right:
        return float(left == right)
    common = (Counter(left) & Counter(right)).total()
    return 2 * common / (len(left) + len(right))
