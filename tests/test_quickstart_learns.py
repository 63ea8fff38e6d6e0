"""The promise of the quickstart, kept for every seed. Minutes, so behind the slow marker."""

from __future__ import annotations

from pathlib import Path

import pytest

import ludus
from ludus.training import load_recipe

RECIPE = Path(__file__).parent.parent / "recipes" / "safe.toml"


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_quickstart_learns(tmp_path: Path, seed: int) -> None:
    recipe = load_recipe(RECIPE, [f"seed={seed}", f"run.folder={tmp_path / 'run'}"])
    stages = {str(row[0]): float(str(row[2]).rstrip("%")) for row in ludus.train(recipe).report.rows}
    assert stages["after RL"] >= 85
    assert stages["after RL"] >= stages["after the warm start"] + 25
