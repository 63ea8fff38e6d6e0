"""The recipes for a pretrained model: they fit together, and their experts succeed, but too slowly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ludus.chat import HFTokenizer
from ludus.engine import FakeEngine
from ludus.training import (
    build_task_sets,
    close_task_sets,
    fit_tokenizer,
    load_parts,
    load_recipe,
    play_expert,
)

ROOT = Path(__file__).parent.parent.parent
RECIPES = ("smollm2_directory", "smollm2_safe", "smollm2_safe_lora")


@pytest.mark.parametrize("name", RECIPES)
async def test_experts_succeed_but_seldom_in_time(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    recipe = load_recipe(f"recipes/{name}.toml")
    parts = load_parts(recipe)
    assert not {task.id for task in parts.tasks} & {task.id for task in parts.held_out}
    tokenizer = HFTokenizer(fit_tokenizer([], vocabulary=0))
    sets = build_task_sets(recipe, parts, FakeEngine([]), tokenizer)
    expert: Any = parts.demonstrations
    try:
        played = await play_expert(sets[0].rollout, expert, list(sets[0].tasks[:20]), seed=0)
    finally:
        await close_task_sets(sets)
    assert all(t.rewards["success"] == 1 for t in played)
    in_time = sum(t.turns <= recipe.budgets.max_turns for t in played) / len(played)
    assert 0.1 < in_time < 0.6, "there is something to imitate, and something left to find out"


async def test_the_directory_is_a_fair_task(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    recipe = load_recipe("recipes/smollm2_directory.toml")
    parts = load_parts(recipe)
    for task in parts.held_out:
        path, cards = task.metadata["path"], task.envs["directory"]["cards"]
        words = task.messages[0].content
        assert words.startswith(f"Start at {path[0]},")
        asked = [word.strip(".,") for word in words.split() if word.strip(".,") in cards[path[0]]]
        found = path[0]
        for relation in asked[: len(path) - 1]:
            found = cards[found][relation]
        assert found == path[-1]
        assert task.target == cards[found]["phone"]
        assert len(path) + 1 <= recipe.budgets.max_turns, "it can be done in time"
        phones = [card["phone"] for card in cards.values()]
        assert phones.count(task.target) == 1, "nobody else's number is right by chance"
