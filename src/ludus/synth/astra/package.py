"""The folder of a generated environment: everything that `ludus check env` and `ludus train` need.

::

    page.txt               what it was made from
    world.json, world.py   tools and rules, as the language model wrote them; they run in the sandbox only
    environment.py         the environment, its reward and its demonstrator: the same few lines for every folder
    tasks.jsonl, held_out.jsonl
    demonstrations.parquet every solution, played
    recipe.toml            imitation, then GRPO
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from ludus.core.config import toml_text
from ludus.core.messages import Json
from ludus.core.task import Task
from ludus.core.trajectory import Trajectory
from ludus.envs.sandboxed import WorldSpec
from ludus.observe import atomic_file, write_trajectories

_ENVIRONMENT = '''"""The environment that world.json describes, made from page.txt by `ludus synth astra`.

The rules are in world.py, which runs in the sandbox only.
"""

from pathlib import Path

from ludus.envs.sandboxed import SandboxedWorld, recorded_solution, solved


class World(SandboxedWorld):
    folder = Path(__file__).parent


success = solved
expert = recorded_solution
'''


def write_world(folder: Path, page: str, spec: WorldSpec, rules: str) -> None:
    """Write the files of an environment. Its names become keys and functions, so they are checked again."""
    WorldSpec.model_validate(spec.model_dump())
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / "page.txt", page)
    _write(folder / "world.json", spec.model_dump_json(indent=2))
    _write(folder / "world.py", rules)
    _write(folder / "environment.py", _ENVIRONMENT)


def write_package(
    folder: Path,
    spec: WorldSpec,
    training: Sequence[Task],
    held_out: Sequence[Task],
    demonstrations: Sequence[Trajectory],
) -> None:
    """Write the files for training on it."""
    _write(folder / "tasks.jsonl", "".join(_line(task) for task in training))
    _write(folder / "held_out.jsonl", "".join(_line(task) for task in held_out))
    write_trajectories(folder / "demonstrations.parquet", demonstrations)
    longest = max(one.turns for one in demonstrations)
    # of the byte tokenizer that demonstrations are recorded with, which has the most tokens of all
    tokens = max(len(action.tokens) for one in demonstrations for action in one.actions)
    recipe: Json = {
        "name": spec.name,
        "rewards": ["environment.py:success"],
        "model": {"scratch": {"layers": 2, "width": 128}},
        "tasks": {"train": "tasks.jsonl", "evaluation": "held_out.jsonl"},
        "agent": {"envs": {spec.name: "environment.py:World"}},
        "budgets": {"max_turns": longest + 2, "max_turn_tokens": max(64, tokens)},
        "warm_start": {
            "demonstrations": "demonstrations.parquet",
            "steps": max(100, 4 * len(demonstrations)),
            "batch": 16,
            "optimizer": {"learning_rate": 3e-3},
        },
        "rl": {
            "algorithm": "grpo",
            "steps": 30,
            "tasks": 16,
            "attempts": 8,
            "updates": 2,
            "optimizer": {"learning_rate": 1e-3},
        },
    }
    comment = 'Made from page.txt by `ludus synth astra`. For another model: [model] name = "..."'
    _write(folder / "recipe.toml", toml_text(recipe, comment))


def _line(task: Task) -> str:
    row: Json = {
        "id": task.id,
        "prompt": task.messages[-1].content,
        "target": task.target,
        "envs": task.envs,
        "metadata": {"solution": task.metadata["solution"]},
    }
    return json.dumps(row, ensure_ascii=False) + "\n"


def _write(path: Path, text: str) -> None:
    with atomic_file(path) as temporary:
        Path(temporary).write_text(text, encoding="utf-8")
