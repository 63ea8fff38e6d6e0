"""The optimizer that a recipe names, and its learning rates.

adamw                            `MasterAdamW` of `adamw.py`, on any number of trainer ranks
muon                             torch's, of the matrices of layers; AdamW for the rest
adamw_8bit, paged_adamw_8bit     bitsandbytes' AdamW, with states in 8 bits
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ludus.core.failures import ConfigError
from ludus.training.config.stages import OptimizerConfig
from ludus.training.optim.adamw import MasterAdamW, MasterWeights, adamw_state
from ludus.training.optim.gradients import total_norm
from ludus.training.optim.sharding import RankGroup

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
    def update(self, gradients: Iterable[tuple[nn.Parameter, Tensor]]) -> Tensor:
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
