"""A checkpoint: the model in Hugging Face format, or its adapter in peft's; and what the next step needs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from torch import nn

from ludus.core.failures import LudusError
from ludus.observe import RunWriter
from ludus.rewards import Scorer
from ludus.rollouts.tokenizers import HFTokenizer
from ludus.training.adapters import is_adapted, save_adapter
from ludus.training.learner import Learner
from ludus.training.pretrained import without_bars

OPTIMIZER = "optimizer.pt"
REWARDS = "rewards.json"
PROGRESS = "progress.json"


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run has come: steps in all, the stage it is in, and the steps of that stage that are done."""

    step: int = 0
    stage: int = 0
    done: int = 0


class UnsavedError(LudusError):
    """Something of a run could not be written."""


class Saves(Protocol):
    """Something with a state of its own in a checkpoint."""

    def save(self, folder: Path) -> None: ...


def save_model(folder: Path, model: nn.Module, tokenizer: HFTokenizer) -> None:
    """Write a model and its tokenizer as Hugging Face's libraries read them; of an adapted one, the adapter."""
    module: Any = model
    try:
        if is_adapted(model):
            save_adapter(folder, model)
        else:
            with without_bars():
                module.save_pretrained(folder)
    except SafetensorError as error:
        raise UnsavedError(f"the model could not be written to {folder.parent}: {error}") from error
    try:
        tokenizer.inner.save_pretrained(folder)
    except Exception as error:  # the library knows no narrower kind, for a full disk either
        raise UnsavedError(f"the tokenizer could not be written to {folder.parent}: {error}") from error


def save_checkpoint(
    run: RunWriter,
    progress: Progress,
    model: nn.Module,
    tokenizer: HFTokenizer,
    stage: Saves,
    rewards: str,
) -> None:
    """Write everything that going on needs; the folder appears whole or not at all."""
    with run.checkpoint(progress.step) as folder:
        save_model(folder, model, tokenizer)
        stage.save(folder)
        (folder / REWARDS).write_text(rewards, encoding="utf-8")
        (folder / PROGRESS).write_text(json.dumps(asdict(progress)), encoding="utf-8")


def load_progress(folder: Path) -> Progress:
    """How far the run had come."""
    return Progress(**json.loads((folder / PROGRESS).read_text(encoding="utf-8")))


def rewards_state(scorers: Mapping[str, Scorer]) -> str:
    """What the rewards that remember something have in mind now, by task set; written out, so that it stays."""
    return json.dumps({name: scorer.state_dict() for name, scorer in scorers.items()})


def load_rewards(folder: Path, scorers: Mapping[str, Scorer]) -> None:
    """Put the rewards that remember something where the checkpoint left them."""
    state = json.loads((folder / REWARDS).read_text(encoding="utf-8"))
    for name, scorer in scorers.items():
        scorer.load_state_dict(state[name])


def save_learner(folder: Path, learner: Learner) -> None:
    """Write an optimizer's state."""
    try:
        torch.save(learner.state_dict(), folder / OPTIMIZER)
    except RuntimeError as error:  # what torch makes of a full disk does not say so
        raise UnsavedError(
            f"the optimizer's state could not be written to {folder.parent}: {str(error).splitlines()[0]}"
        ) from error


def load_learner(folder: Path, learner: Learner) -> None:
    """Put an optimizer where a checkpoint left it."""
    state = torch.load(folder / OPTIMIZER, map_location=learner.device, weights_only=True)
    learner.load_state_dict(state)
