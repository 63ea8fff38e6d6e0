"""Flash attention over sequences that lie end to end, none of which sees another.

The kernel is torch's own. It is called below its public wrapper (`torch.nn.attention.varlen`), whose
arguments differ between versions and which in some of them knows no grouped heads, although the kernel does.
What works is found out by trying: at its first use on a device, for a data type and a head's shape, a few
tokens go through it forwards and backwards and are compared with plain attention.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ludus.engine.dense import Rule, attend

log = logging.getLogger(__name__)

_HALF = (torch.bfloat16, torch.float16)
_PROBE_LENGTHS = (37, 5)


@dataclass(frozen=True, slots=True)
class Bounds:
    """Where sequences begin and end."""

    starts_R1: Tensor
    """Cumulative lengths from 0 on, int32."""
    longest: int


Kernel = Callable[[Tensor, Tensor, Tensor, Bounds, float], Tensor]
"""(query [T, Hq, D], key and value [T, Hkv, D], bounds, scaling) -> [T, Hq, D], causal and with a gradient."""


def flash(
    query_THD: Tensor, key_TGD: Tensor, value_TGD: Tensor, bounds: Bounds, scaling: float
) -> Tensor:
    """Causal attention by torch's flash kernel, which takes fewer key heads than query heads."""
    result: Tensor = _Flash.apply(query_THD, key_TGD, value_TGD, bounds, scaling)
    return result


def flash_expanded(
    query_THD: Tensor, key_TGD: Tensor, value_TGD: Tensor, bounds: Bounds, scaling: float
) -> Tensor:
    """The same with a copy of its key head for each query head."""
    group = query_THD.shape[1] // key_TGD.shape[1]
    key, value = (states.repeat_interleave(group, dim=1) for states in (key_TGD, value_TGD))
    return flash(query_THD, key, value, bounds, scaling)


class _Flash(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, bounds: Bounds, scaling: float
    ) -> Tensor:
        starts, longest = bounds.starts_R1, bounds.longest
        output, lse, state, unused, _ = torch.ops.aten._flash_attention_forward(
            query, key, value, starts, starts, longest, longest, 0.0, True, False, scale=scaling
        )
        ctx.save_for_backward(query, key, value, output, lse, state, unused)
        ctx.bounds, ctx.scaling = bounds, scaling
        result: Tensor = output
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        query, key, value, output, lse, state, unused = ctx.saved_tensors
        starts, longest = ctx.bounds.starts_R1, ctx.bounds.longest
        slopes = torch.ops.aten._flash_attention_backward(
            grads[0].contiguous(),
            query,
            key,
            value,
            output,
            lse,
            starts,
            starts,
            longest,
            longest,
            0.0,
            True,
            state,
            unused,
            scale=ctx.scaling,
        )
        return *slopes, None, None


def kernel_for(query_THD: Tensor, key_TGD: Tensor, rule: Rule, longest: int) -> Kernel | None:
    """The kernel for these states, or None where attention has to be computed in another way."""
    if query_THD.device.type != "cuda" or query_THD.dtype not in _HALF:
        return None
    if rule.softcap is not None or rule.dropout > 0:
        return None
    if rule.window is not None and rule.window < longest:
        return None
    heads, size = query_THD.shape[1:]
    return _probed(query_THD.device, query_THD.dtype, heads, key_TGD.shape[1], size)


@cache
def _probed(
    device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, size: int
) -> Kernel | None:
    return first_sound((flash, flash_expanded), device, dtype, heads, kv_heads, size)


def first_sound(
    candidates: tuple[Kernel, ...],
    device: torch.device,
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    size: int,
) -> Kernel | None:
    """The first of these kernels that gives on a few tokens what plain attention gives."""
    trouble = ""
    for candidate in candidates:
        try:
            trouble = _compare(candidate, device, dtype, heads, kv_heads, size)
        except torch.OutOfMemoryError:
            raise  # says nothing about the kernel
        except (RuntimeError, TypeError, ValueError, AttributeError) as error:
            trouble = f"{type(error).__name__}: {error}".splitlines()[0]
        if not trouble:
            return candidate
    log.warning(
        "flash attention over packed sequences is not available on %s for %d heads of %d in %s, so padded "
        "blocks are used, which is slower (%s)",
        device,
        heads,
        size,
        str(dtype).removeprefix("torch."),
        trouble,
    )
    return None


def _compare(
    kernel: Kernel, device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, size: int
) -> str:
    """What is wrong with a kernel's results; nothing when they are right."""
    generator = torch.Generator().manual_seed(0)
    total = sum(_PROBE_LENGTHS)
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
        starts = torch.tensor([0, *_PROBE_LENGTHS]).cumsum(0)
        bounds = Bounds(starts.to(device, torch.int32), max(_PROBE_LENGTHS))
        inputs = [states.detach().requires_grad_() for states in (query, key, value)]
        given = kernel(inputs[0], inputs[1], inputs[2], bounds, scaling)
        found = [given, *torch.autograd.grad(given, inputs, slope)]
        exact = [states.detach().float().requires_grad_() for states in (query, key, value)]
        pieces = [torch.split(states, list(_PROBE_LENGTHS)) for states in exact]
        expected = torch.cat([_plain(q, k, v, scaling) for q, k, v in zip(*pieces, strict=True)])
        wanted = [expected, *torch.autograd.grad(expected, exact, slope.float())]
    for name, one, other in zip(("output", "dq", "dk", "dv"), found, wanted, strict=True):
        distance = float((one.detach().float() - other.detach()).abs().max())
        if not distance <= 0.03 * max(1.0, float(other.detach().abs().max())):
            return f"its {name} is off by {distance:.2g}"
    return ""


def _plain(query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    """One sequence, in the arithmetic of its own data type."""
    group = query.shape[1] // key.shape[1]
    key, value = (states.repeat_interleave(group, dim=1) for states in (key, value))
    batched = [states.transpose(0, 1)[None] for states in (query, key, value)]
    return attend(batched[0], batched[1], batched[2], Rule(scaling), None)[0].transpose(0, 1)
