"""What stages are given to learn from: demonstrations and pairs, as far as the model can read them.

A run of several stages looks at all of it before the first step: a file that cannot be read is not worth the
hours of training that come before its stage.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from ludus.core.failures import ConfigError
from ludus.core.trajectory import Trajectory
from ludus.training.imitation import read_conversations, read_labelled, read_pairs, trajectory_of
from ludus.training.parts import demonstrations_of
from ludus.training.preference import Labelled, Pair, pair_of, says_the_same
from ludus.training.readable import check_readable
from ludus.training.settings import (
    DistillationConfig,
    ImitationConfig,
    PreferenceConfig,
    StageConfig,
    held_out_count,
)
from ludus.training.stages.distilling import check_teacher
from ludus.training.workshop import Workshop, tool_specs

log = logging.getLogger(__name__)


async def given_demonstrations(workshop: Workshop, config: ImitationConfig) -> list[Trajectory]:
    """The trajectories to imitate."""
    source = demonstrations_of(config, workshop.recipe, workshop.parts)
    shown = await workshop.demonstrations(source, config.max_failures)
    if not shown:
        raise ConfigError("there are no demonstrations to imitate: set demonstrations, or pass them")
    if isinstance(config.held_out, float) and len(shown) < 2:
        raise ConfigError("held_out takes a share of the demonstrations, and there is only one")
    check_readable(shown, workshop.model, "demonstration")
    return shown


async def given_held_out(workshop: Workshop, config: ImitationConfig) -> list[Trajectory]:
    """The conversations of their own that a stage measures its loss on; none where it names none."""
    if not isinstance(config.held_out, str):
        return []
    shown = await workshop.demonstrations(read_conversations(config.held_out, config.columns))
    check_readable(shown, workshop.model, "held-out conversation")
    return shown


async def given_preferences(workshop: Workshop, config: PreferenceConfig) -> Sequence[Pair | Labelled]:
    """The pairs of a file or dataset, or for KTO its labelled episodes."""
    source = config.pairs
    assert source is not None
    read = read_labelled if config.loss == "kto" else read_pairs
    given: Sequence[tuple[Any, Any]] = read(source, config.columns)
    if not given:
        raise ConfigError(f"{source} has no pairs to learn from")
    renderer = workshop.rollout.renderer
    specs = await tool_specs(workshop.rollout, workshop.parts)
    found: list[Pair | Labelled] = []
    for number, (first, second) in enumerate(given, start=1):
        try:
            if config.loss == "kto":
                found.append(Labelled(trajectory_of(first, renderer, specs), second))
            else:
                found.append(pair_of(first, second, renderer, specs))
        except ConfigError as error:
            raise ConfigError(f"{source}, pair {number}: {error}") from None
    sides = {"chosen": "what was chosen in pair", "rejected": "what was rejected in pair"}
    for side, what in sides.items() if config.loss != "kto" else [("trajectory", "answer")]:
        check_readable([getattr(one, side) for one in found], workshop.model, what)
    if all(isinstance(one, Pair) and says_the_same(one) for one in found):
        raise ConfigError(
            f"{source}: in every pair both sides say the same, so there is nothing to learn"
        )
    return found


async def check_given(workshop: Workshop, config: StageConfig) -> None:
    """Read what a stage will be given, to find out now what is wrong with it."""
    if isinstance(config, DistillationConfig):
        check_teacher(workshop, config)
    if isinstance(config, PreferenceConfig) and config.pairs is not None:
        what = "labelled answers" if config.loss == "kto" else "pairs"
        _note_batch(workshop, config, len(await given_preferences(workshop, config)), what)
    if isinstance(config, ImitationConfig):
        await given_held_out(workshop, config)
        if is_played(workshop, config):  # once for each task of the first set
            found = len(workshop.task_sets[0].tasks)
        else:
            found = len(await given_demonstrations(workshop, config))
        _note_batch(workshop, config, found - held_out_count(config, found), "demonstrations")


def _note_batch(
    workshop: Workshop, config: ImitationConfig | PreferenceConfig, found: int, what: str
) -> None:
    """Warn of steps that go over the same data several times: they take as much longer, and teach no more."""
    where = next(name for name, stage in workshop.recipe.named_stages if stage is config)
    if config.batch > found:
        log.warning(
            "%s.batch = %d is larger than the data (%d %s): every step goes over all of it %.3g times, and "
            "takes as much longer. Set %s.batch=%d, or less",
            *(where, config.batch, found, what, config.batch / found, where, found),
        )


def is_played(workshop: Workshop, config: ImitationConfig) -> bool:
    """Whether an expert plays the demonstrations, which takes its time and is left for the stage itself."""
    return callable(demonstrations_of(config, workshop.recipe, workshop.parts))
