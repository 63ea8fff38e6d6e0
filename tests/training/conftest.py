"""The run in miniature as fixtures, and no image where nobody looks at one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from training_helpers import TINY, Chatty, add, even, tasks

from ludus.training import Parts, Recipe


@pytest.fixture
def recipe() -> Recipe:
    return Recipe.parse(TINY)


@pytest.fixture
def parts() -> Parts:
    return Parts(
        tasks=tasks(6), held_out=tasks(2, first=50), tools=[add], rewards=[even], agent=Chatty()
    )


@pytest.fixture
def real_curves() -> None:
    """For tests that look at the images."""


@pytest.fixture(autouse=True)
def _no_drawing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """matplotlib takes a quarter of a small run's time."""

    def draw(path: Path, rows: Any, **options: Any) -> None:
        path.write_bytes(b"a curve")

    if "real_curves" not in request.fixturenames:
        monkeypatch.setattr("ludus.training.report.plot_curve", draw)
