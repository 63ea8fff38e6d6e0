"""Task sets of reasoning-gym, as tasks and a reward.

A recipe names one where it names tasks, with options behind a question mark, and the reward by its name:

    tasks = { train = "reasoning_gym:leg_counting", evaluation = "reasoning_gym:leg_counting@held_out" }
    rewards = ["reasoning_gym"]

A task says which item of which set it is; the reward builds the set again where it runs, and asks it for the
score.
"""

from __future__ import annotations

import json
import re
from functools import lru_cache
from typing import Any

from ludus.core.failures import ConfigError
from ludus.core.messages import Json
from ludus.core.task import Task
from ludus.envs.world import SIZES, EnvAdapter, imported, parse_reference
from ludus.rewards import reward

HELD_OUT_SEED = 2**40
"""Added to the seed of held-out items: an item's own seed is the set's and its number."""


def reasoning_gym_tasks(reference: str) -> list[Task]:
    """Tasks of one or several sets (`leg_counting+chain_sum`); options are `size`, `seed`, and the sets' own.

    The splits have different seeds. Of the held-out ones those are left out whose question a training task has
    (of as many as a training split has without `size`), which happens in small sets.
    """
    names, split, options = parse_reference(reference)
    size = options.pop("size", SIZES[split])
    tasks: list[Task] = []
    for name in names.split("+"):
        known = (
            set() if split == "train" else {one["question"] for one in _first(name, json.dumps(options))}
        )
        spec: Json = {"set": name, "options": options}
        if split != "train":
            spec["options"] = {**options, "seed": options.get("seed", 0) + HELD_OUT_SEED}
        found: list[Task] = []
        for index in range(4 * size):
            item = _item(name, json.dumps(spec["options"], sort_keys=True), index)
            if len(found) == size:
                break
            if item["question"] in known:
                continue
            id = f"{name}-{split}-{index}"
            where: Json = {**spec, "index": index}
            more = {"reasoning_gym": where, "subtask": name}
            found.append(Task.of(item["question"], item["answer"], id=id, metadata=more))
        if not found:
            raise ConfigError(
                f"reasoning_gym:{reference}: every item of {name!r} is among the training tasks; the set is "
                "too small to hold any out (give its options a larger range)"
            )
        tasks += found
    return tasks


@lru_cache(maxsize=64)
def _first(name: str, options: str) -> list[Json]:
    return [_item(name, options, index) for index in range(SIZES["train"])]


@lru_cache(maxsize=256)
def _dataset(name: str, options: str) -> Any:
    package = imported("reasoning_gym", "reasoning-gym", "a task set of reasoning-gym")
    try:
        return package.create_dataset(name, **{"seed": 0, **json.loads(options), "size": 2**31 - 1})
    except (ValueError, TypeError, AssertionError) as error:
        raise ConfigError(f"reasoning_gym:{name}: {error}") from error


@lru_cache(maxsize=65_536)
def _item(name: str, options: str, index: int) -> Json:
    found: Json = _dataset(name, options)[index]
    return found


_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


@reward(name="reasoning_gym")
def reasoning_gym_score(answer: str, task: Task) -> float:
    """The set's own score of the answer: what stands in the last <answer> tags, or all of it."""
    where = task.metadata.get("reasoning_gym")
    if where is None:
        raise ConfigError(f"task {task.id!r} is none of reasoning-gym's; the reward is for these only")
    options = json.dumps(where["options"], sort_keys=True)
    tagged = _TAGGED.findall(answer or "")
    given = (tagged[-1] if tagged else answer or "").strip()
    item = _item(where["set"], options, where["index"])
    return float(_dataset(where["set"], options).score_answer(given, item))


ADAPTER = EnvAdapter(
    "reasoning_gym:NAME",
    "Tasks; with the reward of that name.",
    tasks=reasoning_gym_tasks,
    extra="reasoning-gym",
    packages=("reasoning_gym",),
)
