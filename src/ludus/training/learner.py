"""One model, one optimizer, one step: sum the gradients of packed micro-batches, clip, update.

On a GPU nothing in a step waits for the device before its end: the metrics, the gradient's norm and whether it
is finite are read once, when the optimizer's work has been asked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from ludus.core.failures import LudusError
from ludus.kernels.device import on_device
from ludus.training.adamw import MasterAdamW
from ludus.training.dropout import SeededDropout
from ludus.training.gradients import GradientSum
from ludus.training.logprobs import action_logprobs
from ludus.training.memory_budget import MemoryBudget
from ludus.training.packing import Pack
from ludus.training.passes import Micro, Passes, is_out_of_memory
from ludus.training.settings import OptimizerConfig

TOKENS = "action_tokens"
"""The metric that counts the tokens that the others are means over."""
Objective = Callable[[Tensor, Tensor, Pack], tuple[Tensor, dict[str, Tensor]]]
"""(logprobs_A, entropy_A, pack) -> (loss_A, metrics_A): what is minimised, and what is reported."""

P = TypeVar("P", bound=Micro)
Evaluation = Callable[[P], tuple[Tensor, Tensor, dict[str, Tensor]]]
"""(pack) -> (loss_A, weights_A, metrics_A), the loss with its gradient."""

Admission = Callable[[dict[str, float]], bool]
"""(metrics) -> whether to take the step that they were measured before."""


@dataclass(slots=True)
class _Try(Generic[P]):
    """A micro-batch, and the parameters that had its gradient in an attempt that failed later on."""

    pack: P
    served: frozenset[nn.Parameter] = frozenset()

    @property
    def lengths(self) -> Sequence[int]:
        return self.pack.lengths

    def halves(self) -> tuple[_Try[P], _Try[P]]:
        first, second = self.pack.halves()
        return _Try(first, self.served), _Try(second, self.served)


@dataclass(slots=True)
class _Tally:
    """What the micro-batches of a step had to tell, left on the device until it is asked for."""

    names: list[str] = field(default_factory=list)
    rows: list[Tensor] = field(default_factory=list)

    def row(self, loss: Tensor, weights_A: Tensor, metrics: dict[str, Tensor]) -> Tensor:
        """What there is to tell about a micro-batch, which counts once it is added to `rows`."""
        values = {"loss": loss, TOKENS: torch.full_like(loss, len(weights_A))}
        for name, value_A in metrics.items():
            values[name] = value_A.max() if name.endswith("_max") else value_A.sum()
        self.names = list(values)
        return torch.stack([value.detach().float() for value in values.values()])

    def read(self, *others: Tensor) -> tuple[dict[str, float], list[float]]:
        """The step's metrics, and other numbers; here the host waits for the device."""
        rows = _read([*self.rows, *(other.reshape(1) for other in others)])
        rows, found = rows[: len(self.rows)], [value for (value,) in rows[len(self.rows) :]]
        columns = {name: [row[i] for row in rows] for i, name in enumerate(self.names)}
        seen = sum(columns.get(TOKENS, [0.0]))
        metrics: dict[str, float] = {}
        for name, column in columns.items():
            if name.endswith("_max"):
                metrics[name] = max(column)
            else:
                metrics[name] = sum(column) if name in ("loss", TOKENS) else sum(column) / seen
        return metrics, found


def _read(rows: Sequence[Tensor]) -> list[list[float]]:
    values = torch.cat(list(rows)).tolist() if rows else []
    ends = torch.tensor([0, *map(len, rows)]).cumsum(0).tolist()
    return [values[start:stop] for start, stop in pairwise(ends)]


class Descent:
    """Owns the updates of a module's parameters; a policy's and a critic's alike."""

    def __init__(
        self, model: nn.Module, config: OptimizerConfig, total_steps: int, seed: int = 0
    ) -> None:
        self.model = model
        self.config = config
        self.total_steps = total_steps
        self.steps_done = 0
        self.device = next(model.parameters()).device
        self.optimizer = MasterAdamW(_trainable(model), config)
        self._gradient = GradientSum(_trainable(model))
        self._passes = Passes(config.micro_batch_tokens)
        self._memory = MemoryBudget(model, config.activation_memory)
        self._modules = list(model.modules())
        self._dropout = SeededDropout(model, self.device, seed)

    def forget_gradients(self) -> None:
        """Free what the last step left behind: two models that learn in turns need room for one's only."""
        self._gradient.clear()
        self.optimizer.zero_grad(set_to_none=True)

    def tokens_of_a_pass(self, lengths: Iterable[int]) -> int:
        """How many tokens a micro-batch of rows of these lengths may have, in the memory that is free now."""
        self.forget_gradients()
        return self._memory.plan(self._passes.tokens, max(lengths, default=1))

    def descend(
        self,
        packs: Iterable[P],
        evaluate: Evaluation[P],
        *,
        measured: Iterable[P] = (),
        admit: Admission | None = None,
    ) -> dict[str, float]:
        """One optimizer step over all packs; none where there are no packs, or they are not admitted.

        The loss is the weighted sum over all tokens. The other metrics are plain means over the tokens of all
        packs; those that end in _max are the largest of any token. `loss` and `gradient_norm` are a step's.

        Args:
            packs: What is learned from.
            evaluate: The loss of a pack, and its metrics.
            measured: What is in the metrics and has no gradient: a forward pass, a third of the cost.
            admit: Asked with the metrics before the weights change. Asking waits for the device.

        A pack that does not fit into memory is tried again in halves, and a single row with its layers computed
        again in the backward pass. `evaluate` is called anew each time, so it should have no effects.
        """
        if not all(module.training for module in self._modules):  # telling them takes longer than asking
            self.model.train()
        self.forget_gradients()
        self.optimizer.masters.adopt_changes()
        tally = _Tally()

        def work(attempt: _Try[P]) -> None:
            self._gradient.begin(attempt.served)
            try:
                loss_A, weights_A, metrics = evaluate(attempt.pack)
                loss = (loss_A * weights_A).sum()
                row = tally.row(loss, weights_A, metrics)
                torch.autograd.backward(loss)
            except RuntimeError as error:
                if is_out_of_memory(error):
                    attempt.served = self._gradient.served()
                raise
            tally.rows.append(row)

        def measure(pack: P) -> None:
            with torch.no_grad():
                loss_A, weights_A, metrics = evaluate(pack)
                tally.rows.append(tally.row((loss_A * weights_A).sum(), weights_A, metrics))

        with on_device(self.device):
            with self._gradient.collecting(), self._dropout.drawn_for(self.steps_done):
                self._passes.over(map(_Try, packs), work, self._memory.recompute_everything)
                learns = bool(tally.rows)
                self._passes.over(measured, measure)
            if not learns or (admit is not None and not admit(tally.read()[0])):
                self.forget_gradients()
                metrics, _ = tally.read()
                return {name: value for name, value in metrics.items() if name != "loss"}
            metrics, (norm,) = tally.read(self._update())
        if self.device.type == "cuda":
            self.forget_gradients()  # an engine on the same device has a use for their room
        self._check(norm)
        self.steps_done += 1
        return metrics | {"gradient_norm": norm, "learning_rate": self.optimizer.param_groups[0]["lr"]}

    def _update(self) -> Tensor:
        """Clip and step; the weights stay as they were if the gradient is not finite."""
        self.optimizer.set_rate(self._rate())
        try:
            return self.optimizer.update(self._gradient.in_order())
        except torch.OutOfMemoryError as error:
            raise LudusError(
                "the optimizer's state does not fit into the device's memory beside the weights: train an "
                f"adapter or a smaller model, or leave less to the engine ({str(error).splitlines()[0]})"
            ) from None

    def _rate(self) -> float:
        return self.config.learning_rate * schedule(self.steps_done, self.total_steps, self.config)

    def _check(self, norm: float) -> None:
        if not math.isfinite(norm):
            raise LudusError(
                f"the gradient is {norm} at update {self.steps_done}: lower the learning rate, or look for "
                "rewards or logits that are not finite; the weights were left as they were"
            )

    def state_dict(self) -> dict[str, Any]:
        return {
            "optimizer": self.optimizer.state_dict(),
            "masters": self.optimizer.masters.state_dict(),
            "steps_done": self.steps_done,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        own = self.optimizer.param_groups[0]["fused"]
        groups = [{**group, "fused": own} for group in state["optimizer"]["param_groups"]]
        self.optimizer.load_state_dict({**state["optimizer"], "param_groups": groups})
        self.optimizer.masters.load_state_dict(state.get("masters"))
        self.steps_done = state["steps_done"]


class Learner(Descent):
    """A policy's updates. It does not know whether it imitates, reinforces or prefers."""

    def __init__(
        self,
        model: nn.Module,
        config: OptimizerConfig,
        total_steps: int,
        temperature: float = 1.0,
        seed: int = 0,
    ) -> None:
        super().__init__(model, config, total_steps, seed)
        self.temperature = temperature

    def step(
        self,
        packs: Iterable[Pack],
        objective: Objective,
        *,
        measured: Iterable[Pack] = (),
        admit: Admission | None = None,
    ) -> dict[str, float]:
        """One optimizer step on an objective of the trained tokens' log-probabilities; see `descend`."""

        def evaluate(packed: Pack) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            pack = packed.to(self.device)
            logprobs_A, entropy_A = action_logprobs(self.model, pack, self.temperature)
            loss_A, metrics = objective(logprobs_A, entropy_A, pack)
            return loss_A, pack.weights_A, {"entropy": entropy_A, **metrics}

        return self.descend(packs, evaluate, measured=measured, admit=admit)


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


def _trainable(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]
