"""Stopping when too much of what we are responsible for is broken: training would be on luck."""

from __future__ import annotations

from collections.abc import Sequence

from ludus.core.failures import ConfigError, LudusError, most_frequent
from ludus.core.trajectory import Group


def check_failures(groups: Sequence[Group], max_failures: float, *, scored: bool = True) -> None:
    """Raise when a larger share of the episodes failed through our fault, or (`scored`) none was scored."""
    failures = [t.failure for g in groups for t in g.trajectories if t.failure is not None]
    played = sum(len(group.trajectories) for group in groups)
    if scored and played and not failures and not any(group.trainable for group in groups):
        raise ConfigError(
            f"none of {played} episodes was scored: every reward returned None. Return a number for at "
            "least some of them"
        )
    if played and len(failures) / played > max_failures:
        raise LudusError(
            f"{len(failures)} of {played} episodes failed through no fault of the model's, more than "
            f"max_failures = {max_failures:g} allows. {most_frequent(failures)}"
        )
