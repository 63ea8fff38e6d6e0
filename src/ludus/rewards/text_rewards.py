"""Rewards of an answer's text: equality, overlap, numbers, mathematics, and the form that was asked for.

Texts are hostile input. Regular expressions here use possessive quantifiers, so that they stay linear; what
cannot be made safe (sympy, users' patterns) runs in a worker process with limits on CPU time and memory
(`maths`, `Format`). The limit is CPU time, not wall time: a busy machine makes no answer wrong. Imports and
tables that are made at first use are not counted. Workers are kept for the next call, and end with this
process.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import math
import os
import re
import resource
import signal
import string
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import MAX_EMAX, MIN_EMIN, Context, Decimal, InvalidOperation
from fractions import Fraction
from functools import cache
from typing import Any, Literal, TypeVar

from ludus.core.failures import ConfigError, Fault, LudusError, MissingExtraError
from ludus.core.task import Task
from ludus.core.trajectory import Trajectory
from ludus.remote.processes import ProcessExecutor
from ludus.remote.threads import WorkerError
from ludus.rewards.reward import FunctionReward, reward
from ludus.rewards.scores import OptionsReward, Parts

T = TypeVar("T")

_MEMORY = 1 << 30
_WALL_SECONDS = 120.0
_CAUSED_BY_INPUT = ("SIGPROF", "SIGSEGV", "SIGABRT", "SIGBUS", "SIGFPE", "SIGILL", "SIGTRAP")
"""How a worker dies of what it was given: out of CPU time, out of stack, or a crash in C code."""

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_MAX_CHARS = 100_000
_ARITHMETIC = Context(prec=50, Emax=MAX_EMAX, Emin=MIN_EMIN, traps=[])
_DEFAULT_TOLERANCE = Decimal("1e-6")
# Possessive quantifiers (++, ?+) never give back what they took, so that matching stays linear.
_PLAIN = r"(?:[0-9]{1,3}(?:,[0-9]{3})++(?![0-9])|[0-9]++)(?:\.[0-9]++)?+|\.[0-9]++"
_NUMBER = re.compile(
    rf"""(?<![\w.]) (?:(?<![)\]}}])(?P<sign>[-+]))?+ [$€£¥]?+
    (?: \\[dt]?frac \s*+ \{{\s*+ (?P<top>-?{_PLAIN}) \s*+\}} \s*+ \{{\s*+ (?P<bottom>-?{_PLAIN}) \s*+\}}
      | (?:(?P<whole>[0-9]++)[ ]++)? (?P<over>{_PLAIN}) [ ]*+/[ ]*+ (?P<under>{_PLAIN})
      | (?P<plain>{_PLAIN})
        (?: [eE](?P<exponent>[-+]?[0-9]++)(?!\w)
          | \s*+(?:[x×*]|\\times|\\cdot)\s*+10\s*+(?:\^|\*\*)\s*+\{{?(?P<power>[-+]?[0-9]++)\}}? )?
    ) \s?+ (?P<percent>\\?%)?""",
    re.VERBOSE,
)
_log = logging.getLogger(__name__)
_CPU_SECONDS = 1.0
_MAX_MATHS_CHARS = 10_000
_CONTROL_ANSWER = "0"
_DELIMITERS = ("$", r"\boxed", r"\(", r"\[", r"\begin")
_WORD = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]{2,}+")


class LimitExceeded(LudusError):
    """The function needed more CPU time or memory for this input than it may have."""


@cache
def _workers(process: int) -> ProcessExecutor:
    """Made on first use; `process` keeps a forked child from using its parent's."""
    return ProcessExecutor(max(1, min(4, os.cpu_count() or 1)), name="ludus-limited")


async def run_limited(
    function: Callable[..., T],
    *args: Any,
    cpu_seconds: float,
    memory: int = _MEMORY,
    warm_up: Callable[[], object] | None = None,
) -> T:
    """The result of an importable function, or `LimitExceeded`.

    `warm_up`, importable too, makes a worker ready for the function: it runs once in each, without a limit.
    """
    workers = _workers(os.getpid())
    try:
        return await workers.run(
            limited, function, args, cpu_seconds, memory, warm_up, timeout=_WALL_SECONDS
        )
    except MemoryError as error:
        raise LimitExceeded(f"more than {memory >> 20} MiB of memory") from error
    except WorkerError as error:
        if any(name in str(error) for name in _CAUSED_BY_INPUT):
            raise LimitExceeded(
                f"more than {cpu_seconds:g} s of CPU time, or a crash: {error}"
            ) from error
        raise


_warm: set[Callable[[], object]] = set()
"""Warm-up functions that have run in this worker."""


def limited(
    function: Callable[..., T],
    args: tuple[Any, ...],
    cpu_seconds: float,
    memory: int,
    warm_up: Callable[[], object] | None = None,
) -> T:
    """Runs in the worker. The timer's signal is left to kill the process, even inside C code."""
    if warm_up is not None and warm_up not in _warm:
        warm_up()
        _warm.add(warm_up)
    with contextlib.suppress(ValueError, OSError):  # where the system has no such limit
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        resource.setrlimit(resource.RLIMIT_AS, (memory if hard < 0 else min(memory, hard), hard))
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
    try:
        return function(*args)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


# Text: normalised as in SQuAD (Rajpurkar et al., 2016): lower case, no punctuation, no articles, single spaces.
# One difference: a text of which nothing would remain is kept, so that the option "A" is not the same as "the",
# nor "+" the same as "-".


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


# Numbers: the last one in the answer. Parsed are signs, thousands separated by commas, decimals, scientific
# notation (`1.5e-3`, `1.5 × 10^-3`), percents and fractions (`3/4`, `1 1/2`, `\frac{3}{4}`). Decimal
# arithmetic with a limited precision: neither a million digits nor an exponent of a billion costs anything.
# Formulas are not computed (in "2^10" the last number is 10); use `maths` for those.


class NumberReward(FunctionReward):
    """A reward on the last number of the answer, which is logged as `<name>_read`."""

    async def score(self, trajectory: Trajectory, task: Task, envs: Mapping[str, Any]) -> Parts:
        parts = await super().score(trajectory, task, envs)
        found = last_number(trajectory.answer or "", self.options.get("percent", "ratio"))
        read = math.nan if found is None else float(found)
        return {**parts, f"{self.name}_read": read} if math.isfinite(read) else parts


@NumberReward
def numeric(
    answer: str,
    target: Any,
    *,
    rel_tol: float | None = None,
    abs_tol: float = 0.0,
    percent: Literal["ratio", "plain"] = "ratio",
) -> float:
    """1 if the last number in the answer equals the target (any of them, if there are several).

    Without `rel_tol`, integers must be equal, and other numbers agree to one part in a million. "50%" is
    0.5, or 50 with `percent="plain"`. A target may be a number, or text whose last number counts. The part
    `numeric_read` is the number that was read.
    """
    several = target if isinstance(target, list | tuple) else [target]
    wanted = [_target(one, percent) for one in several]
    if not wanted:
        raise ValueError("the task has no target")
    found = last_number(answer, percent)
    return float(found is not None and any(close(found, one, rel_tol, abs_tol) for one in wanted))


def last_number(text: str, percent: Literal["ratio", "plain"] = "ratio") -> Decimal | None:
    """The last number that `text` holds, or None; only the end of a very long text is read."""
    text = text.rstrip()
    if len(text) > _MAX_CHARS:
        text = text[-_MAX_CHARS:]
        text = text[re.match(r"[\w.,]*+", text).end() :]  # type: ignore[union-attr]  # always matches
    found = deque(_NUMBER.finditer(text.replace("\N{MINUS SIGN}", "-")), maxlen=1)
    return _value(found[0], percent == "ratio") if found else None


def close(one: Decimal, other: Decimal, rel_tol: float | None = None, abs_tol: float = 0.0) -> bool:
    """Whether two numbers agree within either tolerance; symmetric."""
    relative = _DEFAULT_TOLERANCE if rel_tol is None else Decimal(repr(float(rel_tol)))
    if rel_tol is None and _is_integer(one) and _is_integer(other):
        relative = Decimal(0)
    difference = _ARITHMETIC.abs(_ARITHMETIC.subtract(one, other))
    largest = _ARITHMETIC.max(_ARITHMETIC.abs(one), _ARITHMETIC.abs(other))
    allowed = max(_ARITHMETIC.multiply(relative, largest), Decimal(repr(float(abs_tol))))
    return one == other or difference <= allowed


def _value(match: re.Match[str], ratio: bool) -> Decimal | None:
    groups = {key: text.replace(",", "") for key, text in match.groupdict().items() if text}
    try:
        if "plain" in groups:
            power = groups.get("exponent") or groups.get("power") or "0"
            value = Decimal(f"{groups['plain']}e{power}")
        else:
            top, bottom = groups.get("top") or groups["over"], groups.get("bottom") or groups["under"]
            value = _ARITHMETIC.divide(Decimal(top), Decimal(bottom))
            value = _ARITHMETIC.add(value, Decimal(groups.get("whole", "0")))
    except InvalidOperation:
        return None
    if groups.get("sign") == "-":
        value = value.copy_negate()
    if ratio and "percent" in groups:
        value = _ARITHMETIC.scaleb(value, -2)
    return value if value.is_finite() else None


def _target(target: Any, percent: Literal["ratio", "plain"]) -> Decimal:
    value: Decimal | None = None
    if isinstance(target, str):
        value = last_number(target, percent)
    elif isinstance(target, Fraction):
        value = _ARITHMETIC.divide(Decimal(target.numerator), Decimal(target.denominator))
    elif isinstance(target, int | float | Decimal) and not isinstance(target, bool):
        value = Decimal(repr(target)) if isinstance(target, float) else Decimal(target)
    if value is None or not value.is_finite():
        raise ValueError(f"the target holds no number: {target!r:.60}")
    return value


def _is_integer(value: Decimal) -> bool:
    exponent = value.as_tuple().exponent
    return isinstance(exponent, int) and exponent >= 0


@dataclass(kw_only=True, eq=False)
class Format(OptionsReward):
    """1 if the model's text has the form, 0 if not.

    Give `tags`, names that must each occur once as `<name>…</name>`, in this order and not inside each
    other; with `only`, nothing but white space may stand outside them. Or give `pattern`, a regular
    expression that the whole text must match, white space at the ends aside; the dot matches newlines.
    `where` is the last turn, every turn, or "joined": all actions as one text, for inline turns, where a
    thought goes on over several actions. A text above `max_chars` is not well-formed.
    With `calls`, the score is (1 if it has the form + 1 if all calls of the episode could be parsed) / 2:
    Agent-R1's r_format, with `tags = ["answer"]`. An episode without calls has none that is wrong.

    Tags are found in linear time. A pattern can backtrack for ever over a hostile text, so it runs
    resource-limited; a text for which it exceeds the CPU limit does not have the form.
    """

    tags: Sequence[str] | None = None
    pattern: str | None = None
    only: bool = False
    where: Literal["last", "every", "joined"] = "last"
    calls: bool = False
    max_chars: int = 20_000
    name: str = "format"

    def __post_init__(self) -> None:
        super().__post_init__()
        name, tags, pattern = self.name, self.tags, self.pattern
        if (tags is None) == (pattern is None):
            raise ConfigError(f"{name!r} needs either tags or a pattern")
        if isinstance(tags, str) or (tags is not None and not all(tags)):
            raise ConfigError(f"{name!r}: tags is a list of names, not {tags!r}")
        if pattern is not None:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ConfigError(f"{name!r}: the pattern {pattern!r} is not valid: {error}") from error

    async def score(self, trajectory: Trajectory, task: Task, envs: Mapping[str, Any]) -> Parts:
        form = float(await self._has_form(trajectory))
        if self.calls:
            faults = [*trajectory.faults, *(call.fault for call in trajectory.calls)]
            form = (form + (Fault.MALFORMED_CALL not in faults)) / 2
        return {self.name: form}

    async def _has_form(self, trajectory: Trajectory) -> bool:
        own = trajectory.messages[len(trajectory.asked) :]
        turns = [message.content for message in own if message.role == "assistant"]
        if self.where == "last":
            turns = turns[-1:]
        elif self.where == "joined":
            turns = ["".join(turns)] if turns else []
        for text in turns:
            if not await self.matches(text):
                return False
        return bool(turns)

    async def matches(self, text: str) -> bool:
        if len(text) > self.max_chars:
            return False
        if self.pattern is None:
            return has_tags(text, self.tags or (), self.only)
        try:
            return await run_limited(fully_matches, self.pattern, text.strip(), cpu_seconds=_CPU_SECONDS)
        except LimitExceeded as error:
            # 0, not unscored: a policy could learn to write what the pattern cannot be matched against.
            _log.warning(
                "the pattern of %r backtracks over a text of %d characters, which scores 0: %s. "
                "Use tags, or possessive quantifiers (.*+, ++) in the pattern",
                *(self.name, len(text), error),
            )
            return False


def fully_matches(pattern: str, text: str) -> bool:
    """Runs in the worker."""
    return re.fullmatch(pattern, text, re.DOTALL) is not None


def has_tags(text: str, tags: Sequence[str], only: bool = False) -> bool:
    """Whether each tag is opened and closed once, one after the other."""
    outside: list[str] = []
    position = 0
    for tag in tags:
        start, end = text.find(f"<{tag}>", position), text.find(f"</{tag}>", position)
        if start < 0 or end < start or text.count(f"<{tag}>") != 1 or text.count(f"</{tag}>") != 1:
            return False
        outside.append(text[position:start])
        position = end + len(f"</{tag}>")
    outside.append(text[position:])
    return not only or not any(part.strip() for part in outside)


# `maths`: equivalence by `math-verify` and sympy. A bare expression is parsed as LaTeX (`2\pi`, `x+1`, `1/2`).
# In prose the result should be in `\boxed{}` or in dollars; without them the last plain number or expression
# counts, so that "the area is 2\pi" is 2. A target that cannot be parsed is an error of the task set and fails
# the episode; `check_rewards` finds those before training.


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
