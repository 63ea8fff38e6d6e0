"""Linear layers over the same input, in as few products as they allow."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ludus.engine.fused.adapters import adapted, adapted_linear
from ludus.engine.fused.joining import can_join, joint_product
from ludus.kernels import low_rank_distrusted


def joint_linear(layers: Sequence[nn.Module], x_TD: Tensor) -> Tensor:
    """The outputs of several layers side by side, [T, sum of their widths]."""
    if len(layers) > 1 and can_join(layers):
        return joint_product(layers, x_TD)
    found = None if type(layers[0]) is nn.Linear and len(layers) == 1 else adapted(layers)
    if found is not None and not any(found.adapters):  # all of them are off
        return joint_linear(found.bases, x_TD)
    if found is not None and not low_rank_distrusted(x_TD.device):
        return adapted_linear(found, x_TD)
    if len(layers) > 1:
        return torch.cat([joint_linear([layer], x_TD) for layer in layers], dim=-1)
    result: Tensor = layers[0](x_TD)  # one plain layer, or one that computes in a way of its own
    return result
