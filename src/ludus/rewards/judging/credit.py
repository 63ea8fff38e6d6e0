"""What rewards that run several tests have in common: their options, and the score for what was passed."""

from __future__ import annotations

from typing import Literal, get_args

from ludus.core.failures import ConfigError
from ludus.rewards.judging.comparing import Manner
from ludus.rewards.values import Parts

Credit = Literal["share", "all"]
"""For the share of the tests that are passed, or only for all of them."""


def check_options(name: str, credit: Credit, compare: Manner) -> None:
    """`ConfigError` for what the reward `name` cannot do."""
    if credit not in get_args(Credit):
        raise ConfigError(f"{name!r}: credit is 'share' or 'all', not {credit!r}")
    if compare not in get_args(Manner):
        raise ConfigError(f"{name!r}: compare is 'exact', 'lines' or 'tokens', not {compare!r}")


def credited(name: str, credit: Credit, passed: int, total: int) -> Parts:
    """The score under the reward's name, with the counts beside it."""
    return {
        name: passed / total if credit == "share" else float(passed == total),
        f"{name}_passed": float(passed),
        f"{name}_total": float(total),
    }
