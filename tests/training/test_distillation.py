"""On-policy distillation: the formula's gradient, a student that moves towards its teacher, who may teach."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from ragged_episodes import (
    assert_same_gradient,
    gradient_of,
    played,
    row_logprobs,
    scored,
    tiny_learner,
    tiny_model,
)
from stage_runs import Talker, assert_same_runs
from training_helpers import TINY, expert, tasks

import ludus
from ludus.core import ConfigError
from ludus.observe.metrics import undefined
from ludus.training import ModelConfig, frozen, load_model, save_model
from played_steps import distill


@pytest.mark.parametrize("budget", [40, 1000])
def test_the_gradient_is_the_formulas(budget: int) -> None:
    """Of each token's log p - log q, the first as the engine sampled it, through the ratio, over all tokens."""
    model, teacher = tiny_model(), frozen(tiny_model(seed=1))
    trajectories = scored(played(model, seed=1))
    tokens = sum(len(action.tokens) for t in trajectories for action in t.actions)
    slopes, divergences = [], []
    for one in trajectories:
        own, theirs = row_logprobs(model, one.tokens), row_logprobs(teacher, one.tokens)
        places = zip(one.action_mask, one.logprobs, own.tolist(), theirs.tolist(), strict=True)
        slopes.append([0.0] * len(one.tokens))
        for place, (is_said, old, now, other) in enumerate(places):
            if is_said:
                divergences.append(old - other)
                slopes[-1][place] = (old - other) * float(torch.tensor(now - old).exp()) / tokens
    expected = gradient_of(model, [t.tokens for t in trajectories], slopes)
    metrics = distill(tiny_learner(model, budget), trajectories, teacher)
    assert_same_gradient(model, expected)
    assert metrics["reverse_kl"] == pytest.approx(sum(divergences) / tokens, rel=1e-4)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A student, and a teacher with the same tokenizer that likes other tokens."""
    folder = tmp_path_factory.mktemp("models")
    whole = {name: table for name, table in TINY.items() if name not in ("rl", "run")}
    stage = [{"kind": "sft", "steps": 1, "batch": 2}]
    made = ludus.train(
        **whole, stage=stage, tasks=tasks(6), demonstrations=expert, run={"folder": str(folder / "run")}
    )
    model, tokenizer = load_model(ModelConfig(name=str(made.model), device="cpu"), 0)
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn_like(parameter) * 0.25)
    (folder / "teacher").mkdir()
    save_model(folder / "teacher", model, tokenizer)
    return str(made.model), str(folder / "teacher")


def settings(folder: Path, student: str, teacher: str, **stage: Any) -> dict[str, Any]:
    whole = {name: table for name, table in TINY.items() if name not in ("rl", "model", "run")}
    distilling = {
        "kind": "distill",
        "teacher": teacher,
        "steps": 12,
        "tasks": 4,
        "attempts": 2,
        "optimizer": {"learning_rate": 2e-2},
    }
    run = {"folder": str(folder), "checkpoint_every": 2}
    model = {"name": student}
    return {**whole, "model": model, "stage": [{**distilling, **stage}], "run": run, "max_in_flight": 1}


def divergence(student: str, teacher: str, heard: list[ludus.Trajectory]) -> float:
    """KL(student || teacher), summed over the whole vocabulary, at the places where the student spoke."""
    sides = [load_model(ModelConfig(name=name, device="cpu"), 0)[0] for name in (student, teacher)]
    total = []
    for one in heard:
        with torch.no_grad():
            own, theirs = (
                side(input_ids=torch.tensor([one.tokens])).logits[0, :-1].log_softmax(-1)
                for side in sides
            )
        total.append((own.exp() * (own - theirs)).sum(-1)[torch.tensor(one.action_mask[1:])])
    return torch.cat(total).mean().item()


def test_a_student_moves_towards_its_teacher(tmp_path: Path, folders: tuple[str, str]) -> None:
    """Without any reward. What it says is scored by the teacher, and nothing else."""
    student, teacher = folders
    told = settings(tmp_path / "run", student, teacher, attempts=8) | {"max_in_flight": 32}
    result = ludus.train(**told, tasks=tasks(6), agent=Talker())
    logged = {name for row in result.metrics for name in row} - {"step", "time", "nonfinite"}
    assert undefined(logged) == []
    course = [row["distill/reverse_kl"] for row in result.metrics if "distill/reverse_kl" in row]
    assert sum(course[-3:]) < 0.9 * sum(course[:3])
    heard = result.run.trajectories(1, "train")
    assert divergence(str(result.model), teacher, heard) < 0.85 * divergence(student, teacher, heard)


def test_a_stopped_distillation_goes_on_as_if_it_had_not_been(
    tmp_path: Path, folders: tuple[str, str]
) -> None:
    whole = {"tasks": tasks(6), "agent": Talker()}
    ludus.train(**settings(tmp_path / "whole", *folders, steps=3), **whole)

    def stop(phase: str, step: int, total: int, metrics: dict[str, float]) -> None:
        if step == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ludus.train(**settings(tmp_path / "cut", *folders, steps=3), **whole, on_step=stop)
    ludus.train(resume=tmp_path / "cut", **whole)
    assert_same_runs(tmp_path / "whole", tmp_path / "cut")


def test_a_teacher_with_another_tokenizer_is_refused(tmp_path: Path, folders: tuple[str, str]) -> None:
    student, teacher = folders
    scratch = settings(tmp_path / "run", student, teacher)
    scratch["model"] = {"scratch": {"layers": 1, "width": 32, "heads": 2, "kv_heads": 1}}
    with pytest.raises(ConfigError, match=r"has another tokenizer than the student: \d+ of \d+ tokens"):
        ludus.train(**scratch, tasks=[{"prompt": "quite other words " * 20}], agent=Talker())
    with pytest.raises(
        ConfigError, match=r"stage.0.teacher = '/no/such' *: there is no folder /no/such"
    ):
        ludus.train(**settings(tmp_path / "run", student, "/no/such"), tasks=tasks(2))
    assert not (tmp_path / "run").exists()
