"""One model, one optimizer, one step: sum the gradients of packed micro-batches, clip, update."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ludus.core.failures import LudusError
from ludus.training.logprobs import action_logprobs
from ludus.training.packing import Pack
from ludus.training.settings import OptimizerConfig

Objective = Callable[[Tensor, Tensor, Pack], tuple[Tensor, dict[str, Tensor]]]
"""(logprobs_A, entropy_A, pack) -> (loss_A, metrics_A): what is minimised, and what is reported."""

P = TypeVar("P")
Evaluation = Callable[[P], tuple[Tensor, Tensor, dict[str, Tensor]]]
"""(pack) -> (loss_A, weights_A, metrics_A), the loss with its gradient."""


class Descent:
    """Owns the updates of a module's parameters; a policy's and a critic's alike."""

    def __init__(self, model: nn.Module, config: OptimizerConfig, total_steps: int) -> None:
        self.model = model
        self.config = config
        self.total_steps = total_steps
        self.steps_done = 0
        self.device = next(model.parameters()).device
        self.optimizer = torch.optim.AdamW(
            _decay_groups(model, config.weight_decay), lr=config.learning_rate, betas=config.betas
        )

    def forget_gradients(self) -> None:
        """Free what the last step left behind: two models that learn in turns need room for one's only."""
        self.optimizer.zero_grad(set_to_none=True)

    def descend(self, packs: Iterable[P], evaluate: Evaluation[P]) -> dict[str, float]:
        """One optimizer step over all packs.

        The loss is the weighted sum over all tokens. The other metrics are means over the tokens of these
        packs, weighted in the same way.
        """
        self.model.train()
        self.forget_gradients()
        totals: dict[str, float] = {}
        seen = 0.0
        for pack in packs:
            loss_A, weights_A, metrics = evaluate(pack)
            loss = (loss_A * weights_A).sum()
            torch.autograd.backward(loss)
            seen += float(weights_A.sum())
            totals["loss"] = totals.get("loss", 0.0) + float(loss.detach())
            for name, value_A in metrics.items():
                value = float((value_A.detach() * weights_A).sum())
                totals[name] = totals.get(name, 0.0) + value
        totals = {name: v if name == "loss" else v / seen for name, v in totals.items()}
        totals["gradient_norm"] = self._update()
        totals["learning_rate"] = self.optimizer.param_groups[0]["lr"]
        return totals

    def _update(self) -> float:
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.learning_rate * schedule(
                self.steps_done, self.total_steps, self.config
            )
        norm = float(nn.utils.clip_grad_norm_(self.model.parameters(), self.config.max_gradient_norm))
        if not math.isfinite(norm):
            raise LudusError(
                f"the gradient is {norm} at update {self.steps_done}: lower the learning rate, or look for "
                "rewards or logits that are not finite; the weights were left as they were"
            )
        self.optimizer.step()
        self.steps_done += 1
        return norm

    def state_dict(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer.state_dict(), "steps_done": self.steps_done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state["optimizer"])
        self.steps_done = state["steps_done"]


class Learner(Descent):
    """A policy's updates. It does not know whether it imitates, reinforces or prefers."""

    def __init__(
        self, model: nn.Module, config: OptimizerConfig, total_steps: int, temperature: float = 1.0
    ) -> None:
        super().__init__(model, config, total_steps)
        self.temperature = temperature

    def step(self, packs: Iterable[Pack], objective: Objective) -> dict[str, float]:
        """One optimizer step on an objective of the trained tokens' log-probabilities."""

        def evaluate(packed: Pack) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            pack = packed.to(self.device)
            logprobs_A, entropy_A = action_logprobs(self.model, pack, self.temperature)
            loss_A, metrics = objective(logprobs_A, entropy_A, pack)
            return loss_A, pack.weights_A, {"entropy": entropy_A, **metrics}

        return self.descend(packs, evaluate)


def schedule(step: int, total: int, config: OptimizerConfig) -> float:
    """The share of the peak learning rate at a step: a linear rise, then constant or down to a tenth."""
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return 1.0
    progress = (step - config.warmup_steps) / max(1, total - config.warmup_steps)
    progress = min(1.0, progress)
    if config.schedule == "linear":
        return 1.0 - 0.9 * progress
    return 0.1 + 0.45 * (1 + math.cos(math.pi * progress))


def frozen(model: nn.Module) -> nn.Module:
    """The model as a reference that never changes."""
    return model.requires_grad_(False).eval()


def _decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    trainable = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
