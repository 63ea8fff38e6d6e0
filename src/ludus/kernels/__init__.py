"""Fused operations for sampling and training, as Triton kernels with plain-torch twins.

Each function is one of a model's operations over flat tokens, or its optimizer's step. On a GPU with Triton it
runs as one or two kernels; everywhere else it runs as the torch operations it stands for. `unavailable` says
which it will be.
"""

from ludus.kernels.adamw import AdamwRule, AdamwTensors, adamw_step, adamw_unavailable
from ludus.kernels.attention import paged_decode, paged_prefill
from ludus.kernels.device import (
    arrays_to_device,
    free_cached_memory,
    free_memory,
    is_out_of_memory,
    on_device,
    unavailable,
)
from ludus.kernels.layers import (
    add_rms_norm,
    low_rank_add,
    low_rank_unusable,
    rms_norm,
    rotate,
    rotate_and_store,
    silu_mul,
)
from ludus.kernels.logprobs import (
    kept_gradient,
    linear_float32,
    logit_gradient,
    sample_at_temperature,
    summarise_and_keep,
    summarise_logits,
    token_logprobs,
)

__all__ = [
    "AdamwRule",
    "AdamwTensors",
    "adamw_step",
    "adamw_unavailable",
    "add_rms_norm",
    "arrays_to_device",
    "free_cached_memory",
    "free_memory",
    "is_out_of_memory",
    "kept_gradient",
    "linear_float32",
    "logit_gradient",
    "low_rank_add",
    "low_rank_unusable",
    "on_device",
    "paged_decode",
    "paged_prefill",
    "rms_norm",
    "rotate",
    "rotate_and_store",
    "sample_at_temperature",
    "silu_mul",
    "summarise_and_keep",
    "summarise_logits",
    "token_logprobs",
    "unavailable",
]
