"""Products whose results are not rounded to the operands' format."""

from __future__ import annotations

import torch
from torch import Tensor

_HALF = (torch.bfloat16, torch.float16)


def linear_float32(x_TD: Tensor, weight_VD: Tensor) -> Tensor:
    """x weight^T in float32 [T, V].

    Matrix units sum in float32 anyway; logits rounded to bf16 afterwards would be off by up to 0.03 at a
    magnitude of 10, which is more than all else together.
    """
    if x_TD.device.type == "cuda" and x_TD.dtype in _HALF and weight_VD.dtype == x_TD.dtype:
        return torch.mm(x_TD, weight_VD.t(), out_dtype=torch.float32)
    return x_TD.float() @ weight_VD.float().t()
