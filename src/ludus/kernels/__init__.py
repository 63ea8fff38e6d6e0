"""Fused operations for sampling and training, as Triton kernels with plain-torch twins.

Each function is one of a model's operations over flat tokens, or its optimizer's step. On a GPU with Triton it
runs as one or two kernels; everywhere else it runs as the torch operations it stands for. `unavailable` says
which it will be.
"""

from ludus.kernels.adamw import AdamwRule, AdamwTensors, adamw_step, adamw_unavailable
from ludus.kernels.attention import paged_decode, paged_prefill
from ludus.kernels.gating import silu_mul
from ludus.kernels.linear import linear_float32
from ludus.kernels.logprobs import (
    kept_gradient,
    logit_gradient,
    summarise_and_keep,
    summarise_logits,
    token_logprobs,
)
from ludus.kernels.low_rank import low_rank_add, low_rank_distrusted
from ludus.kernels.norm import add_rms_norm, rms_norm
from ludus.kernels.rotary import rotate, rotate_and_store
from ludus.kernels.sampling import sample
from ludus.kernels.support import unavailable

__all__ = [
    "AdamwRule",
    "AdamwTensors",
    "adamw_step",
    "adamw_unavailable",
    "add_rms_norm",
    "kept_gradient",
    "linear_float32",
    "logit_gradient",
    "low_rank_add",
    "low_rank_distrusted",
    "paged_decode",
    "paged_prefill",
    "rms_norm",
    "rotate",
    "rotate_and_store",
    "sample",
    "silu_mul",
    "summarise_and_keep",
    "summarise_logits",
    "token_logprobs",
    "unavailable",
]
