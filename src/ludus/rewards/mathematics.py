r"""Comparing mathematics: is the answer equivalent to the target? Decided by `math-verify` and sympy.

A bare expression is read as LaTeX (`2\pi`, `x+1`, `1/2`). In prose, what is meant should be in
`\boxed{}` or in dollars; where there is neither, the last plain number or expression is taken, so that
"the area is 2\pi" reads as 2. Answers are compared in a worker process with bounded CPU time and
memory: one that cannot be compared within them does not count as equal. A target that cannot be read is
our own mistake and fails the episode; `check_rewards` finds those before training.
"""

from __future__ import annotations

import importlib.util
import logging
import re
from typing import Any

from ludus.core.failures import MissingExtraError
from ludus.rewards.bounded import LimitExceeded, run_bounded
from ludus.rewards.function import reward
from ludus.rewards.match import targets_of

_MAX_CHARS = 10_000
_HARMLESS = "0"
_DELIMITERS = ("$", r"\boxed", r"\(", r"\[", r"\begin")
_WORD = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]{2,}+")


@reward(timeout=None, retries=1)
async def maths(answer: str, target: Any, *, cpu_seconds: float = 3.0) -> float:
    """1 if the answer is mathematically equivalent to the target, or to one of several."""
    if importlib.util.find_spec("math_verify") is None:
        raise MissingExtraError("math-verify", "maths", "the reward 'maths'")
    said = answer[-_MAX_CHARS:]
    for one in targets_of(target):
        try:
            if await run_bounded(are_equivalent, one, said, cpu_seconds=cpu_seconds):
                return 1.0
        except LimitExceeded:
            await _check_target(one, cpu_seconds)
    return 0.0


async def _check_target(target: str, cpu_seconds: float) -> None:
    """Whose fault was the limit? It is ours if even a harmless answer exceeds it with this target."""
    try:
        await run_bounded(are_equivalent, target, _HARMLESS, cpu_seconds=cpu_seconds)
    except LimitExceeded as error:
        raise ValueError(f"the target {target!r:.60} is too much for math-verify: {error}") from error


def are_equivalent(target: str, answer: str) -> bool:
    """Runs in the worker, which brings the limits that math-verify's own alarm would set."""
    import math_verify

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that it runs without alarms
    wanted = math_verify.parse(delimited(target), parsing_timeout=None)
    if not wanted:
        raise ValueError(f"the target {target!r:.60} cannot be read as mathematics")
    found = math_verify.parse(delimited(answer), parsing_timeout=None)
    return bool(math_verify.verify(wanted, found, timeout_seconds=None))


def delimited(text: str) -> str:
    """A bare expression between dollars, so that it is read as a whole; prose stays as it is."""
    text = text.strip()
    if not text or any(mark in text for mark in _DELIMITERS) or _WORD.search(text):
        return text
    return f"${text}$"
