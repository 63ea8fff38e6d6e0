"""The value function of algorithms that need one (ppo), and how it learns.

The value at a token is that of the state in which the token was chosen: it is read from the hidden state of
the place before, as the token's probability is. It is in units of reward, in float32 whatever the model.

A critic of kind "model" is a copy of the policy's decoder with a linear head of its own. One of kind "head"
is that head alone, on what the policy makes of the tokens at the time; no gradient enters the policy.
The head starts at 0, so that the first advantages are the rewards themselves.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from itertools import count, repeat
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn

from ludus.algos import by_token, value_loss
from ludus.core.failures import LudusError
from ludus.model import decoder_of, images_of, sampling_mode
from ludus.model.images import PlacedFeatures, placed_features
from ludus.training.config.rl import CriticConfig
from ludus.training.data.batch import Batch
from ludus.training.data.micro_batches import MicroBatch, micro_batches, take_rows, to_device
from ludus.training.optim.accumulation import measured
from ludus.training.optim.learner import Updater
from ludus.training.optim.logprobs import at_places, compute, packed_states, shares_prefixes
from ludus.training.optim.shard_files import read_shards, write_shards
from ludus.training.optim.sharding import group_of, named_weights

FILE = "critic.safetensors"
NAMES = {
    "loss": "value_loss",
    "value_clip_fraction": "value_clip_fraction",
    "gradient_norm": "value_gradient_norm",
    "learning_rate": "value_learning_rate",
}
"""Names of a step's metrics beside the policy's."""


class ValueModel(nn.Module):
    """A linear head, and the decoder under it where that is the critic's own."""

    def __init__(self, policy: nn.Module, own_trunk: bool) -> None:
        super().__init__()
        parameter = next(policy.parameters())
        self.trunk: nn.Module | None = copy.deepcopy(decoder_of(policy)) if own_trunk else None
        width = int(decoder_of(policy).config.hidden_size)
        self.head = nn.Linear(width, 1, device=parameter.device, dtype=torch.float32)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def get_decoder(self) -> nn.Module:
        """The decoder that `hidden_states` runs."""
        assert self.trunk is not None, "a head alone has no decoder"
        return self.trunk

    def get_output_embeddings(self) -> nn.Module:
        return self.head


class Critic:
    """A value function and its optimizer."""

    def __init__(
        self,
        policy: nn.Module,
        config: CriticConfig,
        total_steps: int,
        seed: int = 0,
        model: nn.Module | None = None,
    ) -> None:
        """`model` is the `ValueModel`, which may be sharded; a new one when left out."""
        self.config = config
        self.policy = policy
        self.model = model or ValueModel(policy, own_trunk=config.kind == "model")
        self.updater = Updater(self.model, config.optimizer, total_steps, seed)

    def is_warming_up(self, step: int) -> bool:
        """Whether only the critic learns in this step of RL, counted from 0."""
        return step < (self.config.warmup_steps or 0)

    @torch.no_grad()
    def values(self, batch: Batch) -> Tensor:
        """The value before each token; 0 at the first one of a row, where there is nothing to read from."""
        wanted_T = torch.ones_like(batch.action_T).index_fill(0, batch.first_R, False)
        batch = replace(batch, trained_T=wanted_T)
        budget = self.config.optimizer.micro_batch_tokens
        values_T = torch.zeros(len(batch.tokens_T))
        group = group_of(self.model)
        packed = micro_batches(batch, budget, ranks=group.size, share=self._shares)
        with sampling_mode(self.model):
            for place_A, values_A in measured(packed, budget, group, self.updater.device, self._values):
                values_T[place_A] = values_A.cpu()
        return group.total(values_T)

    def learn(
        self,
        batch: Batch,
        old_T: Tensor,
        returns_T: Tensor,
        parts: Sequence[Sequence[int]],
        at: int | None = None,
    ) -> dict[str, float]:
        """`passes` times over the step's rows, one update for each part; the last pass's mean metrics.

        Args:
            batch: The rows. `trained_T` is where the critic's value was used, and hence has something to learn.
            old_T: Its values before the update.
            returns_T: What they should have been.
            parts: The rows of each update.
            at: The place of the first of these updates in the plan.
        """
        metrics: list[dict[str, float]] = []
        places = count(at) if at is not None else repeat(None)
        for _ in range(self.config.passes):
            metrics = [self._update(batch, old_T, returns_T, part, next(places)) for part in parts]
        self.updater.clear_gradients()
        return {shown: sum(m[name] for m in metrics) / len(metrics) for name, shown in NAMES.items()}

    def _update(
        self, batch: Batch, old_T: Tensor, returns_T: Tensor, rows: Sequence[int], at: int | None
    ) -> dict[str, float]:
        inside_T = batch.row_mask(rows) & batch.trained_T
        weights_T = by_token(torch.zeros(len(inside_T), dtype=torch.long), inside_T)
        batch = replace(batch, trained_T=inside_T, weights_T=weights_T)
        lengths, updater = batch.lengths, self.updater
        budget = updater.micro_batch_tokens(lengths[i] for i in rows)

        def loss(part: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
            source_A = part.source_index_A.cpu()
            old_A, returns_A = (
                to_device(take_rows(one_T, source_A), updater.device) for one_T in (old_T, returns_T)
            )
            return value_loss(self._values(part), old_A, returns_A, bound=self.config.clip)

        packed = micro_batches(batch, budget, rows, updater.group.size, share=self._shares)
        return updater.optimizer_step(packed, loss, at=at)

    def _values(self, batch: MicroBatch) -> Tensor:
        """The value before each trained token: it is read from the hidden state of the token before it."""
        if self.config.kind == "model":
            placed = None
            if (
                images_of(self.policy) is not None
            ):  # the vision part is the policy's; every rank asks for it
                with torch.no_grad(), sampling_mode(self.policy):
                    placed = compute(self.policy, placed_features, batch.images)
            values_U, index_T = compute(self.model, _values_of_tokens, batch, placed)
        else:
            with torch.no_grad(), sampling_mode(self.policy):
                hidden_UD, index_T = compute(self.policy, packed_states, batch)
            values_U = compute(self.model, _values_of_states, hidden_UD)
        return at_places(values_U, index_T, batch.trained_index_A - 1)

    @property
    def _shares(self) -> bool:
        """Whether a prefix that rows share is computed once."""
        runs = [self.policy, self.model] if self.config.kind == "model" else [self.policy]
        return self.config.optimizer.share_prefixes and all(map(shares_prefixes, runs))

    def save(self, folder: Path) -> None:
        """Write it into a checkpoint's folder, beside the policy; where it is sharded, each rank its parts."""
        kind = {"kind": self.config.kind}
        write_shards(folder / FILE, self.tensors(), self.updater.group, kind)

    def load(self, folder: Path) -> None:
        """Go on from what `save` wrote, on however many ranks that was."""
        path = folder / FILE
        if not path.is_file():
            raise LudusError(f"{folder} has no {FILE}: it was written by a stage without a critic")
        with safe_open(str(path), "pt") as opened:
            kind = opened.metadata()["kind"]
        if kind != self.config.kind:
            raise LudusError(
                f"the checkpoint has a critic of kind {kind!r}, and the recipe asks for "
                f"{self.config.kind!r}: set rl.critic.kind to what the run began with"
            )
        tensors = self.tensors()
        read_shards(path, tensors)
        self.updater.take(tensors)

    def tensors(self) -> dict[str, Tensor]:
        """Its weights and its optimizer's state; nothing of the policy."""
        weights = {f"model.{name}": p.detach() for name, p in named_weights(self.model)}
        return weights | self.updater.tensors()


def _values_of_tokens(
    model: ValueModel, batch: MicroBatch, placed: PlacedFeatures | None
) -> tuple[Tensor, Tensor | None]:
    hidden_UD, index_T = packed_states(model, batch, placed)
    return _values_of_states(model, hidden_UD), index_T


def _values_of_states(model: ValueModel, hidden_UD: Tensor) -> Tensor:
    values_U1: Tensor = model.head(hidden_UD.float())
    return values_U1.sum(1)


def explained_variance(values_A: Tensor, returns_A: Tensor) -> float | None:
    """1 - var(returns - values) / var(returns); None where the returns do not vary.

    1 is a perfect critic, 0 one that is no better than a constant, and below 0 it is worse than that.
    """
    spread = float(returns_A.var(correction=0))
    if spread == 0:
        return None
    return 1 - float((returns_A - values_A).var(correction=0)) / spread
