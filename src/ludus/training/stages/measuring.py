"""A measurement as a stage of its own, with pass@k."""

from __future__ import annotations

from pathlib import Path

from ludus.training.settings import MeasurementConfig
from ludus.training.stages.checking import check_failures
from ludus.training.stages.stage import Stage, Step
from ludus.training.workshop import Workshop


class Measurement(Stage):
    """Play the held-out tasks several times, and write down how often it goes well."""

    phase = "evaluation"
    prefix = "eval"
    learns = False

    def __init__(self, workshop: Workshop, folder: Path, config: MeasurementConfig) -> None:
        super().__init__(workshop, folder, steps=1)
        self._config = config

    async def advance(self, number: int) -> Step:
        config = self._config
        measured = await self.workshop.measure(
            attempts=config.attempts,
            temperature=config.temperature,
            pass_at=config.pass_at,
            with_pass=True,
        )
        check_failures(measured.groups, self.workshop.recipe.rl.max_failures)
        return Step(measured.metrics, measured.groups, split="eval")
