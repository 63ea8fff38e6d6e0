"""A checkpoint: the model in Hugging Face format, beside it what the next step needs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from ludus.core.failures import LudusError
from ludus.observe import RunWriter
from ludus.rewards import Scorer
from ludus.rollouts.tokenizers import HFTokenizer
from ludus.training.learner import Learner
from ludus.training.models import without_bars

OPTIMIZER = "optimizer.pt"
REWARDS = "rewards.json"


def save_model(folder: Path, model: nn.Module, tokenizer: HFTokenizer) -> None:
    """Write a model and its tokenizer as Hugging Face's libraries read them."""
    module: Any = model
    try:
        with without_bars():
            module.save_pretrained(folder)
    except SafetensorError as error:
        raise LudusError(f"the model could not be written to {folder.parent}: {error}") from error
    tokenizer.inner.save_pretrained(folder)


def save_checkpoint(
    run: RunWriter,
    step: int,
    model: nn.Module,
    tokenizer: HFTokenizer,
    learner: Learner,
    scorer: Scorer,
) -> None:
    """Write everything that going on after `step` needs; the folder appears whole or not at all."""
    with run.checkpoint(step) as folder:
        save_model(folder, model, tokenizer)
        torch.save(learner.state_dict(), folder / OPTIMIZER)
        (folder / REWARDS).write_text(json.dumps(scorer.state_dict()), encoding="utf-8")


def load_state(folder: Path, learner: Learner, scorer: Scorer) -> None:
    """Put the optimizer, and the rewards that remember something, where a checkpoint left them."""
    state = torch.load(folder / OPTIMIZER, map_location=learner.device, weights_only=True)
    learner.load_state_dict(state)
    scorer.load_state_dict(json.loads((folder / REWARDS).read_text(encoding="utf-8")))
