r"""The reward `maths`: equivalence by `math-verify` and sympy.

A bare expression is parsed as LaTeX (`2\pi`, `x+1`, `1/2`). In prose the result should be in `\boxed{}` or in
dollars; without them the last plain number or expression counts, so that "the area is 2\pi" is 2. A target
that cannot be parsed is an error of the task set and fails the episode; `check_rewards` finds those before
training.
"""

from __future__ import annotations

import importlib.util
import logging
import re
from typing import Any

from ludus.core.failures import MissingExtraError
from ludus.rewards.resource_limited import LimitExceeded, run_limited
from ludus.rewards.reward import reward
from ludus.rewards.text_rewards import targets_of

_MAX_MATHS_CHARS = 10_000
_CONTROL_ANSWER = "0"
_DELIMITERS = ("$", r"\boxed", r"\(", r"\[", r"\begin")
_WORD = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]{2,}+")


@reward(timeout=None, retries=1)
async def maths(answer: str, target: Any, *, cpu_seconds: float = 3.0) -> float:
    """1 if the answer is mathematically equivalent to the target, or to one of several."""
    if importlib.util.find_spec("math_verify") is None:
        raise MissingExtraError("math-verify", "maths", "the reward 'maths'")
    text = answer[-_MAX_MATHS_CHARS:]
    for one in targets_of(target):
        if await _are_equivalent(one, text, cpu_seconds):
            return 1.0
    return 0.0


async def _are_equivalent(target: str, answer: str, cpu_seconds: float) -> bool:
    """Whether they are equivalent. An answer that breaks the comparison is wrong.

    Fault attribution: it is the answer's fault if the same target can be compared with a control answer. An
    error other than a limit may have been a lost worker, so the comparison is tried once more.
    """
    for _ in range(2):
        try:
            return await run_limited(
                are_equivalent, target, answer, cpu_seconds=cpu_seconds, warm_up=warm_up
            )
        except LimitExceeded:
            await _check_target(target, cpu_seconds)
            return False
        except Exception:  # noqa: BLE001 - the check below raises what is not the answer's fault
            await _check_target(target, cpu_seconds)
    return False


async def _check_target(target: str, cpu_seconds: float) -> None:
    """Raise where even a control answer cannot be compared with the target."""
    try:
        await run_limited(
            are_equivalent, target, _CONTROL_ANSWER, cpu_seconds=cpu_seconds, warm_up=warm_up
        )
    except LimitExceeded as error:
        raise ValueError(f"the target {target!r:.60} is too much for math-verify: {error}") from error


def warm_up() -> None:
    """Make a worker ready: importing sympy and reading the grammar take most of a second."""
    for answer in ("1/2", r"$\frac{1}{2}x$", r"\boxed{\{1, 2\}}"):
        are_equivalent(r"$\sqrt{2}$", answer)


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
