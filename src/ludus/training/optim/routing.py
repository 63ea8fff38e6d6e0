"""Mixtures of experts in training: how evenly tokens are spread over experts, and the routers' auxiliary loss.

Routers are found by what transformers records of them (`router_logits`): each gives its logits and, for each
token, the experts that it chose. Hooks that are there for a micro-batch's forward pass alone read them, so a
recomputation in the backward pass adds nothing.

The auxiliary loss is that of the Switch Transformer (Fedus et al. 2021, equations 4 to 6), by the function of
transformers, over all tokens of a micro-batch. It is a product of means, so it depends on what is computed
together. A prefix that rows share counts once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ludus.core.failures import ConfigError
from ludus.training.optim.sharding import RankGroup

AUX_LOSS = "router_aux_loss"


class Routing:
    """What the routers of one forward pass gave, layer by layer."""

    def __init__(self) -> None:
        self.logits: list[Tensor] = []
        """[U, E] each"""
        self.chosen: list[Tensor] = []
        """[U, k] each: numbers of experts"""

    def note(self, output: Any, index: int) -> None:
        """The output of one router, whose logits are at `index`."""
        parts = output if isinstance(output, tuple) else (output,)
        chosen = [
            p for p in parts if isinstance(p, Tensor) and p.ndim == 2 and not p.is_floating_point()
        ]
        if len(parts) > index and isinstance(parts[index], Tensor) and len(chosen) == 1:
            self.logits.append(parts[index])
            self.chosen.append(chosen[0].detach())

    def counts(self) -> Tensor:
        """[layers, E] How many tokens were sent to each expert."""
        pairs = zip(self.chosen, self.logits, strict=True)
        return torch.stack([c.flatten().bincount(minlength=x.shape[1]) for c, x in pairs])

    def balance_loss(self) -> Tensor:
        """The auxiliary loss; 1 times the experts of a token where tokens are spread evenly."""
        from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

        experts, chosen = self.logits[0].shape[1], self.chosen[0].shape[1]
        loss: Any = load_balancing_loss_func(tuple(self.logits), experts, chosen)
        result: Tensor = loss
        return result


class Routers:
    """The routers of a model, and the load of its experts in the optimizer step that is under way."""

    def __init__(self, model: nn.Module, aux_loss: float = 0.0) -> None:
        self._found = list(_routers(model))
        self._sum: Tensor | None = None
        self._last: Tensor | None = None
        if aux_loss and not (self._found and _has_aux_loss(model)):
            raise ConfigError(
                f"optimizer.router_aux_loss = {aux_loss:g}, and {type(model).__name__} has no router with an "
                "auxiliary loss in transformers (no router_aux_loss_coef in its configuration): leave it out. "
                "Models without one balance their experts in another way, or have none"
            )

    @contextmanager
    def reading(self) -> Iterator[Routing]:
        """What a forward pass within this routes."""
        routing = Routing()
        hooks = [
            module.register_forward_hook(lambda _m, _i, output, at=index: routing.note(output, at))
            for module, index in self._found
        ]
        try:
            yield routing
        finally:
            for hook in hooks:
                hook.remove()
        self._last = routing.counts() if _is_even(routing) else None

    def forget(self) -> None:
        """A step begins."""
        self._sum = self._last = None

    def keep(self, counts: bool) -> None:
        """The last pass went well, and counts among those of its step."""
        if self._last is not None:
            own = self._last if counts else torch.zeros_like(self._last)
            self._sum = own if self._sum is None else self._sum + own
        self._last = None

    def step_metrics(self, group: RankGroup) -> dict[str, float]:
        """How evenly the step's tokens were spread, over all ranks; nothing of a model without experts."""
        if self._sum is None:
            return {}
        load, self._sum = group.total(self._sum.double().cpu()), None
        return load_metrics(load)


def load_metrics(load_LE: Tensor) -> dict[str, float]:
    """Evenness of the tokens that each expert of each layer got."""
    share_LE = load_LE / load_LE.sum(dim=1, keepdim=True).clamp_min(1)
    experts = load_LE.shape[1]
    entropy_L = torch.special.entr(share_LE).sum(dim=1) / torch.log(torch.tensor(float(experts)))
    return {
        "experts/entropy": float(entropy_L.mean()) if experts > 1 else 1.0,
        "experts/load_max": float(share_LE.max()) * experts,
        "experts/dead": float((load_LE == 0).double().mean()),
    }


def _is_even(routing: Routing) -> bool:
    """Whether there were routers, all of as many experts."""
    return len({logits.shape[1] for logits in routing.logits}) == 1


def _routers(model: nn.Module) -> Iterator[tuple[nn.Module, int]]:
    """Each router, and which part of its output its logits are."""
    seen: set[nn.Module] = set()
    for owner in model.modules():
        recorders = (getattr(type(owner), "_can_record_outputs", None) or {}).get("router_logits")
        for recorder in recorders if isinstance(recorders, list) else [recorders]:
            kind: Any = getattr(recorder, "target_class", None)
            for module in owner.modules() if kind is not None else ():
                if isinstance(module, kind) and module not in seen:
                    seen.add(module)
                    yield module, getattr(recorder, "index", 0)


def _has_aux_loss(model: nn.Module) -> bool:
    configs = (getattr(module, "config", None) for module in model.modules())
    return any(hasattr(config, "router_aux_loss_coef") for config in configs)
