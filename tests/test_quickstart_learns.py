"""The promises of the quickstart and of the README, kept for every seed. Minutes, so behind the slow marker."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import ludus
from ludus.training import load_recipe

ROOT = Path(__file__).parent.parent
RECIPE = ROOT / "recipes" / "safe.toml"


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_quickstart_learns(tmp_path: Path, seed: int) -> None:
    recipe = load_recipe(RECIPE, [f"seed={seed}", f"run.folder={tmp_path / 'run'}"])
    stages = {when: float(told.rstrip("%")) for when, told in ludus.train(recipe).success.items()}
    assert stages["after RL"] >= 85
    assert stages["after RL"] >= stages["after the warm start"] + 25


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_twenty_lines_of_the_readme_learn(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (block, *_) = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
    seeded, count = re.subn(r'model="scratch"', f'model="scratch", seed={seed}', block)
    assert count == 1
    names: dict[str, object] = {"__name__": "readme"}
    exec(compile(seeded, "README.md", "exec", dont_inherit=True), names)
    said = capsys.readouterr().out
    shares = dict(re.findall(r"^(at the start|after .*?)  +([\d.]+)%", said, re.M))
    assert float(shares["at the start"]) <= 20
    assert float(shares["after the warm start"]) <= 70, "RL has something left to learn"
    assert float(shares["after RL"]) >= 90
