"""Learning rates that a recipe leaves out: by the stage and by what is trained; told, and kept."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from stage_runs import Talker
from training_helpers import TINY, expert, tasks

import ludus
from ludus.cli.check.recipe import recipe_findings
from ludus.training import Recipe
from ludus.training.config.recipe import STAGE_CONFIGS, rate_notes, with_usual_settings
from ludus.training.config.stages import CRITIC_RATES

SCRATCH = {"scratch": {"layers": 1, "width": 32}}
FULL, LORA = {"name": "smollm2"}, {"name": "smollm2", "lora": {}}


def rates(model: dict[str, Any], *stages: dict[str, Any]) -> list[float | None]:
    made = with_usual_settings(Recipe.parse({"model": model, "stage": list(stages)}))
    return [stage.optimizer.learning_rate for stage in made.stages]  # type: ignore[union-attr]


EVERY: list[dict[str, Any]] = [
    {"kind": "sft", "demonstrations": "x.jsonl"},
    {"kind": "rejection"},
    {"kind": "dpo"},
    {"kind": "rl"},
    {"kind": "distill", "teacher": "t"},
]


def test_imitation_of_a_pretrained_model_is_gentle() -> None:
    """1e-3 ruins a pretrained model; 2e-5 is TRL's for all weights, and an adapter takes ten times that."""
    sft = EVERY[0]
    assert rates(SCRATCH, sft) == [1e-3] and rates(FULL, sft) == [2e-5] and rates(LORA, sft) == [2e-4]
    assert all(rate is not None and rate <= 2e-5 for rate in rates(FULL, *EVERY))
    full, lora = rates(FULL, *EVERY), rates(LORA, *EVERY)
    assert lora == [pytest.approx(10 * (rate or 0)) for rate in full]
    assert all(rate is not None and rate >= 1e-4 for rate in rates(SCRATCH, *EVERY))


def test_a_checkpoint_of_a_model_made_from_scratch_is_no_pretrained_model(tmp_path: Path) -> None:
    """A run that goes on from one needs the rates of the first: 1e-6 would teach it nothing."""
    for name, model in {
        "first": SCRATCH,
        "second": {"name": str(tmp_path / "first/checkpoints/step-1")},
    }.items():
        (tmp_path / name / "checkpoints" / "step-1").mkdir(parents=True)
        (tmp_path / name / "recipe.json").write_text(json.dumps({"model": model}))
    for name in ("first/checkpoints/step-1", "second/checkpoints/step-1", "second"):
        assert rates({"name": str(tmp_path / name)}, *EVERY) == rates(SCRATCH, *EVERY)
    assert rates({"name": str(tmp_path / "second"), "lora": {}}, *EVERY) == rates(LORA, *EVERY)
    (tmp_path / "second" / "recipe.json").write_text(json.dumps({"model": FULL}))
    assert rates({"name": str(tmp_path / "second")}, *EVERY) == rates(FULL, *EVERY)
    (tmp_path / "second" / "recipe.json").write_text("[]")
    assert rates({"name": str(tmp_path / "second")}, *EVERY) == rates(FULL, *EVERY)


def test_a_written_rate_always_wins() -> None:
    stages = [{**one, "optimizer": {"learning_rate": 0.125}} for one in EVERY]
    for model in (SCRATCH, FULL, LORA):
        assert rates(model, *stages) == [0.125] * len(EVERY)


def test_another_setting_of_the_optimizer_does_not_change_the_rate() -> None:
    """A table without a learning rate once meant RL's."""
    assert rates(FULL, {**EVERY[0], "optimizer": {"schedule": "cosine"}}) == [2e-5]


def test_a_critic_has_its_own() -> None:
    stage = {"kind": "rl", "algorithm": "ppo", "steps": 40}
    for model in (SCRATCH, FULL, LORA):
        raw = {"model": model, "stage": [stage]}
        (made,) = with_usual_settings(Recipe.parse(raw)).stages
        critic = made.critic  # type: ignore[union-attr]
        assert critic is not None and critic.warmup_steps == 5
        expected = {str(SCRATCH): 1e-3, str(FULL): 1e-5, str(LORA): 1e-4}[str(model)]
        assert critic.optimizer.learning_rate == expected
        short = {**stage, "steps": 8, "critic": {"kind": "head"}}
        (made,) = with_usual_settings(Recipe.parse({**raw, "stage": [short]})).stages
        assert made.critic.warmup_steps == 2 and made.critic.kind == "head"  # type: ignore[union-attr]
    plain = with_usual_settings(Recipe.parse({"model": FULL}))
    assert plain.rl.critic is None, "an algorithm without a critic gets none"


def settings(folder: Path, *stages: dict[str, Any]) -> dict[str, Any]:
    base = {name: table for name, table in TINY.items() if name not in ("rl", "warm_start")}
    return {**base, "max_in_flight": 1, "stage": list(stages), "run": {"folder": str(folder)}}


def code() -> dict[str, Any]:
    @ludus.reward
    async def by_attempt(trajectory: ludus.Trajectory) -> float:
        return float(trajectory.attempt % 2)

    parts = {"tasks": tasks(4), "held_out": tasks(2, first=50), "rewards": [by_attempt]}
    return {**parts, "agent": Talker(), "demonstrations": expert}


SFT = {"kind": "sft", "steps": 2, "batch": 2}
PPO = {"kind": "rl", "algorithm": "ppo", "steps": 2, "tasks": 2, "attempts": 2}


def test_a_run_says_its_rates_and_writes_them_down(tmp_path: Path, capsys: Any) -> None:
    result = ludus.train(**settings(tmp_path / "run", SFT, PPO), **code())
    said = capsys.readouterr().err
    assert "learning rate of stage.0: 0.001 (usual for a model made from scratch)" in said
    assert "learning rate of stage.1: 0.0005 (usual" in said
    assert "learning rate of stage.1.critic: 0.001 (usual" in said
    kept = json.loads((tmp_path / "run" / "recipe.json").read_text())["stage"]
    assert [one["optimizer"]["learning_rate"] for one in kept] == [1e-3, 5e-4]
    assert kept[1]["critic"]["optimizer"]["learning_rate"] == 1e-3
    shown = [row for row in result.metrics if "sft/learning_rate" in row or "learning_rate" in row]
    found = [row.get("sft/learning_rate", row.get("learning_rate")) for row in shown]
    assert found == [1e-3, 1e-3, 5e-4, 5e-4]


def test_checking_a_recipe_says_the_rates() -> None:
    found = recipe_findings(
        Path(__file__).parents[2] / "recipes" / "tickets.toml",
        ["warm_start.optimizer.learning_rate=none"],
    )
    said = [text for severity, text in found if severity == "info" and "learning rate" in text]
    assert said == [
        "learning rate of warm_start: 0.001 (usual for a model made from scratch)",
        "learning rate of rl: 0.001 (usual for a model made from scratch: 0.0005)",
    ]


def test_notes_of_an_adapter() -> None:
    raw = {"model": LORA, "warm_start": {"demonstrations": "x.jsonl"}, "rl": {"steps": 0}}
    assert rate_notes(with_usual_settings(Recipe.parse(raw))) == [
        "learning rate of warm_start: 0.0002 (usual for an adapter (LoRA))"
    ]


def test_the_page_has_the_rates() -> None:
    page = (Path(__file__).parents[2] / "docs" / "training.md").read_text(encoding="utf-8")
    table = re.findall(r"^\| `(\w+)` \| (\S+) \| (\S+) \| (\S+) \|$", page, re.MULTILINE)
    known = {one.model_fields["kind"].default: one.usual_rates for one in STAGE_CONFIGS}
    known = {kind: usual for kind, usual in known.items() if usual is not None} | {
        "critic": CRITIC_RATES
    }
    told = {name: tuple(map(float, row)) for name, *row in table if name in known}
    assert told == {kind: (one.scratch, one.full, one.lora) for kind, one in known.items()}
