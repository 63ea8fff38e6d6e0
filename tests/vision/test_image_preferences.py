"""DPO and reward models learn from images: which answer is better, only the image tells."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from colours import COLOURS, make_model, screen, tasks

import ludus
from ludus.chat import Renderer, load_format
from ludus.core.messages import Media, Message
from ludus.model import use_ludus_attention
from ludus.training import Batch, load_model, logprobs_of
from ludus.training.config.run import ModelConfig
from ludus.training.data.conversations import trajectory_of
from ludus.training.reward_models import RewardModelConfig, fit_reward_model, load_reward_model

NAMES = list(COLOURS)
ASKED = "Which colour is the screen?"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("colours"))


def write_pairs(folder: Path, first: int, count: int) -> Path:
    """The colour that is on the screen against another one, which is the better answer to another screen."""
    rows = []
    for number in range(first, first + count):
        shown, other = NAMES[number % 4], NAMES[(number + 1 + number // 4 % 3) % 4]
        image = folder / f"{number}.png"
        image.write_bytes(screen(str(number), shown))
        asked = [{"type": "image", "path": image.name}, {"type": "text", "text": ASKED}]
        answers = {
            side: [{"role": "user", "content": asked}, {"role": "assistant", "content": name}]
            for side, name in (("chosen", shown), ("rejected", other))
        }
        rows.append(json.dumps(answers))
    path = folder / "pairs.jsonl"
    path.write_text("\n".join(rows))
    return path


def conversations(number: int) -> list[list[Message]]:
    """A screen that nobody has seen, and each colour as the answer."""
    image = Media.image(screen(f"new {number}", NAMES[number % 4]))
    asked = Message("user", f"\ufffc{ASKED}", media=(image,))
    return [[asked, Message("assistant", name)] for name in NAMES]


def accuracy(scores_NC: torch.Tensor) -> float:
    """How often the right one of the four colours has the highest score."""
    right_N = torch.arange(len(scores_NC)) % 4
    return float((scores_NC.argmax(1) == right_N).double().mean())


@pytest.mark.slow
def test_dpo_learns_from_images(model: Path, tmp_path: Path) -> None:
    def scores(folder: Path) -> torch.Tensor:
        policy, tokenizer = load_model(ModelConfig(name=str(folder), device="cpu"), 0)
        use_ludus_attention(policy)
        renderer = Renderer(tokenizer, load_format("hermes"))
        shown = [trajectory_of(one, renderer, ()) for n in range(24) for one in conversations(n)]
        batch = Batch.of(shown)
        logprobs_T = logprobs_of(policy, batch, 1.0, 4096)
        return torch.zeros(len(shown)).index_add(0, batch.trajectory_T, logprobs_T).reshape(24, 4)

    stage: dict[str, Any] = {
        "kind": "dpo",
        "pairs": str(write_pairs(tmp_path, 0, 64)),
        "steps": 60,
        "batch": 16,
        "beta": 0.3,
        "optimizer": {"learning_rate": 3e-3},
    }
    found = ludus.train(
        model={"name": str(model), "device": "cpu"},
        tasks=tasks(0, 2),
        stage=[stage],
        run={"folder": str(tmp_path / "run")},
        progress=False,
    )
    before, after = accuracy(scores(model)), accuracy(scores(found.model))
    assert before <= 0.5 and after >= 0.9, (before, after)


def test_a_reward_model_learns_from_images(model: Path, tmp_path: Path) -> None:
    config = RewardModelConfig.parse(
        {
            "model": {"name": str(model), "device": "cpu"},
            "steps": 60,
            "batch": 16,
            "held_out": 0.25,
            "optimizer": {"learning_rate": 3e-3},
        }
    )
    found = fit_reward_model(write_pairs(tmp_path, 0, 64), tmp_path / "reward", config)
    assert found.measured["overall"].value >= 0.9, found.measured
    made = load_reward_model(tmp_path / "reward", "cpu")
    told = made.score([one for n in range(24) for one in conversations(n)])
    scores_NC = torch.stack([one[-1, 0] for one in told]).reshape(24, 4)
    assert accuracy(scores_NC) >= 0.9
