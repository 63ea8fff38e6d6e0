"""Triton kernel of `adamw`: AdamW over many tensors in one launch.

An optimizer's step reads and writes memory and does little else. Here each number makes the trip once: the
gradient in whatever format it has, the master weight and its two moments in float32, and out again with them
the master rounded to the weight's own format. Tensors are found by tables of their addresses; a program takes a
chunk of one of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

_CHUNK = 1 << 15
_BLOCK = 2048


@triton.jit
def _bias(step, log_beta):
    """1 - beta ** step, without losing digits where that is small."""
    x = step * log_beta
    near = -x * (1.0 + x * (0.5 + x * (1.0 / 6.0 + x * (1.0 / 24.0))))
    return tl.where(x > -0.05, near, 1.0 - tl.exp(x))


@triton.jit
def _address(TABLE, number, KIND: tl.constexpr, ALIGNED: tl.constexpr):
    pointer = tl.load(TABLE + number).to(tl.pointer_type(KIND))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _update(
    masters, means, squares, gradients, weights, at, inside,
    scale, rest1, beta2, rest2, shrink, pace, spread, eps,
):  # fmt: skip
    slope = tl.load(gradients + at, mask=inside).to(tl.float32) * scale
    mean = tl.load(means + at, mask=inside)
    square = tl.load(squares + at, mask=inside)
    master = tl.load(masters + at, mask=inside)
    mean += rest1 * (slope - mean)
    square = beta2 * square + rest2 * slope * slope
    master = master * shrink - pace * mean / (tl.sqrt(square) * spread + eps)
    tl.store(means + at, mean, mask=inside)
    tl.store(squares + at, square, mask=inside)
    tl.store(masters + at, master, mask=inside)
    tl.store(weights + at, master.to(weights.dtype.element_ty), mask=inside)


@triton.jit
def _step(
    TENSORS, OFFSETS, TABLE, SIZES, DECAYS, SCALE, SOUND, count, rate, eps,
    rest1, beta2, rest2, log_beta1, log_beta2,
    GRAD: tl.constexpr, WEIGHT: tl.constexpr, ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if tl.load(SOUND) == 0:
        return
    number = tl.load(TENSORS + tl.program_id(0))
    begin = tl.multiple_of(tl.load(OFFSETS + tl.program_id(0)), CHUNK)
    size = tl.load(SIZES + number)
    masters = _address(TABLE, number, tl.float32, ALIGNED)
    means = _address(TABLE + count, number, tl.float32, ALIGNED)
    squares = _address(TABLE + 2 * count, number, tl.float32, ALIGNED)
    gradients = _address(TABLE + 3 * count, number, GRAD, ALIGNED)
    weights = _address(TABLE + 4 * count, number, WEIGHT, ALIGNED)
    step = tl.load(tl.load(TABLE + 5 * count + number).to(tl.pointer_type(tl.float32)))
    shrink = 1.0 - rate * tl.load(DECAYS + number)
    pace = rate / _bias(step, log_beta1)
    spread = 1.0 / tl.sqrt(_bias(step, log_beta2))
    scale = 1.0 / tl.load(SCALE)
    for first in range(0, CHUNK, BLOCK):
        at = begin + first + tl.arange(0, BLOCK)
        # Without a mask where none is needed: memory is then read in pieces of 16 bytes.
        if begin + first + BLOCK <= size:
            _update(
                masters, means, squares, gradients, weights, at, None, scale,
                rest1, beta2, rest2, shrink, pace, spread, eps,
            )  # fmt: skip
        else:
            _update(
                masters, means, squares, gradients, weights, at, at < size, scale,
                rest1, beta2, rest2, shrink, pace, spread, eps,
            )  # fmt: skip


def _log(beta: float) -> float:
    return math.log(beta) if beta > 0 else -math.inf


@lru_cache(maxsize=8)
def _chunks(sizes: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Each chunk's tensor, and where in it the chunk begins; and the tensors' sizes."""
    counts = np.array([-(-size // _CHUNK) for size in sizes])
    tensors = np.repeat(np.arange(len(sizes), dtype=np.int32), counts)
    firsts = np.concatenate([np.arange(count) for count in counts]) * _CHUNK
    return (
        torch.from_numpy(tensors).to(device),
        torch.from_numpy(firsts.astype(np.int64)).to(device),
        torch.tensor(sizes, dtype=torch.int64, device=device),
    )


def step(
    tensors: Sequence[Sequence[Tensor]],
    decays: Tensor,
    scale: Tensor,
    sound: Tensor,
    *,
    rate: float,
    betas: tuple[float, float],
    eps: float,
) -> None:
    """One step in place of (masters, means, squares, gradients, weights, steps), all of them contiguous.

    Gradients are of one dtype, weights of one, and all the others float32.
    """
    masters, _, _, gradients, weights, _ = tensors
    device = masters[0].device
    owners, offsets, sizes = _chunks(tuple(master.numel() for master in masters), device)
    table = np.array([[tensor.data_ptr() for tensor in row] for row in tensors], dtype=np.int64)
    there = torch.from_numpy(table)
    if device.type == "cuda":
        there = there.pin_memory().to(device, non_blocking=True)
    kinds = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
    _step[(len(owners),)](
        owners, offsets, there, sizes, decays, scale, sound,
        len(masters), rate, eps, 1 - betas[0], betas[1], 1 - betas[1], *map(_log, betas),
        GRAD=kinds[gradients[0].dtype], WEIGHT=kinds[weights[0].dtype],
        ALIGNED=bool((table[:5] % 16 == 0).all()), CHUNK=_CHUNK, BLOCK=_BLOCK, num_warps=4,
    )  # fmt: skip
