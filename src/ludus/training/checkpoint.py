"""A checkpoint: the model in Hugging Face format, or its adapter in peft's; and what the next step needs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from safetensors import SafetensorError
from torch import nn

from ludus.chat.tokenizers import HFTokenizer
from ludus.core.messages import Json
from ludus.model import images_of
from ludus.observe import RunWriter
from ludus.rewards import Scorer
from ludus.training.models.sharded import save_policy
from ludus.training.optim.shard_files import UnsavedError

if TYPE_CHECKING:
    from ludus.training.run_context import RunContext

STAGE = "stage.json"
REWARDS = "rewards.json"
PROGRESS = "progress.json"


@dataclass(frozen=True, slots=True)
class RunProgress:
    """How far a run has come: steps in all, the stage it is in, and the steps of that stage that are done."""

    step: int = 0
    stage: int = 0
    done: int = 0


class Saves(Protocol):
    """Something with a state of its own in a checkpoint."""

    def save(self, folder: Path) -> None: ...


def save_model(folder: Path, model: nn.Module, tokenizer: HFTokenizer) -> None:
    """Write a model and its tokenizer as Hugging Face's libraries read them; of an adapted one, the adapter."""
    with unsaved_at(folder):
        save_policy(folder, model)
    save_tokenizer(folder, model, tokenizer)


def save_tokenizer(folder: Path, model: nn.Module, tokenizer: HFTokenizer) -> None:
    """Write what turns text and images into what a model reads."""
    try:
        tokenizer.inner.save_pretrained(folder)
        if (images := images_of(model)) is not None:
            images.save(folder)
    except Exception as error:  # the library knows no narrower kind, for a full disk either
        raise UnsavedError(f"the tokenizer could not be written to {folder.parent}: {error}") from error


@contextmanager
def unsaved_at(folder: Path) -> Iterator[None]:
    """Context of writing weights: adds the folder to an error of the library."""
    try:
        yield
    except SafetensorError as error:
        raise UnsavedError(f"the model could not be written to {folder.parent}: {error}") from error


def save_checkpoint(
    run: RunWriter, progress: RunProgress, context: RunContext, stage: Saves, rewards: str
) -> None:
    """Write everything that going on needs; the folder appears whole or not at all."""
    with run.checkpoint(progress.step) as folder:
        context.save_policy(folder)
        stage.save(folder)
        (folder / REWARDS).write_text(rewards, encoding="utf-8")
        (folder / PROGRESS).write_text(json.dumps(asdict(progress)), encoding="utf-8")


def load_progress(folder: Path) -> RunProgress:
    """How far the run had come."""
    return RunProgress(**json.loads((folder / PROGRESS).read_text(encoding="utf-8")))


def rewards_state(scorers: Mapping[str, Scorer]) -> str:
    """State of the rewards that have one, by task set, as text."""
    return json.dumps({name: scorer.state_dict() for name, scorer in scorers.items()})


def load_rewards(folder: Path, scorers: Mapping[str, Scorer]) -> None:
    """Put the rewards that remember something where the checkpoint left them."""
    state = json.loads((folder / REWARDS).read_text(encoding="utf-8"))
    for name, scorer in scorers.items():
        scorer.load_state_dict(state[name])


def save_state(folder: Path, state: Json) -> None:
    """Write what of a stage is not in tensors."""
    (folder / STAGE).write_text(json.dumps(state), encoding="utf-8")


def load_state(folder: Path) -> Json:
    """Read the file of `save_state`."""
    state: Json = json.loads((folder / STAGE).read_text(encoding="utf-8"))
    return state
