"""The reference model: the weights that a stage began with, for a KL penalty, DPO, or returning to them.

They are in a folder, because a resumed run has only later weights. Where there is an adapter, that is all that
the folder has, and the reference is the policy itself, read with the adapter as it was or with none.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn

from ludus.core.failures import LudusError
from ludus.model.image_features import forget_features
from ludus.training.models.adapter_reference import AdapterReference, ShardedAdapterReference
from ludus.training.optim.shard_files import read_shards, write_shards
from ludus.training.optim.sharding import group_of, local, named_weights

SYNCED = "reference.safetensors"
"""A reference that follows the policy, in a checkpoint."""


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
    """The tensors of a reference; None for a model without its adapter."""
    if isinstance(reference, AdapterReference):
        return reference.decoder.weights
    if isinstance(reference, ShardedAdapterReference):
        return reference.tensors()
    return {name: p.detach() for name, p in named_weights(reference)}
