"""AdamW on float32 masters, from gradients and to weights of any floating format."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from ludus.kernels.device import trial_failure, unavailable


@dataclass(frozen=True, slots=True)
class AdamwTensors:
    """Some weights and what AdamW keeps of them, tensor by tensor; all contiguous."""

    masters: Sequence[Tensor]
    """Float32, as are the two moments and the steps."""
    means: Sequence[Tensor]
    squares: Sequence[Tensor]
    steps: Sequence[Tensor]
    """How many steps each has made, the one that is being made included."""
    gradients: Sequence[Tensor]
    """Gradients, all of one dtype."""
    weights: Sequence[Tensor]
    """Weights, all of one dtype. A float32 weight may be its own master."""
    decays: Tensor
    """The weight decay of each."""


@dataclass(frozen=True, slots=True)
class AdamwRule:
    """The numbers of a step."""

    rate: float
    betas: tuple[float, float]
    eps: float
    scale: Tensor
    """Divisor of the gradients, on the device."""
    sound: Tensor
    """int32, on the device; at 0 the step changes nothing."""


def adamw_step(tensors: AdamwTensors, rule: AdamwRule) -> None:
    """One step of all: masters and moments change in place, and each weight becomes its rounded master."""
    if unavailable(tensors.masters[0].device) is not None:
        return adamw_step_reference(tensors, rule)
    from ludus.kernels import triton_adamw

    lists = (
        tensors.masters, tensors.means, tensors.squares, tensors.gradients, tensors.weights, tensors.steps,
    )  # fmt: skip
    numbers = (tensors.decays, rule.scale, rule.sound)
    return triton_adamw.step(lists, *numbers, rate=rule.rate, betas=rule.betas, eps=rule.eps)


def adamw_step_reference(tensors: AdamwTensors, rule: AdamwRule) -> None:
    """`adamw_step` in plain torch."""
    if not bool(rule.sound):
        return
    beta1, beta2 = rule.betas
    kept = zip(tensors.masters, tensors.means, tensors.squares, tensors.steps, strict=True)
    for (master, mean, square, step), gradient, weight, decay in zip(
        kept, tensors.gradients, tensors.weights, tensors.decays, strict=True
    ):
        slope = gradient.float() / rule.scale
        mean.lerp_(slope, 1 - beta1)
        square.mul_(beta2).addcmul_(slope, slope, value=1 - beta2)
        spread = (square / (1 - beta2 ** step.double()).float()).sqrt_().add_(rule.eps)
        pace = (rule.rate / (1 - beta1 ** step.double())).float()
        master.mul_(1 - rule.rate * decay).sub_(pace * mean / spread)
        weight.copy_(master)


@cache
def adamw_unavailable(device: torch.device) -> str | None:
    """Why the kernel cannot be used on this device, after a trial; None when it can."""
    disagreement = "the kernel for AdamW gives other weights than plain arithmetic"
    return unavailable(device) or trial_failure(_adamw_agrees, device, disagreement)


def _adamw_agrees(device: torch.device) -> bool:
    """Whether two steps of a few numbers are what they should be."""
    generator = torch.Generator().manual_seed(0)
    start, slopes = ([torch.randn(size, generator=generator) for size in (5000, 3)] for _ in range(2))
    found = [
        _tried(adamw_step, start, slopes, device),
        _tried(adamw_step_reference, start, slopes, torch.device("cpu")),
    ]
    return all(
        torch.allclose(one, other, rtol=1e-4 if one.dtype == torch.float32 else 1e-2, atol=1e-5)
        for one, other in zip(*found, strict=True)
    )


def _tried(
    step: Callable[[AdamwTensors, AdamwRule], None],
    start: Sequence[Tensor],
    slopes: Sequence[Tensor],
    device: torch.device,
) -> list[Tensor]:
    """Masters, second moments and weights after two steps on a device."""
    masters = [tensor.to(device, copy=True) for tensor in start]
    means, squares = ([torch.zeros_like(master) for master in masters] for _ in range(2))
    tensors = AdamwTensors(
        masters=masters,
        means=means,
        squares=squares,
        steps=[torch.zeros((), device=device) for _ in start],
        gradients=[slope.to(device).bfloat16() for slope in slopes],
        weights=[master.bfloat16() for master in masters],
        decays=torch.tensor([0.1, 0.0], device=device),
    )
    scale, sound = torch.tensor(2.0, device=device), torch.ones((), dtype=torch.int32, device=device)
    for _ in range(2):
        torch._foreach_add_(list(tensors.steps), 1.0)
        step(tensors, AdamwRule(1e-2, (0.9, 0.99), 1e-8, scale, sound))
    return [tensor.cpu() for tensor in (*masters, *squares, *tensors.weights)]
