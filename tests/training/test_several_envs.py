"""Several environments in one run, each with its own tools, budgets, rewards and metrics."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ludus.chat.tokenizers import HFTokenizer
from ludus.cli.main import app
from ludus.engine import FakeEngine
from ludus.training.config.parts import load_parts
from ludus.training.config.recipe import load_recipe
from ludus.training.models.scratch import fit_tokenizer
from ludus.training.task_sets import build_task_sets, close_task_sets

CODE = '''
from ludus import Env, Task, ToolCall, reward, tool
from ludus.core import ToolResult
from ludus.envs import Step


class Lamp(Env):
    """A text game: switch it on."""

    def reset(self, task, colour):
        self.colour, self.on = colour, False
        return f"A {colour} lamp."

    def step(self, action: str) -> Step:
        """Use the lamp.

        Args:
            action: on.
        """
        self.on = self.on or action == "on"
        return Step("on" if self.on else "off", reward=float(self.on), terminated=self.on)


class Box(Env):
    """Tools: look, then open."""

    def reset(self, task):
        self.opened = False
        return "A box."

    @tool
    def look(self) -> str:
        """Look at the box."""
        return "closed"

    @tool
    def open(self) -> ToolResult:
        """Open the box."""
        self.opened = True
        return ToolResult("open", terminated=True)


@reward(env=Box)
def success(env: Box) -> float:
    return float(env.opened)


def lamps():
    return [Task.of("Light!", id=f"lamp-{c}", envs={"lamp": {"colour": c}}) for c in ("red", "blue")]


def boxes():
    return [Task.of("Open it.", id=f"box-{n}", envs={"box": {}}) for n in range(2)]


def mixed():
    return lamps() + boxes()


def expert(task):
    if "lamp" in task.envs:
        yield ToolCall("step", {"action": "on"})
    else:
        yield ToolCall("look")
        yield ToolCall("open")
'''
COMMON = """
threads = 1
model.scratch = { layers = 1, width = 32, heads = 2, kv_heads = 1, vocabulary = 400 }
budgets = { max_turns = 4, max_turn_tokens = 48, max_tokens = 1500 }
warm_start = { demonstrations = "two.py:expert", steps = 24, batch = 4, optimizer.learning_rate = 1e-2 }
rl = { steps = 1, tasks = 4, attempts = 2 }
"""
SETS = """
[[task_sets]]
name = "lamps"
train = "two.py:lamps"
envs = { lamp = "two.py:Lamp" }
rewards = []
budgets = { max_turns = 1 }

[[task_sets]]
name = "boxes"
train = "two.py:boxes"
envs = { box = "two.py:Box" }
rewards = ["two.py:success"]
"""
ONE = """
rewards = []
tasks.train = "two.py:mixed"
[agent.envs]
lamp = "two.py:Lamp"
box = "two.py:Box"
[agent.pools.box]
size = 2
"""


def trained(folder: Path, recipe: str) -> dict[str, float]:
    (folder / "two.py").write_text(CODE)
    (folder / "recipe.toml").write_text(recipe)
    given = [str(folder / "recipe.toml"), f"run.folder={folder}/run"]
    done = CliRunner().invoke(app, ["train", *given])
    assert done.exit_code == 0, done.output
    last: dict[str, float] = json.loads((folder / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    return last


@pytest.mark.slow
def test_task_sets_have_environments_budgets_rewards_and_metrics_of_their_own(tmp_path: Path) -> None:
    metrics = trained(tmp_path, COMMON.replace("steps = 24", "steps = 60") + SETS)
    assert metrics["sets/lamps/episodes"] == metrics["sets/boxes/episodes"] == 4
    assert metrics["sets/lamps/turns"] <= 1.0  # its own budget
    assert metrics["sets/lamps/tool/step/calls"] > 0 and metrics["sets/boxes/tool/look/calls"] > 0
    assert "sets/lamps/tool/look/calls" not in metrics and "sets/boxes/tool/step/calls" not in metrics
    assert "sets/boxes/reward/success" in metrics and "sets/lamps/reward/success" not in metrics
    assert metrics["failures"] == 0


def test_tasks_of_one_set_may_name_different_environments(tmp_path: Path) -> None:
    metrics = trained(tmp_path, COMMON + ONE)
    assert metrics["episodes"] == 8 and metrics["failures"] == 0
    assert metrics["tool/step/calls"] > 0 and metrics["tool/look/calls"] > 0


async def test_a_set_without_rewards_whose_environment_pays_is_scored(tmp_path: Path) -> None:
    """An episode that was paid nothing is worth 0: unscored, it would leave the baseline."""
    (tmp_path / "two.py").write_text(CODE)
    (tmp_path / "recipe.toml").write_text(COMMON + SETS.replace("rewards = []\n", ""))
    recipe = load_recipe(tmp_path / "recipe.toml")
    tokenizer = HFTokenizer(fit_tokenizer([], vocabulary=0))
    engine = FakeEngine(lambda tokens, sampling, session: "hello<|im_end|>", tokenizer)
    sets = build_task_sets(recipe, load_parts(recipe), engine, tokenizer)
    try:
        for one in sets:
            played = await one.rollout.play(one.tasks[0], attempt=0, seed=0)
            assert played.reward == 0.0, one.name
    finally:
        await close_task_sets(sets)
