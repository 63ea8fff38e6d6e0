"""Which tasks a step gets, from one set and from several."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from worker_parts import RENDERER, right, task_set, tasks

from ludus.core import ConfigError, key, shuffled
from ludus.engine import FakeEngine
from ludus.training import (
    Parts,
    Recipe,
    TaskSampler,
    TaskSet,
    TaskSetConfig,
    build_task_sets,
    close_task_sets,
    items_of_step,
)
from ludus.training.data.tasks import next_sets

weights_of_sets = st.lists(st.floats(0.01, 100), min_size=2, max_size=6)


def sampled(sampler: TaskSampler, size: int, hardest: float | None = None) -> list[str]:
    return [one.task.id for one in sampler.sample(size, hardest)]


@given(st.integers(1, 9), st.integers(0, 30), st.integers(1, 12), st.integers(0, 2**40))
def test_one_set_is_dealt_as_batches_were(count: int, step: int, size: int, seed: int) -> None:
    """The reference: permutations of the epochs, end to end, cut into batches."""
    epochs = (step + 1) * size // count + 1
    order = [i for epoch in range(epochs) for i in shuffled(count, key(seed, "epoch", epoch))]
    expected = order[step * size : (step + 1) * size]
    assert items_of_step(range(count), step, size, seed) == expected
    sampler = TaskSampler([task_set(tasks(count))], seed)
    for _ in range(step):
        sampler.sample(size)
    assert sampled(sampler, size) == [str(i) for i in expected]


@given(weights_of_sets, st.integers(1, 200))
def test_every_prefix_follows_the_weights_within_tijdemans_bound(
    weights: list[float], size: int
) -> None:
    chosen = next_sets(weights, [0] * len(weights), size)
    bound = 1 - 1 / (2 * len(weights) - 2)
    for n in range(1, size + 1):
        had = Counter(chosen[:n])
        for number, weight in enumerate(weights):
            assert abs(weight / sum(weights) * n - had[number]) <= bound + 1e-9


@given(weights_of_sets, st.integers(0, 50), st.integers(1, 50))
def test_going_on_is_the_same_as_not_having_stopped(weights: list[float], first: int, then: int) -> None:
    whole = next_sets(weights, [0] * len(weights), first + then)
    had = Counter(whole[:first])
    assert next_sets(weights, [had[i] for i in range(len(weights))], then) == whole[first:]


def two_sets() -> list[TaskSet]:
    return [
        task_set(tasks(5, "a"), name="a", weight=3),
        task_set(tasks(5, "b"), name="b", weight=1),
    ]


def test_every_task_of_a_set_comes_once_in_its_epoch() -> None:
    sampler = TaskSampler(two_sets(), seed=7)
    drawn = [task for _ in range(8) for task in sampled(sampler, 5)]
    of_a, of_b = ([task for task in drawn if task[0] == name] for name in "ab")
    assert (len(of_a), len(of_b)) == (30, 10)
    for own in (of_a, of_b):
        for start in range(0, len(own), 5):
            assert len(set(own[start : start + 5])) == 5
    assert [task[1] for task in of_a[:10]] != [task[1] for task in of_b]  # orders of their own


def test_refills_take_further_tasks_and_leave_the_weights_alone() -> None:
    sampler, plain = TaskSampler(two_sets(), seed=7), TaskSampler(two_sets(), seed=7)
    first = sampler.sample(4)
    assert first == plain.sample(4)
    extra = sampler.sample_from([1, 0, 1])
    assert [one.set for one in extra] == [1, 0, 1]
    of_a = [one.task.id for one in [*first, *extra] if one.set == 0]
    assert len(set(of_a)) == 4
    assert [one.set for one in sampler.sample(8)] == [one.set for one in plain.sample(8)]


def test_a_deck_goes_on_from_its_saved_state() -> None:
    sampler = TaskSampler(two_sets(), seed=7)
    sampler.sample(6), sampler.sample_from([1, 1])
    state = json.loads(json.dumps(sampler.state_dict()))
    copy = sampler.copy()
    again = TaskSampler(two_sets(), seed=7)
    again.load_state_dict(state)
    assert sampler.sample(9) == again.sample(9) == copy.sample(9)
    with pytest.raises(ConfigError, match="task sets"):
        TaskSampler([task_set(tasks(2), name="c")], seed=7).load_state_dict(state)


def test_tasks_that_are_too_hard_are_passed_over() -> None:
    easy, hard = tasks(3, "e", difficulty=1), tasks(3, "h", difficulty=5.5)
    sampler = TaskSampler([task_set([*easy, *hard, *tasks(1, "unknown")])], seed=0)
    assert set(sampled(sampler, 8, hardest=1)) == {"e0", "e1", "e2", "unknown0"}
    assert set(sampled(sampler, 2, hardest=-1)) == {"unknown0"}
    assert "h0" in sampled(sampler, 14, hardest=6)
    with pytest.raises(ConfigError, match=r"difficulty of at most -1.*start"):
        TaskSampler([task_set(easy)], seed=0).sample(1, hardest=-1)
    with pytest.raises(ConfigError, match="must be a number, not 'low'"):
        TaskSampler([task_set(tasks(1, difficulty="low"))], seed=0).sample(1, hardest=1)


def test_sets_that_cannot_be_dealt_from_are_refused() -> None:
    with pytest.raises(ConfigError, match="different names"):
        TaskSampler([task_set(tasks(1)), task_set(tasks(1))], seed=0)
    with pytest.raises(ConfigError, match="no tasks"):
        TaskSampler([task_set([])], seed=0)
    with pytest.raises(ConfigError, match="weight"):
        TaskSetConfig.parse({"name": "a", "train": "a.jsonl", "weight": 0})
    with pytest.raises(ConfigError, match="name"):
        TaskSetConfig.parse({"name": "a/b", "train": "a.jsonl"})


async def test_building_sets_from_a_recipe(tmp_path: Path) -> None:
    for name in ("sums", "facts"):
        lines = (json.dumps({"id": str(n), "prompt": f"{name} {n}?"}) for n in range(3))
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    recipe = Recipe.parse(
        {
            "model": {"scratch": {}},
            "agent": {"system": "Be brief."},
            "rewards": ["exact_match"],
            "budgets": {"max_turns": 3, "max_tokens": 500},
            "task_sets": [
                {
                    "name": "sums",
                    "train": str(tmp_path / "sums.jsonl"),
                    "evaluation": str(tmp_path / "sums.jsonl"),
                },
                {
                    "name": "facts",
                    "train": str(tmp_path / "facts.jsonl"),
                    "weight": 2,
                    "rewards": ["f1"],
                    "budgets": {"max_turns": 9},
                    "system": "Be exact.",
                },
            ],
        }
    )
    fake = FakeEngine([])
    sums, facts = build_task_sets(recipe, Parts(rewards=[right]), fake, RENDERER.tokenizer)
    assert (sums.name, sums.weight, len(sums.held_out)) == ("sums", 1, 3)
    assert (facts.name, facts.weight, len(facts.held_out)) == ("facts", 2, 0)
    assert [r.name for r in sums.rollout.scorer.rewards] == ["success"]
    assert [r.name for r in facts.rollout.scorer.rewards] == ["f1"]
    assert (facts.rollout.budgets.max_turns, facts.rollout.budgets.max_tokens) == (9, 500)
    assert sums.rollout.budgets.max_turns == 3
    assert [m.content for m in sums.tasks[0].messages] == ["Be brief.", "sums 0?"]
    assert [m.content for m in facts.tasks[0].messages] == ["Be exact.", "facts 0?"]
    assert sums.rollout.tools is facts.rollout.tools
    await close_task_sets([sums, facts])

    alone = recipe.model_copy(update={"task_sets": ()})
    [only] = build_task_sets(alone, Parts(tasks=tasks(2)), fake, RENDERER.tokenizer)
    assert (only.name, len(only.tasks)) == ("tasks", 2)
