"""How many tokens a micro-batch may have, and in how many layers activation checkpointing is on.

What a forward pass keeps for the backward pass is measured once, on a few tokens: it depends on the
architecture, the data type, the kernels and on what is trained. Smaller micro-batches cost next to nothing as
long as they keep the device busy; below that, as many layers as needed are computed again in the backward pass,
which costs up to a third more time.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from ludus.kernels import free_memory
from ludus.model import (
    PackedContext,
    checkpointable_layers,
    checkpointed_layers,
    decoder_of,
    hidden_states,
    sampling_mode,
    set_activation_checkpointing,
    unwrapped,
)
from ludus.training.optim.logprobs import chunk_bytes, compute, kept_bytes
from ludus.training.optim.sharding import ShardedModel, group_of, local

log = logging.getLogger(__name__)

BUSY_TOKENS = 4096
"""Micro-batches of so many tokens keep a large device busy; smaller ones are worth checkpointing to avoid."""
_GIB = 1 << 30
_USABLE = 0.92  # of free memory: the rest is lost between blocks
_PROBE_LENGTHS = (32, 32)


@dataclass(frozen=True, slots=True)
class ActivationCosts:
    """Bytes that a forward pass keeps, for each of its tokens."""

    layers: int
    full: int
    """In a layer."""
    kept: int
    """In a layer with activation checkpointing."""


@dataclass(frozen=True, slots=True)
class MicroBatchPlan:
    tokens: int
    """In a micro-batch."""
    checkpointed: int
    """Layers with activation checkpointing."""


def plan_micro_batches(limit: int, longest: int, room: int, costs: ActivationCosts) -> MicroBatchPlan:
    """No checkpointing where that leaves micro-batches large enough to be fast.

    Args:
        limit: The most tokens a micro-batch may have; a longer row travels alone.
        longest: The longest row.
        room: Bytes for what a pass keeps, and for what its backward pass makes in a layer meanwhile.
        costs: What a token takes.
    """
    layers, full, kept = costs.layers, costs.full, costs.kept
    wanted = max(longest, min(limit, BUSY_TOKENS))
    tokens = room // max(1, (layers + 1) * full)
    if tokens >= wanted:
        return MicroBatchPlan(min(limit, tokens), 0)
    missing = wanted * (layers + 1) * full - room
    checkpointed = math.ceil(missing / max(1, wanted * (full - kept)))
    if checkpointed <= layers:
        return MicroBatchPlan(min(limit, wanted), checkpointed)
    tokens = room // max(1, layers * kept + full)
    return MicroBatchPlan(max(1, min(limit, tokens)), layers)


class MemoryBudget:
    """Plans the micro-batches of one model."""

    def __init__(self, model: nn.Module, setting: float | Literal["auto"]) -> None:
        self._model = model
        self._setting = setting
        self._costs: ActivationCosts | None = None
        self._least_checkpointed = 0

    def plan(self, limit: int, longest: int) -> int:
        """The tokens of a micro-batch; turns activation checkpointing on in as many layers as needed.

        Ranks plan alike, by what the one with the least memory has.
        """
        room = self._room()
        if room is None:
            return limit
        room = group_of(self._model).least(room)
        if self._costs is None:
            self._costs = measure(self._model)
        if self._costs.layers == 0:
            return limit
        plan = plan_micro_batches(limit, longest, room, self._costs)
        checkpointed = max(plan.checkpointed, self._least_checkpointed)
        if checkpointed != checkpointed_layers(self._model):
            log.info("activation checkpointing in %d of %d layers", checkpointed, self._costs.layers)
            set_activation_checkpointing(self._model, checkpointed)
        return plan.tokens

    def checkpoint_all_layers(self) -> bool:
        """From now on checkpoint all layers; false if that is so already, or cannot be."""
        layers = _layers(self._model)
        if layers == 0 or checkpointed_layers(self._model) >= layers:
            return False
        log.warning(
            "a single row does not fit into memory, so all layers are computed again in the backward pass "
            "(activation checkpointing) from now on, which takes about a third more time"
        )
        self._least_checkpointed = layers
        set_activation_checkpointing(self._model, layers)
        return True

    def _room(self) -> int | None:
        """Bytes for activations; None where there is nothing to plan by."""
        if _layers(self._model) == 0:
            return None
        if self._setting != "auto":
            return int(self._setting * _GIB)
        device = next(self._model.parameters()).device
        if device.type != "cuda":
            return None
        free, _ = free_memory(device)
        gradients = sum(4 * local(p).numel() for p in self._model.parameters() if p.requires_grad)
        taken = gradients + _head_bytes(self._model) + _gathered_bytes(self._model)
        return max(0, int(_USABLE * free) - taken)


def measure(model: nn.Module) -> ActivationCosts:
    """Measure the bytes that a forward pass keeps for each token, in a layer on average."""
    layers, checkpointed = _layers(model), checkpointed_layers(model)
    kept: dict[int, int] = {}
    alive: list[object] = []  # so that no two have one address

    def note(tensor: Tensor) -> Tensor:
        if isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter):
            return tensor
        storage = tensor.untyped_storage()
        kept[storage._cdata] = storage.nbytes()
        alive.append(storage)
        return tensor

    device = next(model.parameters()).device
    context = PackedContext(_PROBE_LENGTHS, device)
    tokens = torch.zeros(sum(_PROBE_LENGTHS), dtype=torch.long, device=device)
    set_activation_checkpointing(model, 0)
    try:
        with (
            torch.enable_grad(),
            sampling_mode(model),
            torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor),
        ):
            states = compute(model, _states, tokens, context)
    finally:
        set_activation_checkpointing(model, checkpointed)
        if isinstance(model, ShardedModel):
            model.reset()  # this pass has no backward
    for tensor in (*model.parameters(), *model.buffers()):  # where a first pass may have moved them
        kept.pop(local(tensor).untyped_storage()._cdata, None)
    width = states.shape[-1] * states.element_size()
    full = sum(kept.values()) // (len(tokens) * max(1, layers))
    # the layer's input, and the residual where a forward hands that on beside it
    return ActivationCosts(layers, max(full, 2 * width), 2 * width)


def _states(model: nn.Module, tokens: Tensor, context: PackedContext) -> Tensor:
    return hidden_states(model, tokens, context.position_ids, context).clone()  # FSDP warns of views


def _layers(model: nn.Module) -> int:
    """The layers that can be checkpointed; 0 for a model without a decoder of its own."""
    inner = unwrapped(model)
    return checkpointable_layers(model) if getattr(inner, "trunk", inner) is not None else 0


def _gathered_bytes(model: nn.Module) -> int:
    """Bytes of a sharded model's gathered parameters: the root's own, and two layers."""
    if not isinstance(model, ShardedModel):
        return 0
    layers: list[int] = [
        sum(p.numel() * p.element_size() for p in layer.parameters())
        for layer in getattr(decoder_of(model), "layers", ())
    ]
    everything: int = sum(p.numel() * p.element_size() for p in model.parameters())
    return everything - sum(layers) + 2 * max(layers, default=0)


def _head_bytes(model: nn.Module) -> int:
    """Bytes of the head meanwhile: a chunk of logits, what it keeps, its gradient in float32 and rounded."""
    device = next(model.parameters()).device
    config = decoder_of(model).config.get_text_config()
    weights = int(config.vocab_size) * int(config.hidden_size)
    return chunk_bytes(device) + kept_bytes(device) + 6 * weights
