"""What a stage of a run is: a number of steps, each of which either happens whole or not at all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from ludus.core.random import key
from ludus.core.trajectory import Group
from ludus.training.recipe import Recipe
from ludus.training.settings import DistillationConfig, PreferenceConfig, RejectionConfig, RLConfig
from ludus.training.workshop import Workshop


@dataclass(frozen=True, slots=True)
class Step:
    """What a step has shown."""

    metrics: dict[str, float]
    groups: Sequence[Group] = field(default_factory=list)
    """The episodes that were played for it."""
    split: str = "train"
    """What the episodes were played for: train or eval."""


class Stage:
    """One part of a run. The trainer counts its steps, writes down what they show, and saves between them."""

    phase: str = "stage"
    """What it is called where people read."""
    prefix: ClassVar[str] = ""
    """What its metrics are called, before the slash; RL's have none."""
    learns: ClassVar[bool] = True
    """Whether it changes the weights."""

    def __init__(self, workshop: Workshop, folder: Path, steps: int) -> None:
        self.workshop = workshop
        self.folder = folder
        """A place in the run's folder for what outlives checkpoints, such as a reference model."""
        self.steps = steps
        self.seed = _seed(workshop.recipe, int(folder.name))
        """Decides this stage's draws; two stages must not draw alike."""
        self.is_resumed = False
        """Whether it goes on from a checkpoint of its own."""
        self.is_torn = False
        """Whether a step changed some weights and did not get to its end: nothing to go on from."""

    async def begin(self) -> None:
        """Get ready for the first step, or for the one after a checkpoint."""

    async def advance(self, number: int) -> Step:
        """Do step `number`, counted from 0. After the weights have changed, nothing is awaited any more."""
        raise NotImplementedError

    @contextmanager
    def change(self) -> Iterator[None]:
        """Around a step's updates. An error in their midst leaves the stage torn, and it is not saved."""
        self.is_torn = True
        yield
        self.is_torn = False

    async def settle(self) -> None:
        """After a step has been written down: let the engine go on with the new weights."""
        if self.learns:
            await self.workshop.engine.update_weights()
            await self.workshop.engine.resume()

    def save(self, folder: Path) -> None:
        """Write into a checkpoint what going on needs, apart from the weights."""

    def load(self, folder: Path) -> None:
        """Go on from a checkpoint that `save` wrote; called after `begin`."""


def _seed(recipe: Recipe, number: int) -> int:
    """The run's own seed for the first stage that plays, and one of its own for each later one."""
    plays = (RLConfig, PreferenceConfig, RejectionConfig, DistillationConfig)
    is_first = not any(isinstance(stage, plays) for stage in recipe.stages[:number])
    return recipe.seed if is_first else key(recipe.seed, "stage", number)
