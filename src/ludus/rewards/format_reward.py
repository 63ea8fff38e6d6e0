"""The reward `format`: did the model write in the form it was asked for?"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ludus.core.failures import ConfigError, Fault
from ludus.core.task import Task
from ludus.core.trajectory import Trajectory
from ludus.rewards.declared import OptionsReward
from ludus.rewards.resource_limited import LimitExceeded, run_limited
from ludus.rewards.scores import Parts

_log = logging.getLogger(__name__)

_CPU_SECONDS = 1.0


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
        if self.where not in ("last", "every", "joined"):
            raise ConfigError(f"{name!r}: where is 'last', 'every' or 'joined', not {self.where!r}")
        if pattern is not None:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ConfigError(f"{name!r}: the pattern {pattern!r} is not valid: {error}") from error

    async def score(self, trajectory: Trajectory, task: Task, envs: Mapping[str, Any]) -> Parts:
        form = float(await self._has_form(trajectory))
        if self.calls:
            form = (form + _all_calls_parsed(trajectory)) / 2
        return {self.name: form}

    async def _has_form(self, trajectory: Trajectory) -> bool:
        turns = _action_texts(trajectory)
        if self.where == "last":
            turns = turns[-1:]
        elif self.where == "joined":
            turns = ["".join(turns)] if turns else []
        for text in turns:
            if not await self.matches(text):
                return False
        return bool(turns)

    async def matches(self, text: str) -> bool:
        """Whether one text has the form."""
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


def _action_texts(trajectory: Trajectory) -> list[str]:
    """The text of each action, without assistant messages that the task itself brought."""
    own = trajectory.messages[len(trajectory.asked) :]
    return [message.content for message in own if message.role == "assistant"]


def _all_calls_parsed(trajectory: Trajectory) -> bool:
    malformed = Fault.MALFORMED_CALL
    return malformed not in trajectory.faults and all(c.fault is not malformed for c in trajectory.calls)
