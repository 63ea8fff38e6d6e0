"""Logits as float32 products; log-probabilities and entropies of their rows, their gradient, and sampling."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ludus.kernels.device import unavailable

_HALF = (torch.bfloat16, torch.float16)


def linear_float32(x_TD: Tensor, weight_VD: Tensor) -> Tensor:
    """x weight^T in float32 [T, V].

    Matrix units sum in float32 anyway; logits rounded to bf16 afterwards would be off by up to 0.03 at a
    magnitude of 10, which is more than all else together.
    """
    if x_TD.device.type == "cuda" and x_TD.dtype in _HALF and weight_VD.dtype == x_TD.dtype:
        return torch.mm(x_TD, weight_VD.t(), out_dtype=torch.float32)
    return x_TD.float() @ weight_VD.float().t()


def token_logprobs(logits_cV: Tensor, tokens_c: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """(log-probability of each row's token, entropy of each row) at a temperature, in float32."""
    logprobs, entropies = _TokenLogprobs.apply(logits_cV, tokens_c, temperature)
    return logprobs, entropies


def summarise_logits(logits_cV: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """(log of the sum of exponentials, entropy) of logits / temperature, in float32; without a gradient."""
    if unavailable(logits_cV.device) is None:
        from ludus.kernels import triton_logprobs

        return triton_logprobs.summarise(logits_cV, temperature)[:2]
    _, lse_c, entropies_c, _ = _summarise_reference(logits_cV, temperature)
    return lse_c, entropies_c


def summarise_and_keep(
    logits_cV: Tensor, temperature: float, kept_cV: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """`summarise_logits` of rows whose `kept_gradient` is wanted later, and the shifts for it.

    `kept_cV`, which is contiguous, gets the exponentials of the logits of each block (a stretch of a row),
    relative to the block's highest. Times the exponential of the block's shift [c, B], they are probabilities.
    """
    if unavailable(logits_cV.device) is None:
        from ludus.kernels import triton_logprobs

        return triton_logprobs.summarise(logits_cV, temperature, kept_cV)
    exponentials_cV, lse_c, entropies_c, shifts_cB = _summarise_reference(logits_cV, temperature)
    kept_cV.copy_(exponentials_cV)
    return lse_c, entropies_c, shifts_cB


def _summarise_reference(logits_cV: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(exponentials below each row's highest, log of their sum, entropy, shift); a row is one block here."""
    scaled_cV = logits_cV.float() / temperature
    top_c = scaled_cV.amax(1)
    below_cV = scaled_cV - top_c[:, None]  # large logits would cost the entropy its digits
    exponentials_cV = below_cV.exp()
    log_mass_c = exponentials_cV.sum(1).log()
    weights_cV = (below_cV - log_mass_c[:, None]).exp()
    mean_c = torch.where(weights_cV > 0, weights_cV * below_cV, 0.0).sum(1)
    return exponentials_cV, top_c + log_mass_c, log_mass_c - mean_c, -log_mass_c[:, None]


def logit_gradient(
    logits_cV: Tensor,
    tokens_c: Tensor,
    temperature: float,
    summary: tuple[Tensor, Tensor],
    dlogprobs_c: Tensor,
    dentropies_c: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """The gradient of the logits [c, V], given `summarise_logits` of them and the gradients of both results."""
    lse_c, entropies_c = summary
    if unavailable(logits_cV.device) is None:
        from ludus.kernels import triton_logprobs

        return triton_logprobs.gradient(
            logits_cV, tokens_c, temperature, lse_c, entropies_c, dlogprobs_c, dentropies_c, dtype
        )
    logp_cV = logits_cV.float() / temperature - lse_c[:, None]
    p_cV = logp_cV.exp()
    grad_cV = -dlogprobs_c[:, None] * p_cV
    grad_cV.scatter_add_(1, tokens_c[:, None], dlogprobs_c[:, None].to(grad_cV.dtype))
    spread_cV = torch.where(p_cV > 0, p_cV * (logp_cV + entropies_c[:, None]), 0.0)
    return ((grad_cV - dentropies_c[:, None] * spread_cV) / temperature).to(dtype)


def kept_gradient(
    kept_cV: Tensor, shifts_cB: Tensor, tokens_c: Tensor, temperature: float, dlogprobs_c: Tensor
) -> Tensor:
    """The gradient of logits from what `summarise_and_keep` kept, for a loss of log-probabilities alone.

    It takes their place in memory. A probability in half precision is off by a few thousandths of itself, as
    its gradient is anyway; but not one above a half, which is its block's highest and has kept an exact 1. What
    is left to certainty, all there is of a confident token's gradient, so keeps its digits.
    """
    if unavailable(kept_cV.device) is None:
        from ludus.kernels import triton_logprobs

        return triton_logprobs.kept_gradient(kept_cV, shifts_cB, tokens_c, temperature, dlogprobs_c)
    slope_cV = -kept_cV.float() * shifts_cB.exp()
    slope_cV.scatter_add_(1, tokens_c[:, None], torch.ones_like(slope_cV[:, :1]))
    return kept_cV.copy_(dlogprobs_c[:, None] * slope_cV / temperature)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, tokens: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        lse, entropies = summarise_logits(logits, temperature)
        ctx.save_for_backward(logits, tokens, lse, entropies)
        ctx.temperature = temperature
        chosen = logits.gather(1, tokens[:, None])[:, 0].float() / temperature
        return chosen - lse, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        logits, tokens, lse, entropies = ctx.saved_tensors
        gradient = logit_gradient(
            logits,
            tokens,
            ctx.temperature,
            (lse, entropies),
            grads[0].contiguous(),
            grads[1].contiguous(),
            logits.dtype,
        )
        return gradient, None, None


def sample_at_temperature(
    logits_RV: Tensor, temperatures_R: Tensor, uniform_R: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(tokens, log-probabilities, whether finite) of R rows.

    A row's uniform number (float64, in [0, 1)) is inverted through its cumulative distribution at its
    temperature; at temperature 0 the likeliest token is taken and its log-probability is that at temperature 1.
    A row whose logits hold a NaN or no finite maximum is not finite, and its token is meaningless.
    """
    if unavailable(logits_RV.device) is None:
        from ludus.kernels import triton_logprobs

        return triton_logprobs.sample_at_temperature(logits_RV, temperatures_R, uniform_R)
    logits_RV = logits_RV.float()
    is_greedy_R = temperatures_R == 0
    divisor_R1 = torch.where(is_greedy_R, torch.ones_like(temperatures_R), temperatures_R)[:, None]
    scaled_RV = (logits_RV - logits_RV.amax(1, keepdim=True)) / divisor_R1
    logprobs_RV = scaled_RV.log_softmax(1)
    cumulative_RV = logprobs_RV.exp().double().cumsum(1)
    targets_R1 = uniform_R.double()[:, None] * cumulative_RV[:, -1:]
    sampled_R = torch.searchsorted(cumulative_RV, targets_R1, right=True)[:, 0]
    tokens_R = torch.where(is_greedy_R, logits_RV.argmax(1), sampled_R).clamp(max=logits_RV.shape[1] - 1)
    values_R = logprobs_RV.gather(1, tokens_R[:, None])[:, 0]
    return tokens_R, values_R, torch.isfinite(values_R)
