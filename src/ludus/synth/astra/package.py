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

from ludus.core.messages import Json
from ludus.core.task import Task
from ludus.core.trajectory import Trajectory
from ludus.envs.sandboxed import WorldSpec
from ludus.observe import atomic_file, write_trajectories

_ENVIRONMENT = '''"""{description}

Made from page.txt by `ludus synth astra`. The rules are in world.py, which runs in the sandbox only.
"""

from pathlib import Path

from ludus.envs.sandboxed import SandboxedWorld, recorded_solution, solved


class {class_name}(SandboxedWorld):
    folder = Path(__file__).parent


success = solved
expert = recorded_solution
'''
_RECIPE = """# Made from page.txt by `ludus synth astra`. For another model: [model] name = "..."
name = "{name}"
rewards = ["environment.py:success"]

[model.scratch]
layers = 2
width = 128

[tasks]
train = "tasks.jsonl"
evaluation = "held_out.jsonl"

[agent]
envs = {{ {name} = "environment.py:{class_name}" }}

[budgets]
max_turns = {max_turns}
max_turn_tokens = {turn_tokens}

[warm_start]
demonstrations = "demonstrations.parquet"
steps = {steps}
batch = 16
optimizer = {{ learning_rate = 3e-3 }}

[rl]
algorithm = "grpo"
steps = 30
tasks = 16
attempts = 8
updates = 2
optimizer = {{ learning_rate = 1e-3 }}
"""


def class_name(spec: WorldSpec) -> str:
    """What its class is called: parcel_office is ParcelOffice."""
    return "".join(word.capitalize() for word in spec.name.split("_"))


def write_world(folder: Path, page: str, spec: WorldSpec, rules: str) -> None:
    """What an environment needs to run."""
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / "page.txt", page)
    _write(folder / "world.json", spec.model_dump_json(indent=2))
    _write(folder / "world.py", rules)
    description = json.dumps(spec.description, ensure_ascii=False)[1:-1].replace('"', "'")
    text = _ENVIRONMENT.format(description=description, class_name=class_name(spec))
    _write(folder / "environment.py", text)


def write_package(
    folder: Path,
    spec: WorldSpec,
    training: Sequence[Task],
    held_out: Sequence[Task],
    demonstrations: Sequence[Trajectory],
) -> None:
    """What training on it needs."""
    _write(folder / "tasks.jsonl", "".join(_line(task) for task in training))
    _write(folder / "held_out.jsonl", "".join(_line(task) for task in held_out))
    write_trajectories(folder / "demonstrations.parquet", demonstrations)
    longest = max(one.turns for one in demonstrations)
    # of the byte tokenizer that demonstrations are recorded with, which has the most tokens of all
    tokens = max(len(action.tokens) for one in demonstrations for action in one.actions)
    recipe = _RECIPE.format(
        name=spec.name,
        class_name=class_name(spec),
        max_turns=longest + 2,
        turn_tokens=max(64, tokens),
        steps=max(100, 4 * len(demonstrations)),
    )
    _write(folder / "recipe.toml", recipe)


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
