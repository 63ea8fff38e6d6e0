"""Whole runs on images: resumed, replayed, with adapters and critics; and that only the image tells."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import ludus
from ludus.core.failures import ConfigError
from ludus.core.messages import Media, Message
from ludus.core.task import Task
from ludus.observe import RunFolder

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from colours import answer, expert, make_model, right, screen, screenshot, tasks

WARM = {"steps": 2, "batch": 2, "optimizer": {"learning_rate": 1e-3}}
RL = {"steps": 2, "tasks": 2, "attempts": 2, "optimizer": {"learning_rate": 1e-3}}
CODE: dict[str, Any] = {"tools": [screenshot, answer], "rewards": [right]}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("colours"))


def shown(first: int, count: int) -> list[Task]:
    """Tasks whose prompts hold the image: an untrained model calls no tool."""
    found = []
    for row in tasks(first, count):
        image = Media.image(screen(row["id"], row["shown"]))
        message = Message("user", row["prompt"], media=(image,))
        found.append(Task(row["id"], (message,), row["target"], metadata={"shown": row["shown"]}))
    return found


def train(folder: Path, model: dict[str, Any], **settings: Any) -> ludus.Result:
    return ludus.train(
        **CODE,
        model={"device": "cpu", **model},
        tasks=shown(0, 8),
        held_out=shown(100, 2),
        budgets={"max_turns": 2, "max_turn_tokens": 16},
        run={
            "folder": str(folder),
            "checkpoint_every": 1,
            "trajectories_every": 1,
            "keep_checkpoints": 9,
        },
        progress=False,
        **settings,
    )


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def differences(run: RunFolder) -> list[float]:
    return [row["logprob_difference_max"] for row in run.metrics() if "logprob_difference_max" in row]


def test_a_run_is_resumed_and_replayed_with_its_images(model: Path, tmp_path: Path) -> None:
    found = train(
        tmp_path / "run",
        {"name": str(model)},
        demonstrations=expert,
        warm_start=WARM,
        rl={**RL, "kl": 0.01},
    )
    run = found.run
    assert differences(run) and max(differences(run)) < 1e-4
    assert any("images_unseen" in row for row in run.metrics()) is False
    kept = list((run.path / "media").iterdir())
    seen = [span.sha256 for t in run.trajectories(3) for span in t.sequences[0].media]
    assert seen and {path.name for path in kept} >= set(seen)
    before = weights(model)
    after = weights(found.model)
    frozen = [name for name in before if "vision" in name or "projector" in name]
    assert frozen and all(torch.equal(before[name], after[name]) for name in frozen)
    assert any(not torch.equal(before[name], after[name]) for name in before)
    # resumed from the step before the last
    broken = tmp_path / "broken"
    shutil.copytree(run.path, broken)
    shutil.rmtree(broken / "checkpoints" / "step-000004")
    code = {
        **CODE,
        "demonstrations": expert,
        "tasks": shown(0, 8),
        "held_out": shown(100, 2),
        "progress": False,
    }
    again = ludus.train(resume=broken, **code)
    for name, weight in weights(again.model).items():
        assert torch.equal(weight, after[name]), name
    # replayed from the record
    replayed = ludus.train(replay=run.path, run={"folder": str(tmp_path / "replay")}, **code)
    for name, weight in weights(replayed.model).items():
        assert torch.equal(weight, after[name]), name
    (run.path / "media" / seen[0]).unlink()
    with pytest.raises(ConfigError, match=seen[0]):
        ludus.train(replay=run.path, run={"folder": str(tmp_path / "lost")}, **code)


@pytest.mark.parametrize("stages", ["lora", "critic", "critic head", "rejection", "async", "trained"])
def test_other_ways_to_train_see_as_well(model: Path, tmp_path: Path, stages: str) -> None:
    source: dict[str, Any] = {"name": str(model)}
    more: dict[str, Any] = {"rl": RL}
    if stages == "lora":
        pytest.importorskip("peft")
        source["lora"] = {"rank": 2}
        more = {"rl": {**RL, "kl": 0.1}}
    elif stages.startswith("critic"):
        kind = "head" if "head" in stages else "model"
        more = {"rl": {**RL, "algorithm": "ppo", "critic": {"kind": kind}}}
    elif stages == "rejection":
        more = {
            "stage": [{"kind": "rejection", "steps": 1, "tasks": 2, "attempts": 2, "threshold": 0.0}]
        }
    elif stages == "async":
        more = {"rl": {**RL, "staleness": 1}}
    elif stages == "trained":
        source["vision"] = "trained"
        more = {"warm_start": WARM, "rl": RL, "demonstrations": expert}
    found = train(tmp_path / "run", source, **more)
    assert all(value < 1e-4 for value in differences(found.run))
    assert not any("images_unseen" in row for row in found.run.metrics())
    if stages == "trained":
        before, after = weights(model), weights(found.model)
        moved = {name for name in before if not torch.equal(before[name], after[name])}
        assert any("vision" in name for name in moved) and any("projector" in name for name in moved)


def test_finished_groups_of_a_checkpoint_keep_their_images(model: Path, tmp_path: Path) -> None:
    """An asynchronous run that is resumed trains on groups that were played before."""
    found = train(tmp_path / "run", {"name": str(model)}, rl={**RL, "steps": 3, "staleness": 2})
    steps = sorted((found.run.path / "checkpoints").iterdir())
    assert any((step / "media").is_dir() for step in steps)
    shutil.rmtree(steps[-1])
    again = ludus.train(
        resume=found.run.path, **CODE, tasks=shown(0, 8), held_out=shown(100, 2), progress=False
    )
    assert json.loads((again.model / "progress.json").read_text())["step"] == 3


def assert_same_run(one: ludus.Result, two: ludus.Result) -> None:
    """The same episodes with the same images, the same losses, the same weights."""
    rows = [
        [{k: row[k] for k in ("loss", "gradient_norm") if k in row} for row in found.run.metrics()]
        for found in (one, two)
    ]
    assert any(rows[0]) and len(rows[0]) == len(rows[1])
    for old, new in zip(*rows, strict=True):
        assert old == pytest.approx(new, rel=1e-5, abs=1e-5)
    played, same = (found.run.trajectories(3) for found in (one, two))
    assert any(t.sequences[0].media for t in played)
    for old, new in zip(played, same, strict=True):
        assert old.tokens == new.tokens
        assert old.sequences[0].media == new.sequences[0].media
    left, same_weights = weights(one.model), weights(two.model)
    assert left.keys() == same_weights.keys()
    for name, weight in left.items():
        assert float((weight - same_weights[name]).abs().max()) <= 1e-5, name


@pytest.mark.parametrize("vision", ["frozen", "trained"])
def test_vllm_servers_are_refused_with_what_to_use_instead(
    model: Path, tmp_path: Path, vision: str
) -> None:
    with pytest.raises(ConfigError, match=r"vLLM servers.*sample with cluster\.engines"):
        train(
            tmp_path / "run",
            {"name": str(model), "vision": vision},
            rl=RL,
            cluster={"servers": ["http://127.0.0.1:1"]},
        )


SAME = {"warm_start": WARM | {"optimizer": {"learning_rate": 1e-4}}, "demonstrations": expert}


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "cluster",
    [
        {"engines": 1},
        {"trainer_ranks": 2, "engines": 2},
        {"trainer_ranks": 2},
    ],
    ids=["engine", "ranks and engines", "ranks"],
)
def test_a_run_in_several_processes_is_the_same_run(
    model: Path, tmp_path: Path, cluster: dict[str, Any]
) -> None:
    """With a vision part that is trained: engines are given a new one after every step."""
    settings: dict[str, Any] = {
        **SAME,
        "rl": {**RL, "kl": 0.01, "optimizer": {"learning_rate": 1e-4}},
        "max_in_flight": 1,
    }
    source = {"name": str(model), "vision": "trained"}
    alone = train(tmp_path / "alone", source, **settings)
    several = train(tmp_path / "several", source, **settings, cluster={**cluster, "timeout": 60})
    assert_same_run(alone, several)
    before, after = weights(model), weights(several.model)
    moved = [name for name in before if not torch.equal(before[name], after[name])]
    assert any("projector" in name for name in moved) and any("vision" in name for name in moved)
    differences = [
        row["engine/canary_difference"] for row in several.run.metrics() if "engine/replicas" in row
    ]
    assert all(0 < one < 1e-5 for one in differences) and bool(differences) == ("engines" in cluster)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("family", ["llava", "qwen2_5_vl"])
def test_only_the_image_tells(tmp_path: Path, family: str) -> None:
    """Imitation, then RL; with grey screens in the place of coloured ones there is nothing to learn."""
    from colours import run

    def success(blank: bool) -> float:
        folder = tmp_path / str(blank)
        settings: dict[str, Any] = {"run": {"folder": str(folder / "run")}, "progress": False}
        found = run(folder, blank=blank, family=family, **settings)
        return float(list(found.success.values())[-1].removesuffix("%"))

    assert success(blank=False) >= 80
    assert success(blank=True) <= 45  # chance is 25%
