"""Training attention: many sequences in one flat row of tokens, none of which sees another.

On a GPU in half precision it is one flash-attention kernel over cumulative lengths. Where that does not fit
(other devices and data types, windows, chunks, soft caps, sinks), sequences of similar length are padded
together into a few groups, so that hundreds of short ones cost a handful of kernel launches. Padding follows a
sequence's tokens, where causality hides it. Sequences that all have the same length need no padding.

The flash kernel is torch's own. It is called below its public wrapper (`torch.nn.attention.varlen`), whose
arguments differ between versions and which in some of them does not support grouped-query heads, although the
kernel does. At its first use on a device, for a data type and a head's shape, a few tokens go through it
forwards and backwards and are compared with plain attention. Nodes of a forest, which see their ancestors'
tokens too (`forest_attention.py`), are a probe of their own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ludus.kernels.device import arrays_to_device
from ludus.model.attention import (
    AttentionParams,
    LookAhead,
    attend,
    causal_mask,
    positional_mask,
    split_by_length,
)
from ludus.model.state_layers import StateCall

log = logging.getLogger(__name__)

HALF = (torch.bfloat16, torch.float16)
_PROBE_LENGTHS = (37, 5)
_FOREST_LENGTHS, _FOREST_PARENTS = (37, 5, 19, 3, 21), (-1, 0, 1, 0, -1)

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class KeyBounds:
    """The keys of packed sequences, where these are others than their own tokens'."""

    index: Tensor
    """[K] Their places among all tokens, sequence after sequence; a sequence's own tokens come last."""
    cu_seqlens: Tensor
    """[R + 1] Cumulative counts from 0 on, int32."""
    max_seqlen: int


@dataclass(frozen=True, slots=True)
class SequenceBounds:
    """Where packed sequences begin and end."""

    cu_seqlens: Tensor
    """[R + 1] Cumulative lengths from 0 on, int32."""
    max_seqlen: int
    keys: KeyBounds | None = None
    """Keys that the queries attend to; their own tokens alone when left out."""


def paths_of(lengths: Sequence[int], parents: Sequence[int]) -> list[Ints]:
    """The places of each node's tokens, behind those of its ancestors. A node without parent has -1."""
    ends = np.cumsum(lengths)
    paths: list[Ints] = []
    for node, (length, parent) in enumerate(zip(lengths, parents, strict=True)):
        if not -1 <= parent < node:
            raise ValueError(
                f"node {node} of a forest has the parent {parent}, which must come before it"
            )
        own = np.arange(ends[node] - length, ends[node])
        paths.append(own if parent < 0 else np.concatenate([paths[parent], own]))
    return paths


def bounds_of(
    lengths: Sequence[int], paths: Sequence[Ints] | None, device: torch.device
) -> SequenceBounds:
    """The bounds of sequences, or of a forest's nodes by their paths."""
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    if paths is None:
        return SequenceBounds(arrays_to_device([starts], device)[0], max(lengths))
    counts = [len(path) for path in paths]
    key_starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    queries, index, keys = (
        arrays_to_device([one], device)[0] for one in (starts, np.concatenate(paths), key_starts)
    )
    return SequenceBounds(queries, max(lengths), KeyBounds(index, keys, max(counts)))


Kernel = Callable[[Tensor, Tensor, Tensor, SequenceBounds, float], Tensor]
"""(query [T, Hq, D], key and value [T, Hkv, D], bounds, scaling) -> [T, Hq, D], causal and with a gradient."""


def flash(
    query_THD: Tensor, key_TGD: Tensor, value_TGD: Tensor, bounds: SequenceBounds, scaling: float
) -> Tensor:
    """Causal attention by torch's flash kernel, with grouped-query heads."""
    result: Tensor = _Flash.apply(query_THD, key_TGD, value_TGD, bounds, scaling)
    return result


def flash_expanded(
    query_THD: Tensor, key_TGD: Tensor, value_TGD: Tensor, bounds: SequenceBounds, scaling: float
) -> Tensor:
    """`flash` with a copy of its key head for each query head."""
    group = query_THD.shape[1] // key_TGD.shape[1]
    key, value = (states.repeat_interleave(group, dim=1) for states in (key_TGD, value_TGD))
    return flash(query_THD, key, value, bounds, scaling)


class _Flash(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, bounds: SequenceBounds, scaling: float
    ) -> Tensor:
        # where there are fewer queries than keys, the kernel's causal mask is aligned at their ends
        output, lse, state, unused, _ = torch.ops.aten._flash_attention_forward(
            query,
            _gathered(key, bounds),
            _gathered(value, bounds),
            *_kernel_bounds(bounds),
            0.0,
            True,
            False,
            scale=scaling,
        )
        ctx.save_for_backward(query, key, value, output, lse, state, unused)  # not the gathered copies
        ctx.bounds, ctx.scaling = bounds, scaling
        result: Tensor = output
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        query, key, value, output, lse, state, unused = ctx.saved_tensors
        dquery, dkey, dvalue = torch.ops.aten._flash_attention_backward(
            grads[0].contiguous(),
            query,
            _gathered(key, ctx.bounds),
            _gathered(value, ctx.bounds),
            output,
            lse,
            *_kernel_bounds(ctx.bounds),
            0.0,
            True,
            state,
            unused,
            scale=ctx.scaling,
        )
        count = len(key)
        return dquery, _summed(dkey, ctx.bounds, count), _summed(dvalue, ctx.bounds, count), None, None


def _kernel_bounds(bounds: SequenceBounds) -> tuple[Tensor, Tensor, int, int]:
    keys = bounds.keys or bounds
    return bounds.cu_seqlens, keys.cu_seqlens, bounds.max_seqlen, keys.max_seqlen


def _gathered(states: Tensor, bounds: SequenceBounds) -> Tensor:
    return states if bounds.keys is None else states.index_select(0, bounds.keys.index)


def _summed(slopes: Tensor, bounds: SequenceBounds, count: int) -> Tensor:
    """The gradient of `_gathered`: many descendants add to an ancestor's, so in float32."""
    if bounds.keys is None:
        return slopes
    total = torch.zeros(count, *slopes.shape[1:], dtype=torch.float32, device=slopes.device)
    return total.index_add_(0, bounds.keys.index, slopes.float()).to(slopes.dtype)


def kernel_for(
    query_THD: Tensor, key_TGD: Tensor, params: AttentionParams, longest: int, forest: bool = False
) -> Kernel | None:
    """The kernel for these states, or None where attention has to be computed in another way.

    In a `forest` sequences have ancestors.
    """
    if query_THD.device.type != "cuda" or query_THD.dtype not in HALF:
        return None
    if params.softcap is not None or params.sinks is not None or params.dropout > 0:
        return None
    if params.is_cut(longest):
        return None
    heads, size = query_THD.shape[1:]
    return probed_kernel(query_THD.device, query_THD.dtype, heads, key_TGD.shape[1], size, forest)


@cache
def probed_kernel(
    device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, size: int, forest: bool
) -> Kernel | None:
    """The flash kernel that is right on this device for heads of this shape; None where none is."""
    shape = (heads, kv_heads, size)
    return first_correct((flash, flash_expanded), device, dtype, *shape, forest=forest)


def first_correct(
    candidates: tuple[Kernel, ...],
    device: torch.device,
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    size: int,
    *,
    forest: bool = False,
) -> Kernel | None:
    """The first of these kernels that agrees with plain attention on a few tokens."""
    trouble = ""
    for candidate in candidates:
        try:
            trouble = _disagreement(candidate, device, dtype, (heads, kv_heads, size), forest)
        except torch.OutOfMemoryError:
            raise  # says nothing about the kernel
        except (RuntimeError, TypeError, ValueError, AttributeError) as error:
            trouble = f"{type(error).__name__}: {error}".splitlines()[0]
        if not trouble:
            return candidate
    log.warning(
        "flash attention over packed sequences%s is not available on %s for %d heads of %d in %s, so %s (%s)",
        " with shared prefixes" if forest else "",
        device,
        heads,
        size,
        str(dtype).removeprefix("torch."),
        "each row is computed with its whole prefix"
        if forest
        else "padded groups are used, which is slower",
        trouble,
    )
    return None


def _disagreement(
    kernel: Kernel,
    device: torch.device,
    dtype: torch.dtype,
    shape: tuple[int, int, int],
    forest: bool,
) -> str:
    """Compare a kernel's results with the reference; empty when they agree."""
    heads, kv_heads, size = shape
    lengths = _FOREST_LENGTHS if forest else _PROBE_LENGTHS
    paths = paths_of(lengths, _FOREST_PARENTS if forest else (-1, -1))
    generator = torch.Generator().manual_seed(0)
    total = sum(lengths)
    shapes = [
        (total, heads, size),
        (total, kv_heads, size),
        (total, kv_heads, size),
        (total, heads, size),
    ]
    scaling = size**-0.5
    with torch.inference_mode(False), torch.enable_grad():
        query, key, value, slope = (
            torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes
        )
        bounds = bounds_of(lengths, paths if forest else None, device)
        inputs = [states.detach().requires_grad_() for states in (query, key, value)]
        given = kernel(inputs[0], inputs[1], inputs[2], bounds, scaling)
        found = [given, *torch.autograd.grad(given, inputs, slope)]
        exact = [states.detach().float().requires_grad_() for states in (query, key, value)]
        pieces: list[Tensor] = []
        for path, length in zip(paths, lengths, strict=True):
            q, k, v = (states[torch.from_numpy(path)] for states in exact)
            pieces.append(_attend_one_sequence(q, k, v, scaling)[-length:])
        expected = torch.cat(pieces)
        wanted = [expected, *torch.autograd.grad(expected, exact, slope.float())]
    for name, one, other in zip(("output", "dq", "dk", "dv"), found, wanted, strict=True):
        distance = float((one.detach().float() - other.detach()).abs().max())
        if not distance <= 0.03 * max(1.0, float(other.detach().abs().max())):
            return f"its {name} is off by {distance:.2g}"
    return ""


def _attend_one_sequence(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    """One sequence, in the arithmetic of its own data type."""
    group = query.shape[1] // key.shape[1]
    key, value = (states.repeat_interleave(group, dim=1) for states in (key, value))
    batched = [states.transpose(0, 1)[None] for states in (query, key, value)]
    return attend(batched[0], batched[1], batched[2], AttentionParams(scaling), None)[0].transpose(0, 1)


_TILE = 256
_DENSE_ORDER = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]
# At most this fraction of a padded group is padding.
_PADDING = 0.15
# Most tokens of a padded group, to bound memory.
_GROUP_TOKENS = 1 << 16


@dataclass(frozen=True, slots=True)
class _PaddedSequences:
    """Sequences of similar length, side by side, padded at the end."""

    rows: int
    width: int
    index: Tensor
    """[rows * width] positions in the flat order; padding repeats a sequence's last token."""
    last: Tensor | None
    """[rows, width] the last position in its sequence that each query sees, where that is not its own."""
    masks: dict[object, Tensor] = field(default_factory=dict)

    def mask(self, params: AttentionParams) -> Tensor:
        """The mask where queries see what stands behind them."""
        assert self.last is not None
        if params.reach not in self.masks:
            positions = torch.arange(self.width, device=self.last.device)[None]
            self.masks[params.reach] = positional_mask(positions, self.width, params, self.last)
        return self.masks[params.reach]


class PackedContext:
    """Attention within each of the sequences that lie end to end in a batch of one row.

    Where images' tokens see each other (`ahead`), it is masked attention in padded groups on every device.
    """

    shares_tokens = False
    """Whether a token may belong to several sequences."""

    def __init__(
        self,
        lengths: Sequence[int],
        device: torch.device | str = "cpu",
        ahead: LookAhead | None = None,
    ) -> None:
        if not lengths or min(lengths) < 1:
            raise ValueError("packed sequences need lengths of at least 1")
        self.lengths = list(lengths)
        self.device = torch.device(device)
        self.tokens = sum(self.lengths)
        self.longest = max(self.lengths)
        self.are_even = min(self.lengths) == self.longest
        self.ahead = ahead
        self.calls = 0
        self.state_calls = 0
        self._masks: dict[tuple[int, object], Tensor] = {}

    @property
    def position_ids(self) -> Tensor:
        """[1, T]: positions counted within each sequence."""
        return self._there(np.concatenate([np.arange(length) for length in self.lengths]))[None]

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams
    ) -> Tensor:
        self.calls += 1
        if query.shape[0] != 1 or query.shape[2] != self.tokens:
            raise ValueError(
                f"the packed context is for [1, {self.tokens}] tokens, "
                f"not [{query.shape[0]}, {query.shape[2]}]"
            )
        flat = [states.squeeze(0).transpose(0, 1) for states in (query, key, value)]
        if self.ahead is not None and self.ahead.holds(params):
            return self._attend_in_groups(flat, params)
        # flash kernels take keys and values of one size
        is_square = key.shape[3] == value.shape[3]
        kernel = self._kernel(flat, params) if is_square else None
        if kernel is not None and self._fills_tiles:
            with sdpa_kernel(_DENSE_ORDER, set_priority=True):
                return self._attend_evenly(query, key, value, params)
        if kernel is not None:
            return kernel(flat[0], flat[1], flat[2], self._bounds, params.scaling).unsqueeze(0)
        if self.are_even:
            return self._attend_evenly(query, key, value, params)
        return self._attend_in_groups(flat, params)

    def run_state_layer(self, call: StateCall) -> Tensor:
        """Each sequence on its own: a state layer with padding behind the tokens, where it changes nothing."""
        self.state_calls += 1
        if self.are_even:
            return call.run(None, len(self.lengths), self.longest)[None]
        groups, back = self._groups
        joined = torch.cat([call.run(group.index, group.rows, group.width) for group in groups])
        return joined.index_select(0, back)[None]

    def _kernel(self, flat: Sequence[Tensor], params: AttentionParams) -> Kernel | None:
        return kernel_for(flat[0], flat[1], params, self.longest)

    @property
    def _fills_tiles(self) -> bool:
        """Whether dense kernels can take the rows as they are: all of one length, and that a round one.

        cuDNN's kernel is then 1.6 times as fast as the one for any lengths, but it is prepared for each shape
        that it meets, which takes a good part of a second: too long for lengths that never come again.
        """
        return self.are_even and self.longest % _TILE == 0

    def _attend_evenly(
        self, query: Tensor, key: Tensor, value: Tensor, params: AttentionParams
    ) -> Tensor:
        rows, width = len(self.lengths), self.longest
        padded = [
            states.squeeze(0).view(states.shape[1], rows, width, -1).transpose(0, 1)
            for states in (query, key, value)
        ]
        output = attend(padded[0], padded[1], padded[2], params, self._mask(width, params))
        return output.transpose(1, 2).reshape(1, self.tokens, *output.shape[1::2])

    def _attend_in_groups(self, flat: Sequence[Tensor], params: AttentionParams) -> Tensor:
        outputs: list[Tensor] = []
        groups, back = self._groups
        for group in groups:
            padded = [
                states.index_select(0, group.index)
                .view(group.rows, group.width, states.shape[1], states.shape[2])
                .transpose(1, 2)
                for states in flat
            ]
            sees_ahead = self.ahead is not None and self.ahead.holds(params)
            mask = group.mask(params) if sees_ahead else self._mask(group.width, params)
            output = attend(padded[0], padded[1], padded[2], params, mask)
            outputs.append(output.transpose(1, 2).reshape(-1, *output.shape[1::2]))
        joined = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return joined.index_select(0, back)[None]

    @cached_property
    def _bounds(self) -> SequenceBounds:
        return bounds_of(self.lengths, None, self.device)

    @cached_property
    def _groups(self) -> tuple[list[_PaddedSequences], Tensor]:
        """The padded groups, and where each flat token lies in their concatenation."""
        found = padded_groups(np.asarray(self.lengths, dtype=np.int64))
        groups = [
            _PaddedSequences(rows, width, self._there(index), self._last(rows, width, index))
            for rows, width, index, _ in found
        ]
        back = np.empty(self.tokens, dtype=np.int64)
        base = 0
        for rows, width, index, valid in found:
            back[index[valid]] = base + np.flatnonzero(valid)
            base += rows * width
        return groups, self._there(back)

    def _last(self, rows: int, width: int, index: Ints) -> Tensor | None:
        """Places of the last tokens that these see, counted in their sequences."""
        if self.ahead is None:
            return None
        ahead = (self.ahead.last_T[index] - index).reshape(rows, width)
        return self._there(ahead + np.arange(width))

    def _there(self, values: npt.NDArray[np.int64] | npt.NDArray[np.int32]) -> Tensor:
        """On the device; from pinned memory, because any other copy waits for the GPU to catch up."""
        return arrays_to_device([values], self.device)[0]

    def _mask(self, width: int, params: AttentionParams) -> Tensor | None:
        if not params.is_cut(width):
            return None
        if (width, params.reach) not in self._masks:
            self._masks[width, params.reach] = causal_mask(width, width, params, self.device)
        return self._masks[width, params.reach]


def padded_groups(lengths: Ints) -> list[tuple[int, int, Ints, npt.NDArray[np.bool_]]]:
    """(rows, width, flat index, validity) of each group, longest sequences first."""
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    order = np.argsort(-lengths, kind="stable")
    result = []
    for first, stop in split_by_length(lengths[order], _PADDING, _GROUP_TOKENS):
        chosen = order[first:stop]
        width = int(lengths[chosen[0]])
        offsets = np.arange(width)[None, :]
        last = lengths[chosen][:, None] - 1
        index = starts[chosen][:, None] + np.minimum(offsets, last)
        result.append((len(chosen), width, index.reshape(-1), (offsets <= last).reshape(-1)))
    return result
