"""One model, one optimizer, one step: accumulate the gradients of packed micro-batches, clip, update.

    optimizer_step   for each micro-batch: forward, loss, backward; then the optimizer (`optimizers.py`)
    splitting        a micro-batch that runs out of memory is tried again in two (`MicroBatchSplitter`)
    checkpointing    layers whose activations do not fit are computed again in the backward (`memory.py`)

On a GPU nothing in a step waits for the device before its end: the metrics, the gradient's norm and whether it
is finite are read once, after the optimizer's work has been queued.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from ludus.core.failures import ConfigError, LudusError
from ludus.core.random import key
from ludus.kernels import is_out_of_memory, on_device
from ludus.training.config.stages import OptimizerConfig
from ludus.training.data.batch import Batch
from ludus.training.data.micro_batches import MicroBatch, micro_batches
from ludus.training.optim.accumulation import GradientAccumulator, MicroBatchSplitter, Round, rounds_of
from ludus.training.optim.logprobs import action_logprobs, logprobs_of, shares_prefixes
from ludus.training.optim.memory import MemoryBudget
from ludus.training.optim.optimizers import lr_factor, optimizer_for
from ludus.training.optim.routing import AUX_LOSS, Routers
from ludus.training.optim.shard_files import UnsavedError, read_shards, write_shards
from ludus.training.optim.sharding import (
    RankGroup,
    group_of,
    named_weights,
    sharded_like,
)

log = logging.getLogger(__name__)

TOKENS = "action_tokens"
"""The metric that counts the tokens that the others are means over."""
Metrics = dict[str, Tensor]
LossFunction = Callable[[MicroBatch], tuple[Tensor, Metrics]]
"""(micro-batch) -> (loss_A, metrics_A). It may be called again, so it should have no effects."""
Objective = Callable[[Tensor, Tensor, MicroBatch], tuple[Tensor, Metrics]]
"""(logprobs_A, entropy_A, micro-batch) -> (loss_A, metrics_A): what is minimised, and what is reported."""


class Updater:
    """Owns the updates of a module's parameters; a policy's and a critic's alike."""

    balances_experts = False
    """Whether the routers' auxiliary loss is part of what is minimised."""

    def __init__(
        self, model: nn.Module, config: OptimizerConfig, total_steps: int, seed: int = 0
    ) -> None:
        self.model = model
        self.config = config
        self.total_steps = total_steps
        self.steps_done = 0
        self.group = group_of(model)
        """The ranks that the model is sharded over; each computes its share of a step's micro-batches."""
        self.device = next(model.parameters()).device
        trainable = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = optimizer_for(model, config, self.group)
        self._gradients = GradientAccumulator(trainable)
        self._splitter = MicroBatchSplitter(config.micro_batch_tokens)
        self._memory = MemoryBudget(model, config.activation_memory)
        self._modules = list(model.modules())
        if config.router_aux_loss and not self.balances_experts:
            raise ConfigError(
                "router_aux_loss has an effect on a policy alone: leave it out of this optimizer"
            )
        self._routers = Routers(model, config.router_aux_loss)
        self._dropout = SeededDropout(model, self.device, seed, self.group.rank)

    def clear_gradients(self) -> None:
        """Free what the last step left behind: two models that learn in turns need room for one's only."""
        self._gradients.clear()
        self.optimizer.zero_grad(set_to_none=True)

    @property
    def shares_prefixes(self) -> bool:
        """Whether a prefix that rows of a micro-batch share is computed once."""
        return self.config.share_prefixes and shares_prefixes(self.model)

    def micro_batch_tokens(self, lengths: Iterable[int]) -> int:
        """How many tokens a micro-batch of rows of these lengths may have, in the memory that is free now."""
        self.clear_gradients()
        return self._memory.plan(self._splitter.max_tokens, max(lengths, default=1))

    def optimizer_step(
        self,
        batches: Iterable[MicroBatch],
        loss: LossFunction,
        *,
        at: int | None = None,
        measured: Iterable[MicroBatch] = (),
        limits: Mapping[str, float] | None = None,
    ) -> dict[str, float]:
        """One optimizer step over all micro-batches; none where there are none.

        The loss is the weighted sum over all tokens. The other metrics are plain means over the tokens of all
        batches; those that end in _max are the largest of any token. `loss` and `gradient_norm` are a step's.

        Args:
            batches: What is learned from.
            loss: The loss of a micro-batch, and its metrics.
            at: Its place among the `total_steps` that are planned, from 0, whether or not those before it were
                taken: the learning rate is a function of it. When left out, all were.
            measured: What is in the metrics and has no gradient: a forward pass, a third of the cost.
            limits: Do not step where one of these metrics is above its limit. Reading it waits for the device.
        """
        if not all(module.training for module in self._modules):  # setting it takes longer than asking
            self.model.train()
        self.clear_gradients()
        self._routers.forget()
        self.optimizer.masters.adopt_changes()
        rows: list[dict[str, Tensor]] = []
        rounds: list[Round] = []
        has_gradient = False
        with on_device(self.device):
            with self._gradients.collecting(), self._dropout.drawn_for(self.steps_done):
                for some, learns in ((batches, True), (measured, False)):
                    for given in self._splitter.over(rounds_of(some, self.group)):
                        try:
                            rows.append(self._pass(given, loss, learns=learns))
                            rounds.append(given)
                        except RuntimeError as error:
                            self.group.tell(error)
                            shrinks = learns and self._can_shrink(given, error)
                            self._splitter.retry(given, error, needs_less=shrinks)
                    has_gradient |= learns and bool(rows)
            shared = _prefix_sharing(rounds) | self._routers.step_metrics(self.group)
            metrics = _step_metrics(rows, self.group) | shared if limits or not has_gradient else {}
            if not has_gradient or any(metrics[name] > most for name, most in (limits or {}).items()):
                self.clear_gradients()
                return {name: value for name, value in metrics.items() if name != "loss"}
            norm_1 = self._apply_gradients(self.steps_done if at is None else at)
            metrics = _step_metrics(rows, self.group, gradient_norm=norm_1) | shared
        if self.device.type == "cuda":
            self.clear_gradients()  # an engine on the same device has a use for their room
        if not math.isfinite(metrics["gradient_norm"]):
            raise LudusError(
                f"the gradient is {metrics['gradient_norm']} at update {self.steps_done}: lower the learning "
                "rate, or look for rewards or logits that are not finite; the weights were left as they were"
            )
        self.steps_done += 1
        return metrics | {"learning_rate": self.optimizer.param_groups[0]["lr"]}

    def _pass(self, given: Round, loss: LossFunction, *, learns: bool) -> dict[str, Tensor]:
        """The metrics of one micro-batch; where it `learns`, its gradients go into the accumulator."""
        self._gradients.begin_attempt(given.added)
        part, counts = given.of_rank(self.group.rank)
        batch = part.to(self.device)
        with torch.set_grad_enabled(learns):
            loss_A, metrics = loss(batch)
            weights_A = batch.weights_A
            total = (loss_A * (weights_A if counts else torch.zeros_like(weights_A))).sum()
        row = _summed(total, weights_A, metrics, counts)
        if learns:
            torch.autograd.backward(total)
        self.group.agree()  # that all ranks have got to the end of it
        self._routers.keep(counts)
        return row

    def _can_shrink(self, given: Round, error: RuntimeError) -> bool:
        """After a failed attempt: note who has its gradient; a single row gets activation checkpointing."""
        if not is_out_of_memory(error):
            return False
        given.added = self._gradients.end_failed_attempt()
        return len(given.lengths) == 1 and self._memory.checkpoint_all_layers()

    def _apply_gradients(self, at: int) -> Tensor:
        """Clip and step; the gradient's norm. The weights stay as they were if it is not finite."""
        share = lr_factor(at, self.total_steps, self.config)
        self.optimizer.set_rate(self.config.peak_rate * share)
        try:
            return self.optimizer.apply_gradients(self._gradients.in_order())
        except torch.OutOfMemoryError as error:
            raise LudusError(
                "the optimizer's state does not fit into the device's memory beside the weights: train an "
                f"adapter or a smaller model, or leave less to the engine ({str(error).splitlines()[0]})"
            ) from None

    def save(self, path: Path) -> None:
        """Write the state; of a sharded model all ranks write their parts."""
        try:
            write_shards(path, self.tensors(), self.group)
        except OSError as error:
            raise UnsavedError(
                f"the optimizer's state could not be written to {path.parent.parent}: {error}"
            ) from error

    def load(self, path: Path) -> None:
        """Go on from what `save` wrote, on however many ranks that was."""
        tensors = self.tensors()
        read_shards(path, tensors)
        self.take(tensors)

    def tensors(self) -> dict[str, Tensor]:
        """The state by the names of the parameters. The tensors share their memory with the optimizer."""
        found = {"steps_done": torch.tensor(self.steps_done)}
        for name, parameter in named_weights(self.model):
            if not parameter.requires_grad:
                continue
            master = self.optimizer.masters.of(parameter)
            kept = self.optimizer.state_of(master)
            for kind, tensor in kept.items():
                found[f"{kind}.{name}"] = tensor if kind == "step" else sharded_like(tensor, parameter)
            if parameter.dtype != master.dtype:
                found[f"master.{name}"] = sharded_like(master, parameter)
        return found

    def take(self, tensors: Mapping[str, Tensor]) -> None:
        """After something has been read into the tensors of `tensors`."""
        self.steps_done = int(tensors["steps_done"])
        self.optimizer.adopt_state()
        self.optimizer.masters.adopt_changes(always=True)


class Learner(Updater):
    """A policy's optimizer steps, whatever the objective: SFT, policy gradient, preference or distillation."""

    balances_experts = True

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
        batches: Iterable[MicroBatch],
        objective: Objective,
        *,
        at: int | None = None,
        measured: Iterable[MicroBatch] = (),
        limits: Mapping[str, float] | None = None,
    ) -> dict[str, float]:
        """One optimizer step on an objective of the trained tokens' log-probabilities."""

        def loss(batch: MicroBatch) -> tuple[Tensor, Metrics]:
            with self._routers.reading() as routing:
                logprobs_A, entropy_A = action_logprobs(self.model, batch, self.temperature)
            loss_A, metrics = objective(logprobs_A, entropy_A, batch)
            if self.config.router_aux_loss:
                balance = routing.balance_loss()  # the weights of a step's tokens sum to 1
                loss_A = loss_A + self.config.router_aux_loss * balance
                metrics[AUX_LOSS] = balance.detach().expand_as(entropy_A)
            return loss_A, {"entropy": entropy_A, **metrics}

        return self.optimizer_step(batches, loss, at=at, measured=measured, limits=limits)

    def step_on(
        self,
        batch: Batch,
        objective: Objective,
        *,
        at: int | None = None,
        rows: Sequence[int] | None = None,
        measured: Sequence[int] = (),
        limits: Mapping[str, float] | None = None,
    ) -> dict[str, float]:
        """One optimizer step on these rows of a batch (on all when left out), packed as memory allows.

        `measured` are rows that are in the metrics and have no gradient.
        """
        lengths, share, ranks = batch.lengths, self.shares_prefixes, self.group.size
        learned = range(len(batch)) if rows is None else rows
        budget = self.micro_batch_tokens(lengths[i] for i in learned)
        plain = self.config.micro_batch_tokens
        return self.step(
            micro_batches(batch, budget, learned, ranks, share=share),
            objective,
            at=at,
            measured=micro_batches(batch, plain, measured, ranks, share=share),
            limits=limits,
        )

    def logprobs(self, batch: Batch, model: nn.Module | None = None) -> Tensor:
        """The trained tokens' log-probabilities under the policy, or under another model; see `logprobs_of`."""
        budget, share = self.config.micro_batch_tokens, self.config.share_prefixes
        return logprobs_of(model or self.model, batch, self.temperature, budget, share=share)


def _summed(loss: Tensor, weights_A: Tensor, metrics: Metrics, counts: bool) -> dict[str, Tensor]:
    """A micro-batch's metrics as sums and maxima, left on the device; nothing where it does not count."""
    row = {"loss": loss.detach(), TOKENS: torch.full_like(loss, len(weights_A))}
    for name, value_A in metrics.items():
        row[name] = (value_A.max() if name.endswith("_max") else value_A.sum()).detach()
    if counts:
        return row
    nothing = {True: -math.inf, False: 0.0}
    return {name: torch.full_like(value, nothing[name.endswith("_max")]) for name, value in row.items()}


def _step_metrics(
    rows: Sequence[Mapping[str, Tensor]], group: RankGroup, **others: Tensor
) -> dict[str, float]:
    """A step's metrics from those of its micro-batches on all ranks. Here the host waits for the device."""
    names = list(rows[0]) if rows else []
    flat = [row[name].float() for row in rows for name in names] + [v.float() for v in others.values()]
    values = torch.stack([value.reshape(()) for value in flat]).tolist() if flat else []
    columns = {name: values[i : len(rows) * len(names) : len(names)] for i, name in enumerate(names)}
    highest = {name: max(column) for name, column in columns.items() if name.endswith("_max")}
    sums = {name: sum(column) for name, column in columns.items() if name not in highest}
    if group.size > 1:
        highest = _reduced(highest, group.largest)
        sums = _reduced(sums, group.total)
    seen = sums.get(TOKENS, 0.0)
    metrics: dict[str, float] = {}
    for name in names:
        if name in highest:
            metrics[name] = highest[name]
        else:
            metrics[name] = sums[name] if name in ("loss", TOKENS) else sums[name] / seen
    return metrics | dict(zip(others, values[len(rows) * len(names) :], strict=True))


def _prefix_sharing(rounds: Sequence[Round]) -> dict[str, float]:
    """The share of the rows' tokens, on all ranks, that were not computed because another row has them too."""
    batches = [one for given in rounds for one in given.batches if one is not None]
    tokens = sum(sum(one.lengths) for one in batches)
    return {"prefix_sharing": 1 - sum(one.computed for one in batches) / tokens} if tokens else {}


def _reduced(values: Mapping[str, float], reduce: Callable[[Tensor], Tensor]) -> dict[str, float]:
    """Numbers of this rank, reduced over all; every rank has the same names, in the same order."""
    found = reduce(torch.tensor(list(values.values()), dtype=torch.float64))
    return dict(zip(values, found.tolist(), strict=True))


def frozen(model: nn.Module) -> nn.Module:
    """The model as a reference that never changes."""
    return model.requires_grad_(False).eval()


class SeededDropout:
    """Makes a step's dropout a function of a seed and the step."""

    def __init__(self, model: nn.Module, device: torch.device, seed: int, rank: int = 0) -> None:
        """Ranks see different rows, so each draws for itself."""
        self._seed = key(seed, "rank", rank) if rank else seed
        self._layers = [module for module in model.modules() if isinstance(module, nn.Dropout)]
        self._devices = [device] if device.type == "cuda" else []

    @contextmanager
    def drawn_for(self, step: int) -> Iterator[None]:
        """Where no layer drops anything, nothing happens; other random draws go on afterwards as before."""
        if not any(layer.p > 0 for layer in self._layers):
            yield
            return
        with torch.random.fork_rng(devices=self._devices):
            torch.manual_seed(key(self._seed, "dropout", step))
            yield
