"""Every Python block in the documentation runs, on its own, as a reader would paste it."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ludus import train
from ludus.cli.main import app
from ludus.envs import WORLDS
from ludus.training import Recipe, load_recipe

ROOT = Path(__file__).parent.parent
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs/envs").glob("*.md")),
]


def _needs(page: Path) -> list[str]:
    """What the environment of a page in docs/envs lacks here."""
    world = WORLDS.get(page.stem) if page.parent.name == "envs" else None
    return world.missing() if world is not None else []


BLOCKS = [
    pytest.param(
        block,
        id=f"{page.name}-{number}",
        marks=pytest.mark.skipif(bool(_needs(page)), reason=f"needs {', '.join(_needs(page))}"),
    )
    for page in PAGES
    for number, block in enumerate(re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S))
]


README_BLOCK = BLOCKS[0].values[0]
"""The thirty lines that learn. Here they run two steps a stage; test_quickstart_learns.py runs all of it."""


@pytest.mark.parametrize("block", BLOCKS)
def test_python_blocks_run(block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    if block == README_BLOCK:
        block, cut = re.subn(r'"steps": \d+', '"steps": 2', block)
        assert cut == 2
    exec(compile(block, "documentation", "exec", dont_inherit=True), {"__name__": "documentation"})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", page.read_text()):
        if not target.startswith(("http:", "https:")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_readme_keeps_its_promise() -> None:
    """A tool, a reward and a run in at most 20 lines of Python, and in at most 40 lines of TOML."""
    python = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)[0]
    assert len([line for line in python.splitlines() if line.strip()]) <= 20
    page = (ROOT / "docs" / "quickstart.md").read_text()
    for toml in re.findall(r"^```toml\n(.*?)^```", page, re.M | re.S):
        assert len(toml.splitlines()) <= 40
        assert Recipe.parse(tomllib.loads(toml))


def test_the_quickstart_recipe_is_short() -> None:
    assert len((ROOT / "recipes" / "safe.toml").read_text().splitlines()) <= 40


@pytest.fixture
def corridor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The files of docs/envs.md's example, written where its reader stands; and the page's text."""
    text = (ROOT / "docs" / "envs.md").read_text().partition("## From nothing to a run")[2]
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for kind, name in (("python", "corridor.py"), ("toml", "corridor.toml")):
        Path(name).write_text(re.findall(rf"^```{kind}\n(.*?)^```", text, re.M | re.S)[0])
    return text


def test_adding_an_environment_takes_forty_lines(corridor: str) -> None:
    code = Path("corridor.py").read_text() + Path("corridor.toml").read_text()
    assert len([line for line in code.splitlines() if line.strip()]) <= 40
    [command] = re.findall(r"^ludus (check env .*)$", corridor, re.M)
    done = CliRunner().invoke(app, command.split(), env={"COLUMNS": "200"})
    assert done.exit_code == 0 and "gold solution: the expert succeeds on 5 of 5 tasks" in done.output
    done = CliRunner().invoke(app, ["check", "recipe", "corridor.toml"], env={"COLUMNS": "200"})
    assert done.exit_code == 0 and "corridor.toml: ok" in done.output, done.output


@pytest.mark.slow
@pytest.mark.usefixtures("corridor")
def test_the_environment_of_forty_lines_is_learned() -> None:
    result = train(load_recipe("corridor.toml"))
    assert result.metrics[-1]["step"] == 44
    rewards = [row["reward"] for row in result.metrics if "reward" in row]
    assert sum(rewards[-3:]) / 3 > 0.9


@pytest.fixture
def mixed(corridor: str) -> None:
    """The recipe with several environments that follows it."""
    text = corridor.partition("## Several in one run")[2]
    Path("mixed.toml").write_text(re.findall(r"^```toml\n(.*?)^```", text, re.M | re.S)[0])


@pytest.mark.usefixtures("mixed")
def test_the_recipe_of_several_environments_holds() -> None:
    done = CliRunner().invoke(app, ["check", "recipe", "mixed.toml"], env={"COLUMNS": "200"})
    assert done.exit_code == 0 and "mixed.toml: ok" in done.output, done.output
    for name in ("corridor", "safe", "maths"):
        assert f"{name}: an episode was played, by a script" in done.output


@pytest.mark.slow
@pytest.mark.usefixtures("mixed")
def test_the_recipe_of_several_environments_trains() -> None:
    small = ["rl.steps=1", "rl.attempts=2", "run.folder=mixed", "evaluation.tasks=2"]
    size = "model.scratch={layers=1, width=32, heads=2}"
    result = train(load_recipe("mixed.toml", [*small, size]), progress=False)
    logged = {name for row in result.metrics for name in row}
    assert {"sets/safe/reward/success", "sets/maths/reward/success", "sets/corridor/reward"} <= logged
