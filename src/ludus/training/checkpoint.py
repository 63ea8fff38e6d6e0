"""A checkpoint: the model in Hugging Face format, or its adapter in peft's; and what the next step needs."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from ludus.chat.tokenizers import HFTokenizer
from ludus.core.failures import ConfigError, LudusError
from ludus.core.messages import Json
from ludus.model import images_of, use_ludus_attention
from ludus.model.image_features import forget_features
from ludus.observe import RunWriter, atomic_directory
from ludus.rewards import Scorer
from ludus.training.config.model import ModelConfig
from ludus.training.config.rl import RLConfig
from ludus.training.models.adapter_reference import (
    AdapterReference,
    ShardedAdapterReference,
    adapter_reference,
)
from ludus.training.models.gguf import without_progress_bars
from ludus.training.models.loading import load_model
from ludus.training.models.lora import is_adapted, save_adapter
from ludus.training.optim.learner import Learner, frozen
from ludus.training.optim.shard_files import read_shards, write_shards
from ludus.training.optim.sharding import ShardedModel, group_of, local, named_weights

if TYPE_CHECKING:
    from ludus.training.run_context import RunContext

OPTIMIZER = "optimizer.safetensors"
STAGE = "stage.json"
REWARDS = "rewards.json"
PROGRESS = "progress.json"


@dataclass(frozen=True, slots=True)
class RunProgress:
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
            with without_progress_bars():
                module.save_pretrained(folder)
    except SafetensorError as error:
        raise UnsavedError(f"the model could not be written to {folder.parent}: {error}") from error
    try:
        tokenizer.inner.save_pretrained(folder)
        if (images := images_of(model)) is not None:
            images.save(folder)
    except Exception as error:  # the library knows no narrower kind, for a full disk either
        raise UnsavedError(f"the tokenizer could not be written to {folder.parent}: {error}") from error


def save_checkpoint(
    run: RunWriter,
    progress: RunProgress,
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


def load_progress(folder: Path) -> RunProgress:
    """How far the run had come."""
    return RunProgress(**json.loads((folder / PROGRESS).read_text(encoding="utf-8")))


def rewards_state(scorers: Mapping[str, Scorer]) -> str:
    """What the rewards that remember something have in mind now, by task set; written out, so that it stays."""
    return json.dumps({name: scorer.state_dict() for name, scorer in scorers.items()})


def load_rewards(folder: Path, scorers: Mapping[str, Scorer]) -> None:
    """Put the rewards that remember something where the checkpoint left them."""
    state = json.loads((folder / REWARDS).read_text(encoding="utf-8"))
    for name, scorer in scorers.items():
        scorer.load_state_dict(state[name])


def save_learner(folder: Path, learner: Learner, state: Json | None = None) -> None:
    """Write an optimizer's state, and what else of a stage can be written as JSON."""
    if state is not None and learner.group.rank == 0:
        (folder / STAGE).write_text(json.dumps(state), encoding="utf-8")
    try:
        learner.save(folder / OPTIMIZER)
    except (RuntimeError, SafetensorError) as error:  # what they make of a full disk does not say so
        raise UnsavedError(
            f"the optimizer's state could not be written to {folder.parent}: {str(error).splitlines()[0]}"
        ) from error


def load_learner(folder: Path, learner: Learner) -> Json:
    """Put an optimizer where a checkpoint left it, and give the stage's other state back."""
    learner.load(folder / OPTIMIZER)
    path = folder / STAGE
    state: Json = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return state


# The reference model: the weights that a stage started from, for a KL penalty, DPO, or returning to them.

SYNCED = "reference.safetensors"
"""A reference that follows the policy, in a checkpoint."""


def load_reference_model(context: RunContext, folder: Path, is_resumed: bool) -> nn.Module:
    """The weights as they were when the stage began, sharded as the policy is."""
    start = load_start(context, folder, is_resumed)
    if isinstance(start, AdapterReference):
        return start if context.ranks.size == 1 else _sharded_adapter(context, start)
    return context.ranks.shard(start)


def _sharded_adapter(context: RunContext, start: AdapterReference) -> nn.Module:
    policy, weights = context.policy, start.decoder.weights
    assert isinstance(policy, ShardedModel)
    given = None if weights is None else {name: tensor.cpu() for name, tensor in weights.items()}
    return context.ranks.make(ShardedAdapterReference, policy, given)


def load_start(context: RunContext, folder: Path, is_resumed: bool) -> nn.Module:
    """The weights as they were when the stage began, as a whole.

    They are written down then, because a resumed run has only later weights. Where there is an adapter, that is
    all that is written, and the reference is the model itself, read with the adapter as it was or with none.
    """
    settings = context.recipe.model
    is_new = not folder.exists()
    if is_new and is_resumed:
        raise ConfigError(
            f"{folder} is gone, which held the weights that this stage began with: put it back, or begin a new "
            "run whose model is the last checkpoint's folder"
        )
    if is_new:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with atomic_directory(folder) as temporary:
            save_model(temporary, context.model, context.tokenizer)
    if is_adapted(context.model):
        bare = settings.lora is not None and settings.lora.reference == "base"
        return adapter_reference(context.model, folder, bare)
    if is_new:
        return frozen(copy.deepcopy(context.model))
    config = ModelConfig(name=str(folder), dtype=settings.dtype, device=settings.device)
    model, _ = load_model(config, context.recipe.seed)
    use_ludus_attention(model)
    return frozen(model)


def check_sync(context: RunContext, config: RLConfig) -> None:
    """Refuse what a reference made of an adapter cannot do, before anything is played."""
    if config.reference_sync is None or not is_adapted(context.model):
        return
    lora = context.recipe.model.lora
    if lora is not None and lora.reference == "base":
        raise ConfigError(
            'reference_sync lets the reference follow the policy, and model.lora.reference = "base" keeps it '
            'at the model without its adapter: leave out reference_sync, or set model.lora.reference = "start"'
        )
    if config.reference_sync.mixup_alpha != 1:
        raise ConfigError(
            f"reference_sync.mixup_alpha = {config.reference_sync.mixup_alpha:g}: a mixture of two adapters is "
            "no adapter of the same rank (their matrices are multiplied); set mixup_alpha = 1, which copies "
            "the policy's, or train all weights"
        )


@torch.no_grad()
def sync_reference(reference: nn.Module, policy: nn.Module, alpha: float) -> None:
    """reference = alpha * policy + (1 - alpha) * reference; of an adapter, the policy's as it is.

    Gorbatovski et al., "Learn Your Reference Model for Real Good Alignment", 2024, arXiv:2404.09656.
    """
    if isinstance(reference, AdapterReference | ShardedAdapterReference):
        reference.follow()
        return
    forget_features(reference)
    for own, other in zip(reference.parameters(), policy.parameters(), strict=True):
        local(own).lerp_(local(other), alpha)


def save_synced(folder: Path, reference: nn.Module) -> None:
    """Write a reference that may have moved into a checkpoint; of a sharded one, each rank its parts."""
    tensors = _reference_tensors(reference)
    followed = {"followed": str(tensors is not None)}
    write_shards(folder / SYNCED, tensors or {}, group_of(reference), followed)


def load_synced(folder: Path, reference: nn.Module) -> None:
    """Put a reference where the checkpoint left it."""
    path = folder / SYNCED
    if not path.is_file():
        raise LudusError(f"{folder} has no {SYNCED}: it was written by a stage without reference_sync")
    with safe_open(str(path), "pt") as opened:
        if opened.metadata()["followed"] != str(True):
            return  # it stands for no adapter at all
    if isinstance(reference, AdapterReference | ShardedAdapterReference):
        reference.follow()
    forget_features(reference)
    tensors = _reference_tensors(reference)
    assert tensors is not None
    read_shards(path, tensors)


def _reference_tensors(reference: nn.Module) -> Mapping[str, Tensor] | None:
    """What a reference stands for; None for a model without its adapter."""
    if isinstance(reference, AdapterReference):
        return reference.decoder.weights
    if isinstance(reference, ShardedAdapterReference):
        return reference.tensors()
    return {name: p.detach() for name, p in named_weights(reference)}
