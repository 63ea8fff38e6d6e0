"""The optimizer that a recipe names, and its learning rates.

adamw                            `MasterAdamW`, on any number of trainer ranks: clip, step, round into the
                                 module (one kernel on a GPU). Nothing in it waits for the device: whether the
                                 gradient is finite is found out there, and then a step does nothing
muon                             torch's, of the matrices of layers; AdamW for the rest
adamw_8bit, paged_adamw_8bit     bitsandbytes' AdamW, with states in 8 bits

All of them step on float32 masters of a module's weights (`MasterWeights`).
"""

from __future__ import annotations

import importlib
import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ludus.core.failures import ConfigError
from ludus.kernels import (
    AdamwRule,
    AdamwTensors,
    adamw_step,
    adamw_unavailable,
    arrays_to_device,
    on_device,
)
from ludus.training.config.stages import OptimizerConfig
from ludus.training.optim.accumulation import total_norm
from ludus.training.optim.sharding import ALONE, RankGroup, local

log = logging.getLogger(__name__)

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
    def apply_gradients(self, gradients: Iterable[tuple[nn.Parameter, Tensor]]) -> Tensor:
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
            state.update(adamw_state(master, master.device))
        return state

    def adopt_state(self) -> None:
        """After something has been read into the tensors that `state_of` gave: they are the state itself."""

    def _step_in_turns(self, pairs: Pairs, norm: Tensor) -> None:
        """By torch's own operations: its step, and the rounding after it. The pairs are used up."""
        self.zero_grad(set_to_none=True)
        leaves = self.masters.take_gradients(pairs)
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


def adamw_state(master: Tensor, counts_on: torch.device | None = None) -> dict[str, Tensor]:
    """The state of torch's AdamW before the first step; a fused one has its count of steps on the device."""
    return {
        "step": torch.zeros((), dtype=torch.float32, device=counts_on),
        "exp_avg": torch.zeros_like(master),
        "exp_avg_sq": torch.zeros_like(master),
    }


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

    def take_gradients(self, pairs: Pairs) -> list[Tensor]:
        """Give masters their gradients, in float32; these masters. The pairs are used up."""
        taken: list[Tensor] = []
        while pairs:  # each gradient goes when its float32 copy is there
            parameter, gradient = pairs.pop()
            master = self.of(parameter)
            master.grad = gradient.float()
            taken.append(master)
            del gradient
        return taken

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


_BITSANDBYTES = {"adamw_8bit": "AdamW8bit", "paged_adamw_8bit": "PagedAdamW8bit"}
_SHARED = ("qmap1", "qmap2")
"""Tables of bitsandbytes' 8-bit numbers, which all states share."""


def check_optimizer(config: OptimizerConfig, device: torch.device, ranks: int) -> None:
    """Refuse an optimizer that cannot run here."""
    if config.name == "adamw":
        return
    if ranks > 1:
        raise ConfigError(
            f'optimizer.name = "{config.name}" updates whole matrices, and {ranks} trainer ranks have parts of '
            'them: use "adamw", or a single rank'
        )
    if (kind := _BITSANDBYTES.get(config.name)) is None:
        return
    try:
        package = importlib.import_module("bitsandbytes")
    except ImportError:
        raise ConfigError(
            f'optimizer.name = "{config.name}" needs the package bitsandbytes: pip install bitsandbytes'
        ) from None
    if device.type != "cuda":
        raise ConfigError(
            f'optimizer.name = "{config.name}" needs a GPU, and the model is on {device}: use "adamw"'
        )
    if not hasattr(package.optim, kind):
        raise ConfigError(
            f'optimizer.name = "{config.name}": this bitsandbytes has no {kind}: update it'
        )


def optimizer_for(
    model: nn.Module, config: OptimizerConfig, group: RankGroup
) -> MasterAdamW | OtherOptimizer:
    """The optimizer of a module's trainable parameters."""
    weights = {name: one for name, one in model.named_parameters() if one.requires_grad}
    if config.name == "adamw":
        return MasterAdamW(list(weights.values()), config, group)
    check_optimizer(config, next(model.parameters()).device, group.size)
    masters = MasterWeights(weights.values())
    return OtherOptimizer(masters, _parts(weights, masters, config), config.max_gradient_norm)


def _parts(
    weights: Mapping[str, nn.Parameter], masters: MasterWeights, config: OptimizerConfig
) -> list[Any]:
    by_muon = [p for name, p in weights.items() if config.name == "muon" and _is_inner(name, p)]
    taken = set(map(id, by_muon))
    rest = [p for p in weights.values() if id(p) not in taken]
    groups: list[dict[str, Any]] = [
        {"params": [masters.of(p) for p in rest if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [masters.of(p) for p in rest if p.ndim < 2], "weight_decay": 0.0},
    ]
    kind: Any = torch.optim.AdamW
    if config.name in _BITSANDBYTES:
        kind = getattr(importlib.import_module("bitsandbytes").optim, _BITSANDBYTES[config.name])
    parts: list[Any] = [kind(groups, lr=config.peak_rate, betas=config.betas)] if rest else []
    if by_muon:
        muon = torch.optim.Muon(
            [masters.of(p) for p in by_muon],
            lr=config.peak_rate,
            weight_decay=config.weight_decay,
            momentum=config.muon.momentum,
            nesterov=config.muon.nesterov,
            ns_steps=config.muon.iterations,
            adjust_lr_fn="match_rms_adamw",
        )
        parts.append(muon)
    return parts


def _is_inner(name: str, parameter: nn.Parameter) -> bool:
    """Whether it is a matrix of a numbered layer, so neither an embedding nor a head."""
    return parameter.ndim == 2 and any(part.isdecimal() for part in name.split("."))


class OtherOptimizer:
    """Several optimizers, each of some of the masters of a module's weights, on one trainer rank.

    The host waits for the gradient's norm.
    """

    def __init__(self, masters: MasterWeights, parts: Sequence[Any], limit: float) -> None:
        self.masters, self._parts, self._limit = masters, parts, limit
        self._places = {
            id(p): (part, number, place)
            for part in parts
            for number, group in enumerate(part.param_groups)
            for place, p in enumerate(group["params"])
        }
        self._steps: dict[int, tuple[dict[str, Any], Tensor]] = {}

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for part in self._parts for group in part.param_groups]

    def set_rate(self, rate: float) -> None:
        """The learning rate from now on."""
        for group in self.param_groups:
            group["lr"] = rate

    def zero_grad(self, set_to_none: bool = True) -> None:
        for part in self._parts:
            part.zero_grad(set_to_none=set_to_none)

    @torch.no_grad()
    def apply_gradients(self, gradients: Iterable[tuple[nn.Parameter, Tensor]]) -> Tensor:
        """One step against these gradients, clipped; their norm. Nothing happens if it is not finite."""
        pairs = list(gradients)
        norm = total_norm([gradient for _, gradient in pairs])
        self.zero_grad()
        leaves = self.masters.take_gradients(pairs)
        if math.isfinite(float(norm)):
            nn.utils.clip_grads_with_norm_(leaves, self._limit, norm)
            for part in self._parts:
                part.step()
        self.masters.write()
        return norm

    def state_of(self, master: Tensor) -> dict[str, Tensor]:
        """The optimizer's state of a master, made when it is first asked for; `adopt_state` after changes."""
        part, number, place = self._places[id(master)]
        state: dict[str, Any] = part.state[master]
        if not state:
            if isinstance(part, torch.optim.Muon):
                state["momentum_buffer"] = torch.zeros_like(master)
            elif isinstance(part, torch.optim.AdamW):
                state.update(adamw_state(master))
            elif hasattr(part, "init_state"):  # bitsandbytes
                part.init_state(part.param_groups[number], master, number, place)
                state = part.state[master]
            else:
                raise TypeError(f"the state of {type(part).__name__} is not known here")
        found = {
            name: one for name, one in state.items() if isinstance(one, Tensor) and name not in _SHARED
        }
        if isinstance(state.get("step"), int):  # bitsandbytes counts on the host
            found["step"] = torch.tensor(state["step"])
            self._steps[id(master)] = (state, found["step"])
        return found

    def adopt_state(self) -> None:
        """After something has been read into the tensors that `state_of` gave."""
        for state, step in self._steps.values():
            state["step"] = int(step)
