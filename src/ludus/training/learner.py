"""One model, one optimizer, one step: sum the gradients of packed micro-batches, clip, update.

On a GPU nothing in a step waits for the device before its end: the metrics, the gradient's norm and whether it
is finite are read once, when the optimizer's work has been asked for.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Generic, Literal, TypeVar

import torch
from torch import Tensor, nn

from ludus.core.failures import LudusError
from ludus.core.random import key
from ludus.engine import PackedContext, hidden_states, sampling_mode
from ludus.engine.hf_model import decoder_of, recomputable_layers, recomputed_layers, set_recompute
from ludus.kernels.device import free_memory, on_device
from ludus.training.logprobs import action_logprobs, chunk_bytes, kept_bytes
from ludus.training.optimizer import GradientAccumulator, MasterAdamW
from ludus.training.packing import MicroBatch, MicroBatchRunner, Pack, is_out_of_memory
from ludus.training.settings import OptimizerConfig

TOKENS = "action_tokens"
"""The metric that counts the tokens that the others are means over."""
Objective = Callable[[Tensor, Tensor, Pack], tuple[Tensor, dict[str, Tensor]]]
"""(logprobs_A, entropy_A, pack) -> (loss_A, metrics_A): what is minimised, and what is reported."""

P = TypeVar("P", bound=MicroBatch)
Evaluation = Callable[[P], tuple[Tensor, Tensor, dict[str, Tensor]]]
"""(pack) -> (loss_A, weights_A, metrics_A), the loss with its gradient."""

Admission = Callable[[dict[str, float]], bool]
"""(metrics) -> whether to take the step that they were measured before."""


@dataclass(slots=True)
class _Attempt(Generic[P]):
    """A micro-batch, and the parameters that had its gradient in an attempt that failed later on."""

    pack: P
    served: frozenset[nn.Parameter] = frozenset()

    @property
    def lengths(self) -> Sequence[int]:
        return self.pack.lengths

    def split(self) -> tuple[_Attempt[P], _Attempt[P]]:
        first, second = self.pack.split()
        return _Attempt(first, self.served), _Attempt(second, self.served)


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


class Updater:
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
        self._gradient = GradientAccumulator(_trainable(model))
        self._passes = MicroBatchRunner(config.micro_batch_tokens)
        self._memory = MemoryBudget(model, config.activation_memory)
        self._modules = list(model.modules())
        self._dropout = SeededDropout(model, self.device, seed)

    def clear_gradients(self) -> None:
        """Free what the last step left behind: two models that learn in turns need room for one's only."""
        self._gradient.clear()
        self.optimizer.zero_grad(set_to_none=True)

    def micro_batch_tokens(self, lengths: Iterable[int]) -> int:
        """How many tokens a micro-batch of rows of these lengths may have, in the memory that is free now."""
        self.clear_gradients()
        return self._memory.plan(self._passes.tokens, max(lengths, default=1))

    def optimizer_step(
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
        self.clear_gradients()
        self.optimizer.masters.adopt_changes()
        tally = _Tally()

        def work(attempt: _Attempt[P]) -> None:
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
                self._passes.over(map(_Attempt, packs), work, self._memory.checkpoint_all_layers)
                learns = bool(tally.rows)
                self._passes.over(measured, measure)
            if not learns or (admit is not None and not admit(tally.read()[0])):
                self.clear_gradients()
                metrics, _ = tally.read()
                return {name: value for name, value in metrics.items() if name != "loss"}
            metrics, (norm,) = tally.read(self._update())
        if self.device.type == "cuda":
            self.clear_gradients()  # an engine on the same device has a use for their room
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


class Learner(Updater):
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

        return self.optimizer_step(packs, evaluate, measured=measured, admit=admit)


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


class SeededDropout:
    """Makes what a module drops out in a step a function of a seed and the step."""

    def __init__(self, model: nn.Module, device: torch.device, seed: int) -> None:
        self._seed = seed
        self._layers = [module for module in model.modules() if isinstance(module, nn.Dropout)]
        self._devices = [device] if device.type == "cuda" else []

    @contextmanager
    def drawn_for(self, step: int) -> Iterator[None]:
        """Where nothing is dropped out, nothing happens; other random draws go on afterwards as before."""
        if not any(layer.p > 0 for layer in self._layers):
            yield
            return
        with torch.random.fork_rng(devices=self._devices):
            torch.manual_seed(key(self._seed, "dropout", step))
            yield


# How many tokens a pass may have, and how many layers it computes twice, so that it fits into memory.
#
# What a forward pass keeps for the backward pass is measured, once, on a few tokens: it depends on the
# architecture, the data type, the kernels and on what is trained. With the memory that is free, that gives the
# number of tokens. Smaller passes cost next to nothing as long as they keep the device busy; below that, layers
# are computed again in the backward pass, which costs up to a third more time, and as many as are needed.

log = logging.getLogger(__name__)

BUSY_TOKENS = 4096
"""Passes of so many tokens keep a large device busy; fewer are worth recomputing layers to avoid."""
_GIB = 1 << 30
_USABLE = 0.92  # of free memory: the rest is lost between blocks
_PROBE_LENGTHS = (32, 32)


@dataclass(frozen=True, slots=True)
class ActivationCosts:
    """Bytes that a forward pass keeps, for each of its tokens."""

    layers: int
    full: int
    """In a layer."""
    kept: int
    """In a layer that is computed again."""


@dataclass(frozen=True, slots=True)
class MicroBatchPlan:
    """How passes are made."""

    tokens: int
    recomputed: int


def plan_micro_batches(limit: int, longest: int, room: int, costs: ActivationCosts) -> MicroBatchPlan:
    """The plan for so much room: no recomputation where that leaves passes large enough to be fast.

    Args:
        limit: The most tokens a pass may have; a longer row travels alone.
        longest: The longest row.
        room: Bytes for what a pass keeps, and for what its backward pass makes in a layer meanwhile.
        costs: What a token takes.
    """
    layers, full, kept = costs.layers, costs.full, costs.kept
    wanted = max(longest, min(limit, BUSY_TOKENS))
    tokens = room // max(1, (layers + 1) * full)
    if tokens >= wanted:
        return MicroBatchPlan(min(limit, tokens), 0)
    missing = wanted * (layers + 1) * full - room
    recomputed = math.ceil(missing / max(1, wanted * (full - kept)))
    if recomputed <= layers:
        return MicroBatchPlan(min(limit, wanted), recomputed)
    tokens = room // max(1, layers * kept + full)
    return MicroBatchPlan(max(1, min(limit, tokens)), layers)


class MemoryBudget:
    """Plans the passes of one model."""

    def __init__(self, model: nn.Module, setting: float | Literal["auto"]) -> None:
        self._model = model
        self._setting = setting
        self._costs: ActivationCosts | None = None
        self._least_recomputed = 0

    def plan(self, limit: int, longest: int) -> int:
        """The tokens of a pass; how many layers are computed again is told to the model."""
        room = self._room()
        if room is None:
            return limit
        if self._costs is None:
            self._costs = measure(self._model)
        if self._costs.layers == 0:
            return limit
        plan = plan_micro_batches(limit, longest, room, self._costs)
        recomputed = max(plan.recomputed, self._least_recomputed)
        if recomputed != recomputed_layers(self._model):
            log.info(
                "%d of %d layers are computed again in the backward pass", recomputed, self._costs.layers
            )
            set_recompute(self._model, recomputed)
        return plan.tokens

    def checkpoint_all_layers(self) -> bool:
        """From now on compute all layers again; false if that is so already, or cannot be."""
        layers = _layers(self._model)
        if layers == 0 or recomputed_layers(self._model) >= layers:
            return False
        log.warning(
            "a single row does not fit into memory, so all layers are computed again in the backward pass from "
            "now on, which takes about a third more time"
        )
        self._least_recomputed = layers
        set_recompute(self._model, layers)
        return True

    def _room(self) -> int | None:
        """Bytes for activations; None where there is nothing to plan by."""
        if _layers(self._model) == 0:
            return None
        if self._setting != "auto":
            return int(self._setting * _GIB)
        device = next(self._model.parameters()).device
        if device.type != "cuda":
            return None
        free, _ = free_memory(device)
        gradients = sum(4 * p.numel() for p in self._model.parameters() if p.requires_grad)
        return max(0, int(_USABLE * free) - gradients - _head_bytes(self._model))


def measure(model: nn.Module) -> ActivationCosts:
    """What a forward pass keeps for each token, in a layer on average."""
    layers, recomputed = _layers(model), recomputed_layers(model)
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    device = next(model.parameters()).device
    context = PackedContext(_PROBE_LENGTHS, device)
    tokens = torch.zeros(sum(_PROBE_LENGTHS), dtype=torch.long, device=device)
    set_recompute(model, 0)
    try:
        with (
            torch.enable_grad(),
            sampling_mode(model),
            torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor),
        ):
            states = hidden_states(model, tokens, context.position_ids, context)
    finally:
        set_recompute(model, recomputed)
    for tensor in (
        *model.parameters(),
        *model.buffers(),
    ):  # where they lie now: a first pass may move them
        kept.pop(tensor.untyped_storage().data_ptr(), None)
    width = states.shape[-1] * states.element_size()
    full = sum(kept.values()) // (len(tokens) * max(1, layers))
    # the layer's input, and the residual where a forward hands that on beside it
    return ActivationCosts(layers, max(full, 2 * width), 2 * width)


def _layers(model: nn.Module) -> int:
    """The layers that can be computed again; 0 for a model without a decoder of its own."""
    return recomputable_layers(model) if getattr(model, "trunk", model) is not None else 0


def _head_bytes(model: nn.Module) -> int:
    """What the head needs meanwhile: a chunk of logits, what it keeps, its gradient in float32 and rounded."""
    device = next(model.parameters()).device
    config = decoder_of(model).config.get_text_config()
    return (
        chunk_bytes(device) + kept_bytes(device) + 6 * int(config.vocab_size) * int(config.hidden_size)
    )
