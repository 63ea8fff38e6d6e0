"""Which runner serves a model: static steps where kernels and graphs can run, gathered pages elsewhere."""

from __future__ import annotations

import logging
from functools import cache

import torch
from torch import Tensor, nn

from ludus.engine.backbone import context_limit, sampling_mode
from ludus.engine.cuda.contexts import DecodeContext, PrefillContext
from ludus.engine.cuda.pages import FixedStore, PageShape
from ludus.engine.cuda.reserved import KeptMemory
from ludus.engine.cuda.runner import StaticRunner
from ludus.engine.dense import Rule
from ludus.engine.forward import hidden_states, stock_hidden_states
from ludus.engine.head import head_logits
from ludus.engine.memory import device_of, on_device
from ludus.engine.packed import PackedContext
from ludus.engine.probing import agree_up_to_rounding, computed_in_float32, probe_tokens
from ludus.engine.runner import Runner, StepRunner
from ludus.engine.stats import EngineStats
from ludus.engine.store import KvStore, PageMemory
from ludus.kernels import sample, unavailable

_log = logging.getLogger(__name__)

_WIDEST = 8192
"""Pages of a row's table at the start; it grows when a context does."""
_PROBE_LENGTHS = (6, 2, 8, 7, 4, 5, 3, 8)
"""Contexts that the paged kernels are tried on, each a prompt and one decoded token."""


def runner_for(
    model: nn.Module,
    pages: int,
    page_size: int,
    rows: int,
    stats: EngineStats,
    is_static: bool | None = None,
    lookahead: int | None = None,
) -> tuple[StepRunner, PageMemory]:
    """The runner and the memory of its pages; `is_static` and `lookahead` are the device's by default."""
    device = device_of(model)
    on_gpu = device.type == "cuda"
    if on_gpu if is_static is None else is_static:
        shape = usable_shape(model, page_size)
        if isinstance(shape, PageShape):
            store = FixedStore(shape, pages, page_size, device)
            tokens = min(context_limit(model) or pages * page_size, pages * page_size)
            width = min(-(-tokens // page_size), _WIDEST)
            ahead = int(on_gpu) if lookahead is None else lookahead
            runner = StaticRunner(model, store, rows=rows, width=width, stats=stats, lookahead=ahead)
            return runner, store
        _say(shape)
    plain = KvStore(pages, page_size)
    return Runner(model, plain), plain


def usable_shape(model: nn.Module, page_size: int) -> PageShape | str:
    """What every layer keeps of a token, once static steps have been tried; or why they will not do."""
    device = device_of(model)
    if device.type == "cuda" and (reason := unavailable(device)) is not None:
        return reason
    try:
        with on_device(device):
            shape = page_shape(model)
            if isinstance(shape, PageShape) and not _agrees(model, shape, page_size):
                return "the paged kernels give other hidden states than packed sequences for this model"
    except Exception as error:  # noqa: BLE001 - whatever breaks here would break every step
        return f"{type(error).__name__}: {error}"
    return shape


@cache
def _say(reason: str) -> None:
    _log.warning(
        "sampling without the GPU's kernels and graphs, which is several times slower: %s", reason
    )


class _ShapeProbe:
    """An attention context that notes what each layer would keep, and gives nothing back."""

    def __init__(self) -> None:
        self.found: dict[int, tuple[int, int, torch.dtype]] = {}
        self.has_other_values = False

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: Rule) -> Tensor:
        self.found[layer] = (key.shape[1], key.shape[3], key.dtype)
        self.has_other_values |= key.shape != value.shape
        return torch.zeros(
            1, query.shape[2], query.shape[1], value.shape[3], dtype=query.dtype, device=query.device
        )


def page_shape(model: nn.Module) -> PageShape | str:
    """What every layer keeps of a token, or why there is no such thing."""
    probe = _ShapeProbe()
    tokens = probe_tokens(model, 1)
    with torch.no_grad(), sampling_mode(model):
        hidden_states(model, tokens, torch.zeros_like(tokens), probe)
    kinds = set(probe.found.values())
    if len(kinds) != 1 or probe.has_other_values or set(probe.found) != set(range(len(probe.found))):
        return "the model's layers keep keys and values of different shapes"
    heads, size, dtype = kinds.pop()
    return PageShape(len(probe.found), heads, size, dtype)


def _agrees(model: nn.Module, shape: PageShape, page_size: int) -> bool:
    """Whether prompts and a decoded token of each give the same through pages as packed side by side."""
    device = device_of(model)
    rows, width = len(_PROBE_LENGTHS), -(-max(_PROBE_LENGTHS) // page_size)
    store = FixedStore(shape, rows * width, page_size, device, KeptMemory(device))
    store.regain()
    tables = torch.arange(rows * width, dtype=torch.int32, device=device).view(rows, width)
    packed = PackedContext(_PROBE_LENGTHS, device)
    tokens, positions = probe_tokens(model, packed.tokens), packed.position_ids[0]
    lengths = torch.tensor(_PROBE_LENGTHS, device=device)
    row_of = torch.repeat_interleave(torch.arange(rows, device=device), lengths)
    slots = row_of * (width * page_size) + positions
    is_last = positions == lengths[row_of] - 1
    prompts = (lengths - 1).int()
    starts = torch.cat([torch.zeros_like(prompts[:1]), prompts.cumsum(0).int()])
    with torch.no_grad(), sampling_mode(model):
        prefill = PrefillContext(store, slots[~is_last], tables, starts, prompts)
        decode = DecodeContext(store, slots[is_last], tables, lengths.int())
        given = torch.empty_like(stock := hidden_states(model, tokens, positions, packed))
        given[~is_last] = hidden_states(model, tokens[~is_last], positions[~is_last], prefill)
        given[is_last] = hidden_states(model, tokens[is_last], positions[is_last], decode)
        with computed_in_float32(model):
            exact = stock_hidden_states(model, tokens, positions, packed)
        logits = head_logits(model, given[is_last])
        ones = torch.ones(rows, device=device)
        drawn = sample(logits, ones, ones.double() * 0.5)
    agrees = all(
        agree_up_to_rounding(given[part], stock[part], exact[part]) for part in (is_last, ~is_last)
    )
    return agrees and bool(drawn[2].all())
