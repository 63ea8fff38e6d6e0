"""Reward models: what they learn from pairs and scored steps, and what they say of episodes."""

from __future__ import annotations

import asyncio
import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from training_helpers import TINY, tasks
from typer.testing import CliRunner

import ludus
from ludus.cli.main import app
from ludus.core import ConfigError, Message, StopReason, Task, Trajectory
from ludus.core.trajectory import Segment, SegmentKind, TokenSequence
from ludus.rewards import Scorer, build_reward
from ludus.training.data.conversations import (
    Preference,
    ScoredSteps,
    read_pairs,
    read_preferences,
    read_scored_steps,
)
from ludus.training.reward_models import (
    RewardModelConfig,
    RewardModelResult,
    fit_reward_model,
    load_reward_model,
)
from ludus.training.reward_models.fit import PreferenceObjective, StepObjective

ANIMALS = ["ant", "bee", "cat", "dog", "eel", "fox", "gnu", "hen", "ibis", "jay"]
SCRATCH = {"layers": 1, "width": 48, "heads": 2, "kv_heads": 1, "vocabulary": 400, "context": 256}
CONFIG = RewardModelConfig.parse({
    "model": {"scratch": SCRATCH}, "steps": 40, "batch": 16, "held_out": 0.25,
    "optimizer": {"learning_rate": 1e-2},
})  # fmt: skip


def said(question: str, *answers: str) -> list[Message]:
    messages = [Message("user", question)]
    for answer in answers:
        messages += [Message("assistant", answer), Message("user", "and?")]
    return messages[:-1]


def pairs(count: int, seed: int = 0) -> list[Preference]:
    """Overall an answer that names the animal is better; in brevity the other one, which is shorter."""
    draw, found = random.Random(seed), []
    for _ in range(count):
        animal, other = draw.sample(ANIMALS, 2)
        good = f"it is the {animal} for sure, I say"
        found.append(
            Preference(
                said(f"name {animal}", good), said(f"name {animal}", f"a {other}"), {"brevity": 0.0}
            )
        )
    return found


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> RewardModelResult:
    return fit_reward_model(pairs(120), tmp_path_factory.mktemp("rm") / "model", CONFIG)


def test_each_head_learns_its_own_dimension(fitted: RewardModelResult) -> None:
    assert fitted.kind == "preference" and fitted.trained_on == 90
    assert fitted.counts == {"overall": 30, "brevity": 30}
    assert fitted.measured["overall"].value >= 0.95
    assert fitted.measured["brevity"].value >= 0.95, "in which the rejected one is better"


def test_scores_do_not_depend_on_what_is_scored_beside(fitted: RewardModelResult) -> None:
    model = load_reward_model(fitted.folder)
    one, two = said("name ant", "it is the ant for sure, I say"), said("name bee", "a cat", "the bee")
    together = model.score([one, two, one])
    assert [part.shape for part in together] == [(1, 2), (2, 2), (1, 2)]
    torch.testing.assert_close(together[1], model.score([two])[0], atol=1e-5, rtol=0)
    torch.testing.assert_close(together[0], together[2], atol=1e-5, rtol=0)


def test_the_gradient_is_that_of_bradley_and_terry() -> None:
    given = [
        Preference(said("q", "a"), said("q", "b"), {"style": 0.5}),
        Preference(said("q", "c"), said("q", "d")),
    ]
    objective = PreferenceObjective(given)
    scores = [torch.tensor([[s, 2 * s]]) for s in (0.5, -0.25, 1.0, 2.0)]
    gradients, loss = objective.gradient(scores, given)
    sigmoid = lambda x: 1 / (1 + math.exp(-x))  # noqa: E731
    margin, other, style = 0.75, -1.0, 1.5
    terms = [-math.log(sigmoid(margin)), -math.log(sigmoid(other))]
    terms.append(-0.5 * math.log(sigmoid(style)) - 0.5 * math.log(sigmoid(-style)))
    assert loss == pytest.approx(sum(terms) / 3, abs=1e-6)
    assert gradients[0][0, 0].item() == pytest.approx(-(1 - sigmoid(margin)) / 3, abs=1e-6)
    assert gradients[1][0, 1].item() == pytest.approx((0.5 - sigmoid(style)) / 3, abs=1e-6)
    assert gradients[2][0, 1].item() == 0, "the second pair has no verdict on style"


def test_steps_are_a_regression_on_the_scores_that_there_are() -> None:
    given = [ScoredSteps(said("q", "a", "b"), (1.0, None)), ScoredSteps(said("q", "c"), (0.0,))]
    scores = [torch.tensor([[0.5], [9.0]]), torch.tensor([[0.25]])]
    gradients, loss = StepObjective(given).gradient(scores, given)
    assert loss == pytest.approx((0.25 + 0.0625) / 2)
    assert gradients[0].flatten().tolist() == pytest.approx([-0.5, 0.0])
    assert gradients[1].flatten().tolist() == pytest.approx([0.25])


def episode(messages: list[Message]) -> Trajectory:
    segments = [Segment(SegmentKind.PROMPT, [1])]
    for message in messages[1:]:
        is_action = message.role == "assistant"
        kind = SegmentKind.ACTION if is_action else SegmentKind.OBSERVATION
        segments.append(Segment(kind, [2], [0.0] if is_action else None))
    return Trajectory(
        Task.of(messages[0].content), [TokenSequence(segments)], list(messages), stop=StopReason.ANSWERED
    )


async def test_a_reward_model_is_a_reward(fitted: RewardModelResult) -> None:
    rewards = build_reward({"reward": "reward_model", "folder": str(fitted.folder)})
    good, bad = said("name ant", "it is the ant for sure, I say"), said("name ant", "a bee")
    episodes = [episode(one) for one in (good, bad) * 8]
    scorer = Scorer([rewards])
    await asyncio.gather(*(scorer.score(one) for one in episodes))
    high, low = episodes[0], episodes[1]
    assert high.reward is not None and low.reward is not None
    assert 0.5 < high.reward <= 1 and 0 <= low.reward < 0.5, "an average episode has 0.5"
    assert high.rewards["reward_model_brevity"] < low.rewards["reward_model_brevity"]
    assert {round(one.reward or 0, 4) for one in episodes[::2]} == {round(high.reward, 4)}
    silent = episode(good[:1])
    await scorer.score(silent)
    assert silent.reward is None, "unscored, which is not zero"
    mixed = build_reward(
        {
            "reward": "reward_model",
            "folder": str(fitted.folder),
            "heads": {"overall": 1.0, "brevity": 3.0},
        }
    )
    again = episode(good)
    await Scorer([mixed]).score(again)
    parts = again.rewards
    expected = (parts["reward_model_overall"] + 3 * parts["reward_model_brevity"]) / 4
    assert again.reward == pytest.approx(expected)


async def test_what_is_wrong_with_a_reward_model_is_said(
    fitted: RewardModelResult, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="ludus reward-model DATA"):
        build_reward({"reward": "reward_model", "folder": str(tmp_path)})
    with pytest.raises(ConfigError, match="exists already"):
        fit_reward_model(pairs(4), fitted.folder, CONFIG)
    with pytest.raises(ConfigError, match="at least two examples"):
        fit_reward_model(pairs(1), tmp_path / "new", CONFIG)
    one = episode(said("name ant", "a bee"))
    for spec, words in (
        ({"reward": "step_model"}, "was trained on preferences: use 'reward_model'"),
        ({"reward": "reward_model", "heads": {"style": 1.0}}, "which are: overall, brevity"),
    ):
        reward = build_reward({**spec, "folder": str(fitted.folder)})
        with pytest.raises(ConfigError, match=words):
            await Scorer([reward]).score(one)


async def test_a_step_model_scores_each_action(tmp_path: Path) -> None:
    draw, rows = random.Random(1), []
    for _ in range(80):
        steps = [draw.choice(ANIMALS[:2]) for _ in range(3)]
        rows.append({
            "messages": [vars_of(one) for one in said("go", *(f"take {one}" for one in steps))],
            "scores": [float(one == "ant") for one in steps],
        })  # fmt: skip
    file = tmp_path / "steps.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = fit_reward_model(file, tmp_path / "prm", CONFIG)
    assert result.kind == "step" and result.measured["step"].value > 0.95 and result.counts["step"] == 60
    reward = build_reward({"reward": "step_model", "folder": str(tmp_path / "prm")})
    played = episode(said("go", "take bee", "take ant", "take bee"))
    await Scorer([reward]).score(played)
    scores = [action.reward for action in played.actions]
    assert scores == pytest.approx([0.0, 1.0, 0.0], abs=0.3)
    assert all(0 <= score <= 1 for score in scores if score is not None), "within what it has learned"


def vars_of(message: Message) -> dict[str, Any]:
    return {"role": message.role, "content": message.content}


def test_a_file_of_pairs_is_read_by_dpo_and_by_reward_models(tmp_path: Path) -> None:
    row = {"prompt": "2+2?", "chosen": "4", "rejected": "5", "dimensions": {"tone": "tie", "form": None}}
    file = tmp_path / "pairs.jsonl"
    file.write_text(json.dumps(row) + "\n")
    [pair] = read_preferences(file)
    assert pair.dimensions == {"tone": 0.5} and [*read_pairs(file)] == [(pair.chosen, pair.rejected)]
    for wrong, words in (
        ({"dimensions": {"tone": "left"}}, "chosen, rejected or tie, not 'left'"),
        ({"dimensions": [1]}, "dimensions are"),
    ):
        file.write_text(json.dumps({**row, **wrong}) + "\n")
        with pytest.raises(ConfigError, match=words):
            read_preferences(file)
    conversation = {"messages": [vars_of(one) for one in said("q", "a")]}
    for scores, words in (([1.0, 2.0], "2 scores for 1"), ("high", "a list of numbers")):
        file.write_text(json.dumps({**conversation, "scores": scores}) + "\n")
        with pytest.raises(ConfigError, match=words):
            read_scored_steps(file)


def test_a_run_learns_from_a_reward_model(fitted: RewardModelResult, tmp_path: Path) -> None:
    """It is a reward like any other, named in a recipe."""
    result = ludus.train(
        **{**TINY, "rl": {**TINY["rl"], "steps": 2}, "run": {"folder": str(tmp_path / "run")}},
        rewards=[{"reward": "reward_model", "folder": str(fitted.folder)}],
        tasks=tasks(4),
    )
    row = [row for row in result.metrics if "reward" in row][-1]
    assert 0 < row["reward"] < 1 and "reward/reward_model_brevity" in row


def test_a_conversation_longer_than_the_context_is_scored(fitted: RewardModelResult) -> None:
    model = load_reward_model(fitted.folder)
    [scores] = model.score([said("name ant", *["it is the ant " * 20] * 8)])
    assert scores.shape == (8, 2) and bool(scores.isfinite().all()), "the beginning is cut"


def test_the_command_trains_and_measures(tmp_path: Path) -> None:
    file = tmp_path / "pairs.jsonl"
    rows = [
        {"prompt": f"say {a}", "chosen": f"{a} it is", "rejected": "no", "dimensions": {"tone": "tie"}}
        for a in ANIMALS * 2
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = ["steps=10", "batch=4", "optimizer.learning_rate=0.01", "--model", "scratch"]
    small = ["model.scratch.width=32", "model.scratch.heads=2", "model.scratch.vocabulary=300"]
    call = ["reward-model", str(file), *settings, *small, "--out", str(tmp_path / "rm")]
    done = CliRunner().invoke(app, call)
    assert done.exit_code == 0 and "held-out accuracy" in done.output, done.output
    assert "overall" in done.output and 'reward = "reward_model"' in done.output
    assert load_reward_model(tmp_path / "rm").about.heads == ("overall", "tone")
    done = CliRunner().invoke(app, ["reward-model", "none.jsonl", "--out", str(tmp_path / "b")])
    assert "there is no file" in str(done.exception)
    done = CliRunner().invoke(app, ["reward-model", str(file), "stepz=1", "--out", str(tmp_path / "b")])
    assert done.exit_code != 0 and isinstance(done.exception, ConfigError)
    assert "stepz" in str(done.exception)
