"""What stages are given to learn from: demonstrations and pairs, as far as the model can read them.

A run of several stages looks at all of it before the first step: a file that cannot be read is not worth the
hours of training that come before its stage.
"""

from __future__ import annotations

from pathlib import Path

from ludus.core.failures import ConfigError
from ludus.core.trajectory import Trajectory
from ludus.training.parts import demonstrations_of
from ludus.training.preference import Pair, pair_of, read_pairs, says_the_same
from ludus.training.readable import check_readable
from ludus.training.settings import ImitationConfig, PreferenceConfig, StageConfig
from ludus.training.workshop import Workshop, tool_specs


async def given_demonstrations(workshop: Workshop, config: ImitationConfig) -> list[Trajectory]:
    """The trajectories to imitate."""
    shown = await workshop.demonstrations(config.demonstrations)
    if not shown:
        raise ConfigError("there are no demonstrations to imitate: set demonstrations, or pass them")
    check_readable(shown, workshop.model, "demonstration")
    return shown


async def given_pairs(workshop: Workshop, path: Path) -> list[Pair]:
    """The pairs of a file."""
    given = read_pairs(path)
    if not given:
        raise ConfigError(f"{path} has no pairs to learn from")
    rollout = workshop.rollout
    specs = await tool_specs(rollout, workshop.parts)
    pairs: list[Pair] = []
    for number, (chosen, rejected) in enumerate(given, start=1):
        try:
            pairs.append(pair_of(chosen, rejected, rollout.renderer, specs))
        except ConfigError as error:
            raise ConfigError(f"{path}, pair {number}: {error}") from None
    for side in ("chosen", "rejected"):
        shown = [getattr(pair, side) for pair in pairs]
        check_readable(shown, workshop.model, f"what was {side} in pair")
    if all(map(says_the_same, pairs)):
        raise ConfigError(f"{path}: in every pair both sides say the same, so there is nothing to learn")
    return pairs


async def check_given(workshop: Workshop, config: StageConfig) -> None:
    """Read what a stage will be given, to find out now what is wrong with it."""
    if isinstance(config, PreferenceConfig) and config.pairs is not None:
        await given_pairs(workshop, Path(config.pairs))
    if isinstance(config, ImitationConfig) and not is_played(workshop, config):
        await given_demonstrations(workshop, config)


def is_played(workshop: Workshop, config: ImitationConfig) -> bool:
    """Whether an expert plays the demonstrations, which takes its time and is left for the stage itself."""
    return callable(demonstrations_of(config.demonstrations, workshop.recipe, workshop.parts))
