"""A trial of the paged kernels on a model, before the engine uses them for it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ludus.engine.embedded.cuda.kv_cache import FixedMemory, KVShape, StaticKVCache
from ludus.engine.embedded.paged_attention import DecodeContext, PrefillContext
from ludus.kernels import sample_at_temperature, unavailable
from ludus.kernels.device import on_device
from ludus.model.attention import AttentionParams
from ludus.model.forward import head_logits, hidden_states, stock_hidden_states
from ludus.model.hf_model import device_of, sampling_mode
from ludus.model.packed_attention import PackedContext
from ludus.model.probes import agree_up_to_rounding, computed_in_float32, probe_tokens

_PAGED_LENGTHS = (6, 2, 8, 7, 4, 5, 3, 8)
"""Contexts that the paged kernels are tried on, each a prompt and one decoded token."""


def usable_kv_shape(model: nn.Module, block_size: int) -> KVShape | str:
    """The KV shape of the model, after a trial of the kernels; or why they cannot be used."""
    device = device_of(model)
    if device.type == "cuda" and (reason := unavailable(device)) is not None:
        return reason
    try:
        with on_device(device):
            shape = kv_shape(model)
            if isinstance(shape, KVShape) and not _paged_kernels_agree(model, shape, block_size):
                return "the paged kernels give other hidden states than packed sequences for this model"
    except Exception as error:  # noqa: BLE001 - whatever breaks here would break every step
        return f"{type(error).__name__}: {error}"
    return shape


class _ShapeProbe:
    """An attention context that records the shape of each layer's keys, and returns zeros."""

    def __init__(self) -> None:
        self.found: dict[int, tuple[int, int, torch.dtype]] = {}
        self.has_other_values = False

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams
    ) -> Tensor:
        self.found[layer] = (key.shape[1], key.shape[3], key.dtype)
        self.has_other_values |= key.shape != value.shape
        return torch.zeros(
            1, query.shape[2], query.shape[1], value.shape[3], dtype=query.dtype, device=query.device
        )


def kv_shape(model: nn.Module) -> KVShape | str:
    """The KV shape of all layers, or why they have no common one."""
    probe = _ShapeProbe()
    tokens = probe_tokens(model, 1)
    with torch.no_grad(), sampling_mode(model):
        hidden_states(model, tokens, torch.zeros_like(tokens), probe)
    kinds = set(probe.found.values())
    if len(kinds) != 1 or probe.has_other_values or set(probe.found) != set(range(len(probe.found))):
        return "the model's layers have keys and values of different shapes"
    heads, size, dtype = kinds.pop()
    return KVShape(len(probe.found), heads, size, dtype)


def _paged_kernels_agree(model: nn.Module, shape: KVShape, block_size: int) -> bool:
    """Whether prefill and one decoded token through blocks agree with packed attention."""
    device = device_of(model)
    rows, width = len(_PAGED_LENGTHS), -(-max(_PAGED_LENGTHS) // block_size)
    kv_cache = StaticKVCache(shape, rows * width, block_size, device, FixedMemory(device))
    kv_cache.acquire()
    block_tables = torch.arange(rows * width, dtype=torch.int32, device=device).view(rows, width)
    packed = PackedContext(_PAGED_LENGTHS, device)
    tokens, positions = probe_tokens(model, packed.tokens), packed.position_ids[0]
    lengths = torch.tensor(_PAGED_LENGTHS, device=device)
    row_of = torch.repeat_interleave(torch.arange(rows, device=device), lengths)
    slots = row_of * (width * block_size) + positions
    is_last = positions == lengths[row_of] - 1
    prompts = (lengths - 1).int()
    starts = torch.cat([torch.zeros_like(prompts[:1]), prompts.cumsum(0).int()])
    with torch.no_grad(), sampling_mode(model):
        prefill = PrefillContext(kv_cache, slots[~is_last], block_tables, starts, prompts)
        decode = DecodeContext(kv_cache, slots[is_last], block_tables, lengths.int())
        given = torch.empty_like(stock := hidden_states(model, tokens, positions, packed))
        given[~is_last] = hidden_states(model, tokens[~is_last], positions[~is_last], prefill)
        given[is_last] = hidden_states(model, tokens[is_last], positions[is_last], decode)
        with computed_in_float32(model):
            exact = stock_hidden_states(model, tokens, positions, packed)
        logits = head_logits(model, given[is_last])
        ones = torch.ones(rows, device=device)
        drawn = sample_at_temperature(logits, ones, ones.double() * 0.5)
    agrees = all(
        agree_up_to_rounding(given[part], stock[part], exact[part]) for part in (is_last, ~is_last)
    )
    return agrees and bool(drawn[2].all())
