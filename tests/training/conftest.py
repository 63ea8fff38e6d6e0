"""The run in miniature as fixtures, and no picture where nobody looks at one."""

from __future__ import annotations

import contextlib
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
    """For tests that look at the pictures."""


@pytest.fixture(autouse=True)
def _curves_without_pixels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every run draws its curve, but matplotlib's pixels take a quarter of a small run's time."""

    def save(figure: Any, path: Path, **options: Any) -> None:
        path.write_bytes(b"a curve")

    if "real_curves" not in request.fixturenames:
        with contextlib.suppress(ImportError):  # the machine may have none, and then nothing draws
            monkeypatch.setattr("matplotlib.figure.Figure.savefig", save)
