"""AdamW on master weights: learning-rate schedule, clip, step, round into the module (one kernel on a GPU).

Nothing here waits for the device: whether the gradient is finite is found out there, and a step that it would
spoil does nothing.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ludus.kernels import (
    AdamwRule,
    AdamwTensors,
    adamw_step,
    adamw_unavailable,
    arrays_to_device,
    on_device,
)
from ludus.training.config.stages import OptimizerConfig
from ludus.training.optim.sharding import ALONE, RankGroup, local

log = logging.getLogger(__name__)

_SCHEDULES: dict[str, Callable[[float], float]] = {
    "constant": lambda progress: 1.0,
    "linear": lambda progress: 1.0 - 0.9 * progress,
    "cosine": lambda progress: 0.1 + 0.45 * (1 + math.cos(math.pi * progress)),
}
"""Learning-rate schedules: the share of the peak, by the share of the steps after the warm-up that are done."""


def lr_factor(step: int, total: int, config: OptimizerConfig) -> float:
    """The share of the peak learning rate at a step: a linear warm-up, then the schedule."""
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    progress = min(1.0, (step - config.warmup_steps) / max(1, total - config.warmup_steps))
    return _SCHEDULES[config.schedule](progress)


Pairs = list[tuple[nn.Parameter, Tensor]]
"""Parameters and their gradients."""


class MasterAdamW(torch.optim.AdamW):
    """Its parameters are the masters of a module's weights, and it writes the weights as well.

    Of sharded weights it knows a rank's own part alone, as plain tensors: AdamW is elementwise. Only the norm
    is that of all parts.
    """

    def __init__(
        self, weights: Sequence[nn.Parameter], config: OptimizerConfig, group: RankGroup = ALONE
    ) -> None:
        self.masters = MasterWeights(weights)
        self._group = group
        self._limit = config.max_gradient_norm
        matrices = [self.masters.of(p) for p in weights if p.ndim >= 2]
        vectors = [self.masters.of(p) for p in weights if p.ndim < 2]
        groups: list[dict[str, Any]] = [
            {"params": matrices, "weight_decay": config.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        device = weights[0].device if weights else torch.device("cpu")
        is_fused = device.type == "cuda" or None
        super().__init__(groups, lr=config.peak_rate, betas=config.betas, fused=is_fused)
        self._device = device
        self._has_kernel = _kernel_runs(device)

    def set_rate(self, rate: float) -> None:
        """The learning rate from now on."""
        for group in self.param_groups:
            group["lr"] = rate

    @torch.no_grad()
    def update(self, gradients: Iterable[tuple[nn.Parameter, Tensor]]) -> Tensor:
        """One step against these gradients, clipped; their norm. Nothing happens if it is not finite."""
        pairs = list(gradients)
        norm = self._group.norm(total_norm([gradient for _, gradient in pairs]), self._device)
        if self._has_kernel and self._is_plain(pairs, norm.device):
            self._step_at_once(pairs, norm)
        else:
            self._step_in_turns(pairs, norm)
        return norm

    def _is_plain(self, pairs: Pairs, device: torch.device) -> bool:
        """Whether every tensor is where the kernel runs, and lies in memory as it reads."""
        return all(
            p.device == device and local(p).is_contiguous() and self.masters.of(p).is_contiguous()
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
            if gradient.numel() == 0:  # a rank may have nothing of a small tensor
                continue
            alike[gradient.dtype, parameter.dtype].append((parameter, gradient.contiguous()))
        for pairs in alike.values():
            masters = [self.masters.of(parameter) for parameter, _ in pairs]
            kept = [self.state_of(master) for master in masters]
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
                weights=[local(parameter).detach() for parameter, _ in pairs],
                decays=arrays_to_device([own], norm.device)[0],
            )
            adamw_step(tensors, rule)

    def state_of(self, master: Tensor) -> dict[str, Tensor]:
        """The optimizer's state of a master, made when it is first asked for."""
        state: dict[str, Tensor] = self.state[master]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=master.device)
            state["exp_avg"] = torch.zeros_like(master)
            state["exp_avg_sq"] = torch.zeros_like(master)
        return state

    def adopt_state(self) -> None:
        """After something has been read into the tensors that `state_of` gave: they are the state itself."""

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
            # the kernel divides by the scale, and does nothing at an infinity
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
    """Whether there is one; the reason is logged once if there is none on a GPU."""
    if device.type != "cuda":
        return False
    with on_device(device):
        reason = adamw_unavailable(device)
    if reason is not None:
        log.warning("the optimizer's step is made by torch's own kernels: %s", reason)
    return reason is None


_HALF = (torch.bfloat16, torch.float16)


class MasterWeights:
    """Float32 master copies of half-precision weights, which the optimizer updates instead.

    bf16 has 8 bits of precision: an update smaller than about a 500th of a weight is rounded away, and at the
    learning rates of fine-tuning nearly all of them are. After a step the masters are rounded into the module's
    own storage, in place, so that captured graphs read the new weights. Float32 parameters are their own
    masters.

    Where the module was changed in place meanwhile (by loading other weights, say), the module's value is the
    truth, and the master starts again from it. Changes through `parameter.data`, which torch does not
    count, are not seen, and the next step undoes them.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        given = list(parameters)
        self._half = [p for p in given if p.dtype in _HALF]
        self._masters: dict[nn.Parameter, Tensor] = {p: local(p).detach().float() for p in self._half}
        self._own = {p: local(p) for p in given if p not in self._masters}
        """Parameters that are their own masters; of sharded ones this rank's part."""
        self._versions = self._current_versions()

    def of(self, parameter: nn.Parameter) -> Tensor:
        """The tensor that the optimizer updates: the parameter's master, or the parameter itself."""
        master = self._masters.get(parameter)
        return self._own.get(parameter, parameter) if master is None else master

    def adopt_changes(self, *, always: bool = False) -> None:
        """Before a step: start again from weights that others have changed since the last one."""
        if always or self._current_versions() != self._versions:
            self._follow()

    @torch.no_grad()
    def write(self) -> None:
        """After a step: round the masters into the module."""
        if self._half:
            weights = [local(p) for p in self._half]
            torch._foreach_copy_(weights, [self._masters[p] for p in self._half])
            self._versions = self._current_versions()

    @torch.no_grad()
    def _follow(self) -> None:
        for parameter, master in self._masters.items():
            own = local(parameter).detach()
            torch.where(master.to(own.dtype) == own, master, own.float(), out=master)
        self._versions = self._current_versions()

    def _current_versions(self) -> list[int]:
        """Counters that torch raises at every change in place."""
        return [local(p)._version for p in self._half]


def _remove(hooks: Iterable[Any]) -> None:
    for hook in hooks:
        hook.remove()


class GradientAccumulator:
    """Gradient accumulation in float32 over micro-batches, each of which counts once.

    A hook takes a parameter's gradient away as soon as the backward pass has finished it (on the thread of the
    backward pass, while the caller waits). The first one is kept as it is; from the second on the sum is
    float32, so that small gradients are not rounded away.

    A backward pass can run out of memory when some parameters already have their gradient. They are noted, and
    skipped when the micro-batch is tried again, whole or split.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        self._totals: dict[nn.Parameter, Tensor] = {}
        self._is_hooked = self._is_collecting = False
        self._added: set[nn.Parameter] = set()
        """Parameters that have got the gradient of this attempt at a micro-batch."""
        self._skipped: frozenset[nn.Parameter] = frozenset()
        """Parameters that got it in an earlier attempt."""

    def clear(self) -> None:
        """Forget everything, and free it."""
        self._totals = {}
        for parameter in self.parameters:
            parameter.grad = None

    def in_order(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """The parameters that got a gradient, and their sums, which are given away one by one.

        The gradient of a single micro-batch has its own dtype; the sum of several is float32.
        """
        return ((p, self._totals.pop(p)) for p in self.parameters if p in self._totals)

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """While this lasts, gradients of backward passes go into the sums."""
        if not self._is_hooked:
            self._hook()
        self._is_collecting = True
        try:
            yield
        finally:
            self._is_collecting = False

    def begin_attempt(self, skipped: frozenset[nn.Parameter] = frozenset()) -> None:
        """Before a backward pass; `skipped` have the micro-batch's gradient already."""
        self._added = set()
        self._skipped = skipped

    def end_failed_attempt(self) -> frozenset[nn.Parameter]:
        """After a backward pass that failed: the parameters that have the micro-batch's gradient by now."""
        for parameter in self.parameters:
            parameter.grad = None  # one that was finished when memory ran out, and not yet taken
        return self._skipped | self._added

    def _hook(self) -> None:
        """Once: doing it for each step would take milliseconds. The hooks go when the accumulator does."""
        own = weakref.ref(self)

        def take(parameter: Tensor) -> None:
            sums = own()
            if sums is not None and sums._is_collecting:
                sums._take(parameter)

        parameters: list[Any] = list(self.parameters)
        hooks = [parameter.register_post_accumulate_grad_hook(take) for parameter in parameters]
        weakref.finalize(self, _remove, hooks)
        self._is_hooked = True

    @torch.no_grad()
    def _take(self, parameter: Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        gradient, parameter.grad = parameter.grad, None
        if gradient is None or parameter in self._skipped:
            return
        gradient = local(gradient)
        total = self._totals.get(parameter)
        self._totals[parameter] = gradient if total is None else total.float().add_(gradient)
        self._added.add(parameter)
