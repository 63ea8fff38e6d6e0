"""Root-mean-square norm of rows, with the residual added on the way, forward and backward."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ludus.kernels.support import next_power_of_2

# Programs that share the rows of a backward pass: each keeps its own sum for the weight's gradient.
_BACKWARD_PROGRAMS = 528


@triton.jit
def _forward(X, RES, W, OUT, SUM, RSTD, width, eps, HAS_RES: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < width
    x = tl.load(X + row * width + at, mask=inside, other=0.0).to(tl.float32)
    if HAS_RES:
        x += tl.load(RES + row * width + at, mask=inside, other=0.0).to(tl.float32)
        # The sum is rounded before it is normed, as two separate operations would do.
        rounded = x.to(SUM.dtype.element_ty)
        tl.store(SUM + row * width + at, rounded, mask=inside)
        x = rounded.to(tl.float32)
    rstd = tl.rsqrt(tl.sum(x * x) / width + eps)
    tl.store(RSTD + row, rstd)
    weight = tl.load(W + at, mask=inside, other=0.0).to(tl.float32)
    normed = (x * rstd).to(OUT.dtype.element_ty).to(tl.float32)
    tl.store(OUT + row * width + at, (normed * weight).to(OUT.dtype.element_ty), mask=inside)


@triton.jit
def _backward(
    GRAD, GRAD_SUM, X, W, RSTD, DX, DW, NORMED, rows, width,
    HAS_SUM: tl.constexpr, AGAIN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    inside = at < width
    weight = tl.load(W + at, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for number in range(first, rows, tl.num_programs(0)):
        row = tl.full((), 0, tl.int64) + number
        x = tl.load(X + row * width + at, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(GRAD + row * width + at, mask=inside, other=0.0).to(tl.float32)
        rstd = tl.load(RSTD + row)
        unit = x * rstd
        total += grad * unit
        weighted = grad * weight
        dx = (weighted - unit * (tl.sum(weighted * unit) / width)) * rstd
        if HAS_SUM:
            dx += tl.load(GRAD_SUM + row * width + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(DX + row * width + at, dx.to(DX.dtype.element_ty), mask=inside)
        if AGAIN:
            kind = NORMED.dtype.element_ty
            normed = unit.to(kind).to(tl.float32) * weight
            tl.store(NORMED + row * width + at, normed.to(kind), mask=inside)
    tl.store(DW + first * width + at, total, mask=inside)


def forward(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """(normed, sum, rstd) of contiguous [T, D]; the sum is `x` itself without a residual."""
    rows, width = x.shape
    out = torch.empty_like(x)
    total = torch.empty_like(x) if residual is not None else x
    rstd = torch.empty(rows, dtype=torch.float32, device=x.device)
    block = next_power_of_2(width)
    if rows:
        _forward[(rows,)](
            x,
            residual if residual is not None else x,
            weight,
            out,
            total,
            rstd,
            width,
            eps,
            HAS_RES=residual is not None,
            BLOCK=block,
            num_warps=_warps(block),
        )
    return out, total, rstd


def backward(
    grad: Tensor,
    grad_sum: Tensor | None,
    x: Tensor,
    weight: Tensor,
    rstd: Tensor,
    normed: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(dx, dweight); `grad_sum` is what reaches the sum by other ways and is added to dx.

    With `normed`, what `forward` gave is written into it once more.
    """
    rows, width = x.shape
    dx = torch.empty_like(x)
    programs = max(1, min(rows, _BACKWARD_PROGRAMS))
    partial = torch.empty(programs, width, dtype=torch.float32, device=x.device)
    block = next_power_of_2(width)
    _backward[(programs,)](
        grad,
        grad_sum if grad_sum is not None else grad,
        x,
        weight,
        rstd,
        dx,
        partial,
        normed if normed is not None else dx,
        rows,
        width,
        HAS_SUM=grad_sum is not None,
        AGAIN=normed is not None,
        BLOCK=block,
        num_warps=_warps(block),
    )
    return dx, partial.sum(0).to(weight.dtype)


def _warps(block: int) -> int:
    return max(1, min(16, block // 256))
