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
        if await _agree(one, said, cpu_seconds):
            return 1.0
    return 0.0


async def _agree(target: str, said: str, cpu_seconds: float) -> bool:
    """Whether they are equivalent. Not if the answer breaks the comparison, whatever of it breaks.

    It is the answer's doing if the same target can be compared with a harmless one. What is not a limit
    may have been a worker that we lost, so it is tried once more.
    """
    for _ in range(2):
        try:
            return await run_bounded(
                are_equivalent, target, said, cpu_seconds=cpu_seconds, warm_up=warm_up
            )
        except LimitExceeded:
            await _check_target(target, cpu_seconds)
            return False
        except Exception:  # noqa: BLE001 - the control below raises what is ours
            await _check_target(target, cpu_seconds)
    return False


async def _check_target(target: str, cpu_seconds: float) -> None:
    """`ValueError`, or what is broken, where even a harmless answer cannot be compared with the target."""
    try:
        await run_bounded(are_equivalent, target, _HARMLESS, cpu_seconds=cpu_seconds, warm_up=warm_up)
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
