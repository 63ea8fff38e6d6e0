"""One step of reinforcement learning, from played groups to weight updates.

    policy_rows     on rank 0: trajectories -> `Batch` and `AdvantageInputs`: rows, rewards, turns, anchors
    logprobs        the log-probabilities that ratios start from; a critic's values; the KL penalty, where it is
                    part of the reward
    advantages      over the whole step; then the critic learns its returns
    updates         the step's groups split into mini-batches, one optimizer step on each; so for each epoch

Everything up to the advantages happens once, under the weights that played, so that splitting a step into
updates changes neither a baseline nor a normalisation.

Rows whose advantages are all 0 have no gradient, unless a KL penalty or an entropy bonus gives them one. They
skip the backward pass, and not the metrics: for these they get a forward pass without gradient. So a metric
means the same with and without `kl`, and in a step with little signal as in any other.

Metrics are means over tokens, and some are made from several of them (`of_update`): the effective sample sizes;
and how far engine and trainer differ, which is over the tokens that the very weights that are trained have
sampled. An asynchronous run has older tokens beside them: a difference there is what has been learned since.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from ludus.algos import (
    AdvantageInputs,
    Algorithm,
    LossInputs,
    Need,
    action_span,
    effective_sample_size,
    k1,
    k3,
    kl_reward,
    load_algorithm,
    with_regularization,
)
from ludus.algos.advantage_inputs import size_within, sum_within, token_rewards
from ludus.algos.losses import clamped_log_ratio
from ludus.core.failures import ConfigError
from ludus.training.config.rl import RLConfig
from ludus.training.data.batch import Batch, advantage_inputs
from ludus.training.data.micro_batches import MicroBatch
from ludus.training.data.rollout_batch import RolloutBatch
from ludus.training.optim.critic import Critic, explained_variance
from ludus.training.optim.learner import TOKENS, Learner, Metrics
from ludus.training.optim.logprobs import action_logprobs

OLD_KL = "kl_old_k3"
"""The metric that `target_kl` limits."""
DIFFERENCE = "logprob_difference"
_SHARES = {"ess": ("sum", "squares"), "ess_sequence": ("sum", "squares", "count")}
"""Metrics of a whole update, and the per-token numbers whose means they are made from."""
_OF_A_STEP = ("loss", "gradient_norm", "learning_rate")
"""Metrics that an optimizer step has one of, however many tokens it saw."""
_OF_REFUSED = ("kl_old_k1", OLD_KL, TOKENS)
"""The metrics of an update that `target_kl` refused: why, and the weight of that in the mean."""


class TokenNotes:
    """Numbers of trained tokens, as micro-batches compute them, by their places among all tokens."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens
        self._found: list[tuple[Tensor, Tensor]] = []

    def add(self, place_A: Tensor, value_A: Tensor) -> None:
        """Keep them on their device; a micro-batch that is computed again replaces what it said before."""
        self._found.append((place_A, value_A.detach()))

    def on_host(self) -> Tensor:
        """All of them on the host; not a number where there is none."""
        values_T = torch.full((self._tokens,), torch.nan)
        if self._found:
            place_A, value_A = (torch.cat(parts) for parts in zip(*self._found, strict=True))
            values_T[place_A.cpu()] = value_A.float().cpu()
        return values_T


@dataclass(frozen=True, slots=True)
class PolicyObjective:
    """The loss of a micro-batch: the algorithm's policy loss, a KL penalty, an entropy bonus."""

    algorithm: Algorithm
    config: RLConfig
    reference: nn.Module | None
    """The reference model, where the KL penalty is part of the loss."""
    temperature: float
    entropies: TokenNotes | None = None
    """Where to note the entropies of the trained tokens."""
    compared_T: Tensor | None = None
    """The tokens that the weights that are trained have sampled, before they change: where engine and trainer
    can be compared."""

    @property
    def has_other_terms(self) -> bool:
        """Whether tokens have a gradient even where their advantage is 0."""
        return (self.reference is not None and self.config.kl.weight > 0) or self.config.entropy > 0

    def __call__(
        self, logprobs_A: Tensor, entropy_A: Tensor, batch: MicroBatch
    ) -> tuple[Tensor, Metrics]:
        config = self.config
        if self.entropies is not None:
            self.entropies.add(batch.source_index_A, entropy_A)
        if config.starts_at_training_pass:
            batch = replace(batch, old_logprobs_A=logprobs_A.detach())
        loss_A, metrics = self.algorithm.loss(
            LossInputs(
                logprobs_A=logprobs_A,
                old_logprobs_A=batch.old_logprobs_A,
                advantages_A=batch.advantages_A,
                row_A=batch.row_A,
                rollout_logprobs_A=batch.rollout_logprobs_A,
            )
        )
        metrics |= comparison(logprobs_A.detach(), batch)
        if self.compared_T is not None:
            same_A = self.compared_T[batch.source_index_A]
            metrics |= difference(logprobs_A.detach() - batch.rollout_logprobs_A, same_A)
        if self.reference is not None:
            with torch.no_grad():
                reference_A, _ = action_logprobs(self.reference, batch, self.temperature)
            metrics["kl"] = self.algorithm.divergence(logprobs_A, reference_A)
            loss_A = with_regularization(loss_A, kl_A=metrics["kl"], kl_weight=config.kl.weight)
        loss_A = with_regularization(loss_A, entropy_A=entropy_A, entropy_weight=config.entropy)
        return loss_A, metrics


def of_update(metrics: dict[str, float]) -> dict[str, float]:
    """The metrics of an update, from the means over its tokens; nothing from none."""
    found = dict(metrics)
    for name, parts in _SHARES.items() if metrics else ():
        found[name] = effective_sample_size(*(found.pop(f"{name}/{one}") for one in parts))
    share = found.pop(f"{DIFFERENCE}_share", None)
    if share:
        found[f"{DIFFERENCE}_mean"] /= share
    elif share is not None:  # no token was sampled by these weights
        del found[f"{DIFFERENCE}_mean"], found[f"{DIFFERENCE}_max"]
    return found


def sampled_by(batch: Batch, version: int | None) -> Tensor:
    """Which tokens a version of the policy has sampled; one whose version is not known may be."""
    if version is None:
        return batch.action_T
    return batch.action_T & ((batch.version_T == version) | (batch.version_T < 0))


def comparison(logprobs_A: Tensor, batch: MicroBatch) -> dict[str, Tensor]:
    """How far the weights are from those that sampled, and from those that the step began with."""
    ratio_A = clamped_log_ratio(logprobs_A - batch.old_logprobs_A).exp()
    return {
        "ratio_mean": ratio_A,
        "ratio_max": ratio_A,
        # the tokens were drawn from the old policy, so that is the first argument of the divergence
        "kl_old_k1": k1(batch.old_logprobs_A, logprobs_A),
        OLD_KL: k3(batch.old_logprobs_A, logprobs_A),
    } | _weights(logprobs_A - batch.rollout_logprobs_A, batch.row_A)


def difference(difference_A: Tensor, same_A: Tensor) -> dict[str, Tensor]:
    """Sums for the differences between engine and trainer, over tokens of the same weights."""
    size_A = difference_A.abs()
    return {
        f"{DIFFERENCE}_mean": torch.where(same_A, size_A, 0.0),
        f"{DIFFERENCE}_max": torch.where(same_A, size_A, -torch.inf),
        f"{DIFFERENCE}_share": same_A.to(size_A.dtype),
    }


def _weights(difference_A: Tensor, row_A: Tensor) -> dict[str, Tensor]:
    """Sums for the effective sample sizes. A row's weight is divided among its tokens."""
    weight_A = clamped_log_ratio(difference_A).exp()
    sequence_A = clamped_log_ratio(sum_within(difference_A, row_A)[row_A]).exp()
    share_A = 1 / size_within(row_A, weight_A.dtype)
    return {
        "ess/sum": weight_A,
        "ess/squares": weight_A**2,
        "ess_sequence/sum": sequence_A * share_A,
        "ess_sequence/squares": sequence_A**2 * share_A,
        "ess_sequence/count": share_A,
    }


def merged(updates: Sequence[dict[str, float]]) -> dict[str, float]:
    """One table for the updates of a step: means over tokens, and the largest of what is a largest."""
    found: dict[str, float] = {}
    for name in dict.fromkeys(name for update in updates for name in update):
        having = [update for update in updates if name in update]
        values = [update[name] for update in having]
        counts = [1.0 if name in _OF_A_STEP else update[TOKENS] for update in having]
        mean = sum(v * n for v, n in zip(values, counts, strict=True)) / sum(counts)
        found[name] = max(values) if name.endswith("_max") else mean
    return found


def algorithm_of(config: RLConfig) -> Algorithm:
    """The algorithm that a recipe names, with its ablation switches."""
    settings = config.algorithm_settings
    if not config.advantage_mask:
        settings["options"] = {**settings["options"], "skip_observations": False}
    return load_algorithm(**settings, divergence=config.kl.estimator)


@dataclass(frozen=True, slots=True)
class PolicyRows:
    """The rows of a step of RL, as every rank gets them."""

    batch: Batch
    inputs: AdvantageInputs
    """What the estimator reads."""
    update_R: Tensor
    """int64: the update of each row."""

    @property
    def parts(self) -> list[list[int]]:
        """The rows of each update."""
        update_R = self.update_R.numpy()
        return [np.flatnonzero(update_R == one).tolist() for one in np.unique(update_R)]


def policy_rows(played: RolloutBatch, config: RLConfig) -> PolicyRows:
    """The rows of the step's scored episodes.

    Failed episodes are neither in the loss nor in any baseline. Masked ones are in the baseline and not in the
    loss (`trained_T`): a critic, which is a baseline, learns from them too.
    """
    scored = [
        (number, (number, place) in played.masked, trajectory)
        for number, group in enumerate(played.groups)
        for place, trajectory in enumerate(group.trajectories)
        if trajectory.is_trainable
    ]
    # a turn that several share is trained with the first of them: with a masked one where all of them are
    scored.sort(key=lambda one: one[:2])
    trajectories = [trajectory for _, _, trajectory in scored]
    groups = [number for number, _, _ in scored]
    masked = [is_masked for _, is_masked, _ in scored]
    batch = Batch.of(trajectories)
    inputs = advantage_inputs(
        batch,
        trajectories,
        groups,
        [played.sets[number] for number in groups],
        train_observations=not config.loss_mask,
        masked=masked,
    )
    # as even as can be, so that there are as many updates as the recipe says
    update_N = [number * config.updates // len(played.groups) for number in groups]
    update_R = torch.tensor(update_N, dtype=torch.long)[batch.trajectory_T[batch.first_R]]
    trained_T = inputs.loss_mask & ~torch.tensor(masked, dtype=torch.bool)[inputs.trajectory_T]
    return PolicyRows(replace(batch, trained_T=trained_T), inputs, update_R)


def policy_update(
    learner: Learner,
    rows: PolicyRows,
    config: RLConfig,
    *,
    reference: nn.Module | None,
    critic: Critic | None,
    algorithm: Algorithm | None = None,
    critic_only: bool = False,
    kl: float | None = None,
    step: int | None = None,
    version: int | None = None,
) -> dict[str, float]:
    """The updates of one step, and their metrics. One that has nothing to teach changes nothing, and has none.

    Args:
        learner: The policy and its optimizer.
        rows: The step's rows (`policy_rows`).
        config: The algorithm and everything around it.
        reference: The reference model of the KL penalty; needed where `config.kl.weight` is above 0.
        critic: The value function; needed where the algorithm needs one.
        algorithm: `algorithm_of(config)`, where the caller has it already.
        critic_only: Leave the policy as it is, as in a critic's warm-up.
        kl: The KL coefficient where it is not `config.kl.weight`, as when it adapts.
        step: The step of RL, counted from 0, for the learning rates; when left out, all updates were taken.
        version: The version of the policy that is trained. Engine and trainer are compared on the tokens that
            it has sampled, and on all where it is left out.
    """
    if kl is not None:
        config = config.model_copy(update={"kl": config.kl.model_copy(update={"weight": kl})})
    algorithm = algorithm or algorithm_of(config)
    if config.kl.weight and reference is None:
        raise ValueError("rl.kl weighs the divergence from a reference, and none was given")
    if critic is None and Need.CRITIC in algorithm.needs:
        raise ValueError(f"{config.algorithm.name} needs a critic, and none was given")
    learner.clear_gradients()  # a critic may need their room
    batch, inputs, parts = rows.batch, rows.inputs, rows.parts
    if not len(batch):
        return {}
    batch = _with_old_logprobs(learner, batch, inputs, config)
    _check_sampled(batch)
    metrics: dict[str, float] = {}
    if reference is not None and config.kl.place == "reward":
        inputs, metrics["kl"] = _with_kl_penalty(learner, batch, inputs, config, algorithm, reference)
        reference = None
    if critic is not None:
        inputs = replace(inputs, values_T=critic.values(batch))
    advantages = algorithm.estimate(inputs)
    batch = replace(batch, advantages_T=advantages.advantages_T)
    note_on_actions(batch, "advantages", batch.advantages_T)
    if critic is not None and advantages.returns_T is not None:
        metrics |= _update_critic(critic, batch, inputs, advantages.returns_T, parts, config, step)
    if critic_only:
        return metrics
    idle_A = batch.advantages_T[batch.trained_T] == 0
    metrics["no_signal"] = float(idle_A.all())
    metrics["without_advantage"] = float(idle_A.float().mean()) if len(idle_A) else 1.0
    objective = PolicyObjective(
        algorithm,
        config,
        reference,
        learner.temperature,
        entropies=TokenNotes(len(batch.trained_T)),
        compared_T=sampled_by(batch, version).to(learner.device),
    )
    found = _update_epochs(learner, batch, parts, objective, step)
    return metrics | found if TOKENS in found or critic is not None else {}


def _with_old_logprobs(
    learner: Learner, batch: Batch, inputs: AdvantageInputs, config: RLConfig
) -> Batch:
    """The log-probabilities when it was sampled (the engine's), and before any update (the trainer's).

    They are the same unless an importance correction compares them. No engine sampled the observations, so
    there both are the trainer's.
    """
    if config.starts_at_training_pass:
        return batch  # `PolicyObjective` has the old policy's
    compares = config.importance_correction is not None
    needed_T = inputs.loss_mask if compares else inputs.loss_mask & ~inputs.action_T
    if not bool(needed_T.any()):
        return batch
    found_T = learner.logprobs(replace(batch, trained_T=needed_T))
    rollout_T = torch.where(inputs.action_T, batch.rollout_logprobs_T, found_T)
    return replace(
        batch, rollout_logprobs_T=rollout_T, old_logprobs_T=found_T if compares else rollout_T
    )


def _check_sampled(batch: Batch) -> None:
    """Without the log-probabilities of what was sampled there is no importance ratio."""
    sampled_A = batch.rollout_logprobs_T[batch.action_T]
    unknown = int((~sampled_A.isfinite()).sum())
    if unknown:
        raise ConfigError(
            f"the engine reported no log-probability for {unknown} of {len(sampled_A)} sampled tokens, "
            "as servers that answer in text do not: such episodes can be evaluated and imitated (sft, "
            "rejection), not reinforced"
        )


def _with_kl_penalty(
    learner: Learner,
    batch: Batch,
    inputs: AdvantageInputs,
    config: RLConfig,
    algorithm: Algorithm,
    reference: nn.Module,
) -> tuple[AdvantageInputs, float]:
    """The KL penalty as a reward of each action token; also its mean."""
    action_T, divergence = batch.action_T, algorithm.divergence
    reference_T = learner.logprobs(replace(batch, trained_T=action_T), reference)
    old_A, reference_A = batch.old_logprobs_T[action_T], reference_T[action_T]
    penalty_T = kl_reward(old_A, reference_A, action_T, beta=config.kl.weight, divergence=divergence)
    return replace(inputs, penalty_T=penalty_T), float(divergence(old_A, reference_A).mean())


def note_on_actions(batch: Batch, name: Literal["advantages", "entropies"], values_T: Tensor) -> None:
    """Write numbers of tokens onto the actions that were trained on, for readers of the episodes."""
    known_A = (batch.trained_T & ~values_T.isnan())[batch.action_T].numpy()
    values_A = values_T.detach().float()[batch.action_T].numpy()
    ends = np.cumsum([len(turn.tokens) for turn in batch.turns])[:-1]
    pieces = zip(batch.turns, np.split(values_A, ends), np.split(known_A, ends), strict=False)
    for turn, values, known in pieces:
        if known.all():
            setattr(turn, name, values.tolist())


def _update_critic(
    critic: Critic,
    batch: Batch,
    inputs: AdvantageInputs,
    returns_T: Tensor,
    parts: Sequence[Sequence[int]],
    config: RLConfig,
    step: int | None,
) -> dict[str, float]:
    """Let the critic learn the returns, wherever its value was used."""
    used_T = inputs.action_T
    if not config.advantage_mask:
        used_T = action_span(inputs.trajectory_T, inputs.action_T, len(inputs.rewards_N))
        # before the first token of a row there is nothing to read a value from
        used_T = used_T.index_fill(0, batch.first_R, False)
    assert inputs.values_T is not None
    metrics: dict[str, float] = {}
    paid_N = sum_within(token_rewards(inputs), inputs.trajectory_T, len(inputs.rewards_N))
    if bool((paid_N != paid_N[0]).any()):  # else returns differ by the critic's own values alone
        explained = explained_variance(inputs.values_T[used_T], returns_T[used_T])
        metrics = {} if explained is None else {"explained_variance": explained}
    at = None if step is None else step * config.updates * critic.config.passes
    used = replace(batch, trained_T=used_T)
    return metrics | critic.learn(used, inputs.values_T, returns_T, parts, at)


def _update_epochs(
    learner: Learner,
    batch: Batch,
    parts: Sequence[Sequence[int]],
    objective: PolicyObjective,
    step: int | None,
) -> dict[str, float]:
    """All updates of the step: each part of the rows, once an epoch. Stops where `target_kl` is passed."""
    config, entropies = objective.config, objective.entropies
    measured: list[dict[str, float]] = []
    before = None if step is None else config.updates_before(step)
    for place, part in enumerate(part for _ in range(config.epochs) for part in parts):
        if place == 1:  # the weights have changed: engine and trainer differ by what was learned
            objective = replace(objective, compared_T=None)
        if place == len(parts):
            objective = replace(objective, entropies=None)
        # the first update is always taken: it starts where the samples come from
        limit = config.target_kl if any(map(_is_taken, measured)) else None
        at = None if before is None else before + place
        measured.append(_update_part(learner, batch, part, objective, limit, at))
        if limit is not None and measured[-1].get(OLD_KL, 0.0) > limit:
            measured[-1] = {name: measured[-1][name] for name in _OF_REFUSED}
            break
    if entropies is not None:
        note_on_actions(batch, "entropies", entropies.on_host())
    found = merged([one for one in measured if one])
    found["updates"] = float(sum(map(_is_taken, measured)))
    if any(measured):
        found[TOKENS] = float(batch.trained_T.sum())  # of the batch, whatever the epochs
    return found


def _is_taken(update: dict[str, float]) -> bool:
    """Whether an update changed the weights."""
    return "gradient_norm" in update


def _update_part(
    learner: Learner,
    batch: Batch,
    part: Sequence[int],
    objective: PolicyObjective,
    limit: float | None,
    at: int | None,
) -> dict[str, float]:
    """One optimizer step on one part, and the metrics of all its rows; no step where nothing has a gradient.

    Nor is there one where the policy has left the one that the step began with by more than `limit`.
    """
    inside_T = batch.trained_T & batch.row_mask(part)
    weights_T = objective.algorithm.weigh(batch.trajectory_T, inside_T)
    # rows without a gradient keep their weight in the average, so skipping them changes nothing
    has_gradient_T = inside_T if objective.has_other_terms else inside_T & (batch.advantages_T != 0)
    learned = batch.rows_with(has_gradient_T, part)
    metrics = learner.step_on(
        replace(batch, trained_T=inside_T, weights_T=weights_T),
        objective,
        at=at,
        rows=learned,
        measured=sorted(set(part) - set(learned)),
        limits=None if limit is None else {OLD_KL: limit},
    )
    return of_update(metrics)
