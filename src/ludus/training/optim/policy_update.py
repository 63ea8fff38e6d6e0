"""From trajectories to weight updates: supervised fine-tuning, and reinforcement learning.

A step of RL::

    experience   rows of every scored episode, rewards, turns, anchors; the log-probabilities where ratios start
                 from; a critic's values; the KL penalty, where it is part of the reward
    advantages   over the whole step; then the critic learns its returns
    updates      the step's groups split into mini-batches, one optimizer step on each; so for each epoch

Everything up to the advantages happens once, under the weights that played, so that splitting a step into
updates changes neither a baseline nor a normalisation.

Rows whose advantages are all 0 have no gradient, unless a KL penalty or an entropy bonus gives them one. They
skip the backward pass, and not the metrics: for these they get a forward pass without gradient. So a metric
means the same with and without `kl`, and in a step with little signal as in any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from ludus.algos import (
    AdvantageInputs,
    Advantages,
    Algorithm,
    LossInputs,
    Need,
    action_span,
    by_token,
    kl_reward,
    load_algorithm,
    load_divergence,
    with_regularization,
)
from ludus.algos.advantage_inputs import sum_within, token_rewards
from ludus.core.failures import ConfigError
from ludus.core.trajectory import Trajectory
from ludus.training.config.rl import RLConfig
from ludus.training.data.packing import (
    Columns,
    Pack,
    Row,
    advantage_inputs,
    concat_masks,
    engine_logprobs,
    packs_of,
    row_mask,
    rows_of,
    trajectory_ids,
)
from ludus.training.optim.critic import Critic, ValueTargets, explained_variance
from ludus.training.optim.learner import TOKENS, Learner
from ludus.training.optim.logprobs import action_logprobs, logprobs_of
from ludus.training.optim.update_metrics import (
    OLD_KL,
    comparison,
    difference,
    merged,
    of_update,
    sampled_by,
)
from ludus.training.rollout_worker import RolloutBatch


def sft_step(
    learner: Learner, trajectories: Sequence[Trajectory], at: int | None = None
) -> dict[str, float]:
    """One step of supervised fine-tuning on the actions of these episodes; `at` is its place in the plan."""
    rows = rows_of(trajectories)
    action_T = concat_masks(row.action_mask for row in rows)
    weights_T = by_token(trajectory_ids(rows), action_T)
    columns = Columns.of(rows, torch.zeros_like(weights_T), weights_T)
    budget = learner.micro_batch_tokens(len(row.tokens) for row in rows)
    packs = packs_of(rows, columns, budget, ranks=learner.group.size, share=learner.shares_prefixes)
    return learner.step(packs, _negative_log_likelihood, at=at)


def _negative_log_likelihood(
    logprobs_A: Tensor, entropy_A: Tensor, pack: Pack
) -> tuple[Tensor, dict[str, Tensor]]:
    return -logprobs_A, {}


def algorithm_of(config: RLConfig) -> Algorithm:
    """The algorithm that a recipe names, with its ablation switches."""
    settings = config.algorithm_settings
    algorithm = load_algorithm(**settings)
    if config.advantage_mask:
        return algorithm
    return load_algorithm(**settings | {"options": {**settings["options"], "skip_observations": False}})


@dataclass(frozen=True, slots=True)
class Experience:
    """The scored episodes of a step, in tensors, taken under the weights that played."""

    rows: list[Row]
    inputs: AdvantageInputs
    trained_T: Tensor
    """Where the loss applies: not at masked episodes, which are in the inputs nevertheless."""
    rollout_logprobs_T: Tensor
    """Log-probabilities as the engine reported them when it sampled."""
    old_logprobs_T: Tensor
    """Log-probabilities where importance ratios start from."""
    parts: list[list[int]]
    """The rows of each update."""


def make_experience(learner: Learner, played: RolloutBatch, config: RLConfig) -> Experience:
    """The step's scored episodes, masked or not; failed ones are not among them."""
    scored = [
        (number, (number, place) in played.masked, trajectory)
        for number, group in enumerate(played.groups)
        for place, trajectory in enumerate(group.trajectories)
        if trajectory.is_trainable
    ]
    # what several have is trained with the first of them: with a masked one where all of them are
    scored.sort(key=lambda one: one[:2])
    trajectories = [trajectory for _, _, trajectory in scored]
    groups = [number for number, _, _ in scored]
    masked = [is_masked for _, is_masked, _ in scored]
    rows = rows_of(trajectories)
    inputs = advantage_inputs(
        rows,
        trajectories,
        groups,
        [played.sets[number] for number in groups],
        train_observations=not config.loss_mask,
        masked=masked,
    )
    masked_N = torch.tensor(masked, dtype=torch.bool)
    rollout_logprobs_T, old_logprobs_T = _old_logprobs(learner, rows, inputs, config)
    parts: list[list[int]] = [[] for _ in range(config.updates)]
    for i, row in enumerate(rows):
        # as even as can be, so that there are as many updates as the recipe says
        parts[groups[row.trajectory] * config.updates // len(played.groups)].append(i)
    return Experience(
        rows=rows,
        inputs=inputs,
        trained_T=inputs.loss_mask & ~masked_N[inputs.trajectory_T],
        rollout_logprobs_T=rollout_logprobs_T,
        old_logprobs_T=old_logprobs_T,
        parts=[part for part in parts if part],
    )


def _old_logprobs(
    learner: Learner, rows: Sequence[Row], inputs: AdvantageInputs, config: RLConfig
) -> tuple[Tensor, Tensor]:
    """(rollout_logprobs_T, old_logprobs_T): the engine's when it sampled, the trainer's before any update.

    They are the same unless an importance correction compares them. Nobody sampled the observations, so there
    both are the trainer's.
    """
    sampled_T = engine_logprobs(rows)
    if config.starts_at_training_pass:
        return sampled_T, sampled_T  # `PolicyObjective` has the old policy's
    compares = config.importance_correction is not None
    needed_T = inputs.loss_mask if compares else inputs.loss_mask & ~inputs.action_T
    if not bool(needed_T.any()):
        return sampled_T, sampled_T
    budget = learner.config.micro_batch_tokens
    share = learner.config.share_prefixes
    found_T = logprobs_of(learner.model, rows, needed_T, learner.temperature, budget, share=share)
    rollout_logprobs_T = torch.where(inputs.action_T, sampled_T, found_T)
    return rollout_logprobs_T, found_T if compares else rollout_logprobs_T


def _check_sampled(experience: Experience) -> None:
    """Without the log-probabilities of what was sampled there is no importance ratio."""
    sampled_A = experience.rollout_logprobs_T[experience.inputs.action_T]
    unknown = int((~sampled_A.isfinite()).sum())
    if unknown:
        raise ConfigError(
            f"the engine reported no log-probability for {unknown} of {len(sampled_A)} tokens that were said, "
            "as servers that answer in text do not: such episodes can be evaluated and imitated (sft, "
            "rejection), not reinforced"
        )


def with_kl_penalty(
    experience: Experience, learner: Learner, config: RLConfig, reference: nn.Module
) -> tuple[Experience, float]:
    """The KL penalty as a reward of each action token; also its mean."""
    action_T, budget = experience.inputs.action_T, learner.config.micro_batch_tokens
    share, temperature = learner.config.share_prefixes, learner.temperature
    reference_T = logprobs_of(reference, experience.rows, action_T, temperature, budget, share=share)
    divergence = load_divergence(config.kl_estimator)
    old_A, reference_A = experience.old_logprobs_T[action_T], reference_T[action_T]
    penalty_T = kl_reward(old_A, reference_A, action_T, beta=config.kl, divergence=divergence)
    kl = float(divergence(old_A, reference_A).mean())
    return replace(experience, inputs=replace(experience.inputs, penalty_T=penalty_T)), kl


def policy_update(
    learner: Learner,
    played: RolloutBatch,
    config: RLConfig,
    *,
    reference: nn.Module | None,
    critic: Critic | None,
    critic_only: bool = False,
    kl: float | None = None,
    step: int | None = None,
    version: int | None = None,
) -> dict[str, float]:
    """The updates of one step, and their metrics.

    Failed episodes are neither in the loss nor in any baseline. Masked ones are in the baseline and not in the
    loss: a critic, which is a baseline, learns from them too. A step that has nothing to teach changes
    nothing, and its metrics are empty.

    Args:
        learner: The policy and its optimizer.
        played: The step's groups.
        config: The algorithm and everything around it.
        reference: The reference model of the KL penalty; needed where `config.kl` is above 0.
        critic: The value function; needed where the algorithm needs one.
        critic_only: Leave the policy as it is, as in a critic's warm-up.
        kl: The KL coefficient where it is not `config.kl`, as when it adapts.
        step: The step of RL, counted from 0, for the learning rates; when left out, all updates were taken.
        version: The version of the policy that is trained. Engine and trainer are compared on the tokens that
            it has sampled, and on all where it is left out.
    """
    config = config if kl is None else config.model_copy(update={"kl": kl})
    algorithm = algorithm_of(config)
    if config.kl and reference is None:
        raise ValueError("rl.kl weighs the divergence from a reference, and none was given")
    if critic is None and Need.CRITIC in algorithm.needs:
        raise ValueError(f"{config.algorithm} needs a critic, and none was given")
    learner.clear_gradients()  # a critic may need their room
    experience = make_experience(learner, played, config)
    if not experience.rows:
        return {}
    _check_sampled(experience)
    metrics: dict[str, float] = {}
    if reference is not None and config.kl_in == "reward":
        experience, metrics["kl"] = with_kl_penalty(experience, learner, config, reference)
        reference = None
    if critic is not None:
        experience = replace(
            experience, inputs=replace(experience.inputs, values_T=critic.values(experience.rows))
        )
    advantages = algorithm.estimate(experience.inputs)
    note_on_actions(experience, "advantages", advantages.advantages_T)
    if critic is not None and advantages.returns_T is not None:
        metrics |= _update_critic(critic, experience, advantages.returns_T, config, step)
    if critic_only:
        return metrics
    idle_A = advantages.advantages_T[experience.trained_T] == 0
    metrics["no_signal"] = float(idle_A.all())
    metrics["without_advantage"] = float(idle_A.float().mean()) if len(idle_A) else 1.0
    objective = PolicyObjective(algorithm, config, reference, learner.temperature)
    entropies = TokenNotes(len(experience.trained_T))
    compared_T = sampled_by(experience.rows, version).to(learner.device)
    measured: list[dict[str, float]] = []
    before = None if step is None else config.updates_before(step)
    for place, part in enumerate(part for _ in range(config.epochs) for part in experience.parts):
        # the first update is always taken: it starts where the samples come from
        limit = config.target_kl if any(map(_is_taken, measured)) else None
        noting = replace(
            objective,
            entropies=entropies if len(measured) < len(experience.parts) else None,
            compared_T=None if measured else compared_T,
        )
        at = None if before is None else before + place
        measured.append(_update(learner, experience, advantages, part, noting, limit, at))
        if limit is not None and measured[-1].get(OLD_KL, 0.0) > limit:
            measured[-1] = {name: measured[-1][name] for name in _OF_REFUSED}
            break
    note_on_actions(experience, "entropies", entropies.on_host())
    found = merged([one for one in measured if one])
    found["updates"] = float(sum(map(_is_taken, measured)))
    if any(measured):
        found[TOKENS] = float(experience.trained_T.sum())  # of the batch, whatever the epochs
    return metrics | found if any(measured) or critic is not None else {}


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


def note_on_actions(
    experience: Experience, name: Literal["advantages", "entropies"], values_T: Tensor
) -> None:
    """Write numbers of tokens onto the actions that were trained on, for whoever looks at the episodes."""
    known_T = (experience.trained_T & ~values_T.isnan()).numpy()
    values = values_T.detach().float().numpy()
    start = 0
    for row in experience.rows:
        own = slice(start, start + len(row.tokens))
        start = own.stop
        places = np.flatnonzero(np.array(row.action_mask)) + own.start
        if not known_T[places].all():
            continue
        ends = list(accumulate(len(turn.tokens) for turn in row.turns))
        for turn, part in zip(row.turns, np.split(values[places], ends[:-1]), strict=True):
            setattr(turn, name, part.tolist())


_OF_REFUSED = ("kl_old_k1", OLD_KL, TOKENS)
"""The metrics of an update that `target_kl` refused: why, and the weight of that in the mean."""


def _is_taken(update: dict[str, float]) -> bool:
    """Whether an update changed the weights."""
    return "gradient_norm" in update


def _update_critic(
    critic: Critic, experience: Experience, returns_T: Tensor, config: RLConfig, step: int | None
) -> dict[str, float]:
    """Let the critic learn the returns, wherever its value was used."""
    inputs, used_T = experience.inputs, experience.inputs.action_T
    if not config.advantage_mask:
        used_T = action_span(inputs.trajectory_T, inputs.action_T, len(inputs.rewards_N))
        # before the first token of a row there is nothing to read a value from
        used_T = used_T & ~concat_masks(
            [True] + [False] * (len(row.tokens) - 1) for row in experience.rows
        )
    assert inputs.values_T is not None
    metrics: dict[str, float] = {}
    paid_N = sum_within(token_rewards(inputs), inputs.trajectory_T, len(inputs.rewards_N))
    if bool((paid_N != paid_N[0]).any()):  # else returns differ by the critic's own values alone
        explained = explained_variance(inputs.values_T[used_T], returns_T[used_T])
        metrics = {} if explained is None else {"explained_variance": explained}
    targets = ValueTargets(used_T, inputs.values_T, returns_T)
    at = None if step is None else step * config.updates * critic.config.passes
    return metrics | critic.learn(experience.rows, targets, experience.parts, at)


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
        return (self.reference is not None and self.config.kl > 0) or self.config.entropy > 0

    def __call__(
        self, logprobs_A: Tensor, entropy_A: Tensor, pack: Pack
    ) -> tuple[Tensor, dict[str, Tensor]]:
        config = self.config
        if self.entropies is not None:
            self.entropies.add(pack.source_index_A, entropy_A)
        if config.starts_at_training_pass:
            pack = replace(pack, old_logprobs_A=logprobs_A.detach())
        loss_A, metrics = self.algorithm.loss(
            LossInputs(
                logprobs_A=logprobs_A,
                old_logprobs_A=pack.old_logprobs_A,
                advantages_A=pack.advantages_A,
                row_A=pack.row_A,
                rollout_logprobs_A=pack.rollout_logprobs_A,
            )
        )
        metrics |= comparison(logprobs_A.detach(), pack)
        if self.compared_T is not None:
            same_A = self.compared_T[pack.source_index_A]
            metrics |= difference(logprobs_A.detach() - pack.rollout_logprobs_A, same_A)
        if self.reference is not None:
            with torch.no_grad():
                reference_A, _ = action_logprobs(self.reference, pack, self.temperature)
            metrics["kl"] = load_divergence(config.kl_estimator)(logprobs_A, reference_A)
            loss_A = with_regularization(loss_A, kl_A=metrics["kl"], kl_weight=config.kl)
        loss_A = with_regularization(loss_A, entropy_A=entropy_A, entropy_weight=config.entropy)
        return loss_A, metrics


def _update(
    learner: Learner,
    experience: Experience,
    advantages: Advantages,
    part: Sequence[int],
    objective: PolicyObjective,
    limit: float | None,
    at: int | None,
) -> dict[str, float]:
    """One optimizer step on one part, and the metrics of all its rows; no step where nothing has a gradient.

    Nor is there one where the policy has left the one that the step began with by more than `limit`.
    """
    inside_T = experience.trained_T & row_mask(experience.rows, part)
    weights_T = objective.algorithm.weigh(experience.inputs.trajectory_T, inside_T)
    columns = Columns(
        inside_T,
        experience.rollout_logprobs_T,
        experience.old_logprobs_T,
        advantages.advantages_T,
        weights_T,
    )
    # rows without a gradient keep their weight in the average, so skipping them changes nothing
    has_gradient_T = inside_T if objective.has_other_terms else inside_T & (advantages.advantages_T != 0)
    pieces = torch.split(has_gradient_T, [len(row.tokens) for row in experience.rows])
    learned = [i for i in part if bool(pieces[i].any())]
    others = sorted(set(part) - set(learned))
    budget = learner.micro_batch_tokens(len(experience.rows[i].tokens) for i in learned)
    plain, ranks, share = learner.config.micro_batch_tokens, learner.group.size, learner.shares_prefixes
    metrics = learner.step(
        packs_of(experience.rows, columns, budget, learned, ranks, share=share),
        objective,
        at=at,
        measured=packs_of(experience.rows, columns, plain, others, ranks, share=share),
        limits=None if limit is None else {OLD_KL: limit},
    )
    return of_update(metrics)
