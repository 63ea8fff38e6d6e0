"""The reference model: the weights that a stage began with, for a KL penalty, DPO, or returning to them.

They are in a folder, because a resumed run has only later weights. Where there is an adapter, that is all that
the folder has, and the reference needs no second copy of the base: it is the policy's own module with the
adapter off, or with the weights that the adapter had then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from ludus.core.failures import ConfigError, LudusError
from ludus.model import sampling_mode, unwrapped
from ludus.model.images import forget_features
from ludus.training.config.rl import ReferenceSyncConfig
from ludus.training.models.lora import adapter_parameters, read_weights, saved_name, splits_its_base
from ludus.training.optim.logprobs import compute
from ludus.training.optim.shard_files import read_shards, write_shards
from ludus.training.optim.sharding import (
    ShardedModel,
    group_of,
    local,
    module_of,
    named_weights,
    shard_of,
    sharded_like,
)

SYNCED = "reference.safetensors"
"""A reference that follows the policy, in a checkpoint."""


class AdapterReference(nn.Module):
    """The policy's module as it was at some time, to be read and never to be trained.

    It stands in for a model wherever log-probabilities are computed (`compute`). Of a sharded policy every rank
    holds its part of the adapter.
    """

    def __init__(self, policy: nn.Module, weights: Mapping[str, Tensor] | None) -> None:
        """`weights` are whole tensors by name; without them it is no adapter at all."""
        super().__init__()
        self.policy: Any = policy
        self.group = group_of(policy)
        self._parts: dict[str, Tensor] | None = None
        if weights is not None:
            self.follow(weights)

    def get_base_model(self) -> Any:
        return unwrapped(self.policy)

    def compute(self, function: Callable[..., Any], *args: Any) -> Any:
        """function(the policy, *args) with the adapter that this stands for; never with a gradient."""
        with torch.no_grad(), sampling_mode(self.policy), self._changed():
            return compute(self.policy, function, *args)

    @contextmanager
    def _changed(self) -> Iterator[None]:
        if self._parts is None:
            adapters: Any = module_of(self.policy).base_model
            adapters.disable_adapter_layers()
            try:
                yield
            finally:
                adapters.enable_adapter_layers()
            return
        named = [(p, self._parts[name]) for name, p in self._named()]
        if isinstance(self.policy, ShardedModel):  # what is gathered is read from the parameters' memory
            kept = [local(parameter).clone() for parameter, _ in named]
            for parameter, other in named:
                local(parameter).copy_(other)
            try:
                yield
            finally:
                for (parameter, _), own in zip(named, kept, strict=True):
                    local(parameter).copy_(own)
            return
        # the storage is exchanged, and not what is in it: a graph that waits for its backward pass finds its
        # own
        data = [parameter.data for parameter, _ in named]
        for parameter, other in named:
            parameter.data = other
        try:
            yield
        finally:
            for (parameter, _), own in zip(named, data, strict=True):
                parameter.data = own

    def _named(self) -> Iterator[tuple[str, nn.Parameter]]:
        return adapter_parameters(module_of(self.policy))

    @torch.no_grad()
    def follow(self, weights: Mapping[str, Tensor] | None = None) -> None:
        """Stand for the policy's adapter as it is now, or for these weights of it, which are whole."""
        self._parts = {
            name: (local(p) if weights is None else shard_of(weights[name], p)).to(p.device, copy=True)
            for name, p in self._named()
        }

    def tensors(self) -> dict[str, Tensor] | None:
        """The adapter that it stands for, of which every rank has its part; None for no adapter at all."""
        if self._parts is None:
            return None
        return {name: sharded_like(self._parts[name], p) for name, p in self._named()}


def adapter_reference(model: nn.Module, folder: Path, bare: bool) -> AdapterReference:
    """A model as it was when its adapter was saved in a folder, or with no adapter at all (`bare`)."""
    adapted: Any = module_of(model)
    settings = adapted.peft_config["default"]
    if bare and splits_its_base(settings):
        how = settings.init_lora_weights if isinstance(settings.init_lora_weights, str) else "KaSA"
        raise ConfigError(
            f'model.lora.reference = "base": this adapter began with {how}, and the '
            'base without it is not the model it was; use "start"'
        )
    start = saved_adapter(model, folder)
    zeros = ("lora_B", "lora_embedding_A")  # in a new adapter
    untrained = not any(bool(tensor.any()) for n, tensor in start.items() if any(z in n for z in zeros))
    return AdapterReference(model, None if bare or untrained else start)


def saved_adapter(model: nn.Module, folder: Path) -> dict[str, Tensor]:
    """The weights of a saved adapter by the names of a model's parameters, whole."""
    saved = read_weights(folder)
    return {
        name: saved[saved_name(name)].to(parameter.device, parameter.dtype)
        for name, parameter in adapter_parameters(module_of(model))
    }


def sync_if_due(reference: nn.Module, policy: nn.Module, sync: ReferenceSyncConfig, step: int) -> None:
    """After every `sync.every` steps, counted from 0: let the reference follow the policy."""
    if (step + 1) % sync.every == 0:
        sync_reference(reference, policy, sync.mixup_alpha)


@torch.no_grad()
def sync_reference(reference: nn.Module, policy: nn.Module, alpha: float) -> None:
    """reference = alpha * policy + (1 - alpha) * reference; of an adapter, the policy's as it is.

    Gorbatovski et al., "Learn Your Reference Model for Real Good Alignment", 2024, arXiv:2404.09656.
    """
    if isinstance(reference, AdapterReference):
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
    if isinstance(reference, AdapterReference):
        reference.follow()
    forget_features(reference)
    tensors = _reference_tensors(reference)
    assert tensors is not None
    read_shards(path, tensors)


def _reference_tensors(reference: nn.Module) -> Mapping[str, Tensor] | None:
    """The tensors of a reference; None for a model without its adapter."""
    if isinstance(reference, AdapterReference):
        return reference.tensors()
    return {name: p.detach() for name, p in named_weights(reference)}
