"""AdamW on master weights: clip, step, round into the module. On a GPU, one kernel does it all.

Nothing here waits for the device: whether the gradient is finite is found out there, and a step that it would
spoil does nothing.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ludus.kernels import AdamwRule, AdamwTensors, adamw_step, adamw_unavailable
from ludus.kernels.device import on_device, sent
from ludus.training.master_weights import MasterWeights
from ludus.training.settings import OptimizerConfig

log = logging.getLogger(__name__)

Pairs = list[tuple[nn.Parameter, Tensor]]
"""Parameters and their gradients."""


class MasterAdamW(torch.optim.AdamW):
    """Its parameters are the masters of a module's weights, and it writes the weights as well."""

    def __init__(self, weights: Sequence[nn.Parameter], config: OptimizerConfig) -> None:
        self.masters = MasterWeights(weights)
        self._limit = config.max_gradient_norm
        matrices = [self.masters.of(p) for p in weights if p.ndim >= 2]
        vectors = [self.masters.of(p) for p in weights if p.ndim < 2]
        groups: list[dict[str, Any]] = [
            {"params": matrices, "weight_decay": config.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        device = weights[0].device if weights else torch.device("cpu")
        is_fused = device.type == "cuda" or None
        super().__init__(groups, lr=config.learning_rate, betas=config.betas, fused=is_fused)
        self._has_kernel = _kernel_runs(device)

    def set_rate(self, rate: float) -> None:
        """The learning rate from now on."""
        for group in self.param_groups:
            group["lr"] = rate

    @torch.no_grad()
    def update(self, gradients: Iterable[tuple[nn.Parameter, Tensor]]) -> Tensor:
        """One step against these gradients, clipped; their norm. Nothing happens if it is not finite."""
        pairs = list(gradients)
        norm = total_norm([gradient for _, gradient in pairs])
        if self._has_kernel and self._is_plain(pairs, norm.device):
            self._step_at_once(pairs, norm)
        else:
            self._step_in_turns(pairs, norm)
        return norm

    def _is_plain(self, pairs: Pairs, device: torch.device) -> bool:
        """Whether every tensor is where the kernel runs, and lies in memory as it reads."""
        return all(
            p.device == device and p.is_contiguous() and self.masters.of(p).is_contiguous()
            for p, _ in pairs
        )

    def _step_at_once(self, gradients: Pairs, norm: Tensor) -> None:
        decays = {id(p): group["weight_decay"] for group in self.param_groups for p in group["params"]}
        sound = norm.isfinite()
        one = sound.float()
        group = self.param_groups[0]
        rule = AdamwRule(
            rate=float(group["lr"]),
            betas=tuple(group["betas"]),
            eps=float(group["eps"]),
            scale=(norm / self._limit).clamp(min=1.0).float(),
            sound=sound.int(),
        )
        alike: dict[tuple[torch.dtype, torch.dtype], Pairs] = defaultdict(list)
        for parameter, gradient in gradients:
            alike[gradient.dtype, parameter.dtype].append((parameter, gradient.contiguous()))
        for pairs in alike.values():
            masters = [self.masters.of(parameter) for parameter, _ in pairs]
            kept = [self._kept(master) for master in masters]
            steps = [state["step"] for state in kept]
            # a list of one tensor rather than the tensor, whose value torch would wait for
            torch._foreach_add_(steps, [one] * len(steps))
            own = np.array([decays[id(master)] for master in masters], dtype=np.float32)
            tensors = AdamwTensors(
                masters=masters,
                means=[state["exp_avg"] for state in kept],
                squares=[state["exp_avg_sq"] for state in kept],
                steps=steps,
                gradients=[gradient for _, gradient in pairs],
                weights=[parameter.detach() for parameter, _ in pairs],
                decays=sent([own], norm.device)[0],
            )
            adamw_step(tensors, rule)

    def _kept(self, master: Tensor) -> dict[str, Tensor]:
        """The optimizer's state of a master, made at its first step."""
        state: dict[str, Tensor] = self.state[master]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=master.device)
            state["exp_avg"] = torch.zeros_like(master)
            state["exp_avg_sq"] = torch.zeros_like(master)
        return state

    def _step_in_turns(self, pairs: Pairs, norm: Tensor) -> None:
        """By torch's own operations: its step, and the rounding after it. The pairs are used up."""
        self.zero_grad(set_to_none=True)
        leaves: list[Tensor] = []
        while pairs:  # each gradient goes when its float32 copy is there
            parameter, gradient = pairs.pop()
            leaf = self.masters.of(parameter)
            leaf.grad = gradient.float()
            leaves.append(leaf)
            del gradient
        if self.param_groups[0]["fused"]:
            # the kernel divides by the scale, and does nothing where it is told of an infinity
            own: Any = self
            own.grad_scale = (norm / self._limit).clamp(min=1.0).float()
            own.found_inf = (~norm.isfinite()).float()
            self.step()
        elif math.isfinite(float(norm)):
            nn.utils.clip_grads_with_norm_(leaves, self._limit, norm)
            self.step()
        self.masters.write()


def total_norm(tensors: Iterable[Tensor]) -> Tensor:
    """The length of all tensors together, in float32 whatever they are, and where the first of them is."""
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        alike[tensor.device, tensor.dtype].append(tensor)
    norms = [n for group in alike.values() for n in torch._foreach_norm(group, 2.0, dtype=torch.float32)]
    if not norms:
        return torch.zeros(())
    together: Tensor = torch.linalg.vector_norm(torch.stack([n.to(norms[0].device) for n in norms]))
    return together


@cache
def _kernel_runs(device: torch.device) -> bool:
    """Whether there is one; the reason is told once if there is none on a GPU."""
    if device.type != "cuda":
        return False
    with on_device(device):
        reason = adamw_unavailable(device)
    if reason is not None:
        log.warning("the optimizer's step is made by torch's own kernels: %s", reason)
    return reason is None
