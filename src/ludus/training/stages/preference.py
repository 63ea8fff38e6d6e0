"""Preference losses: DPO, IPO, SimPO on pairs of episodes, KTO on single ones with a label.

Write log p(y) for the sum of an episode's action log-probabilities under the policy, log q(y) under the
reference, |y| for its action tokens, w for the preferred and l for the rejected episode of a pair:

    dpo     -log sigmoid(beta (r(w) - r(l)))                   with r(y) = log p(y) - log q(y)
    ipo     (r(w)/|w| - r(l)/|l| - 1 / (2 beta))^2             over the mean per token, as TRL has it
    simpo   -log sigmoid(beta (log p(w)/|w| - log p(l)/|l|) - gamma)             without a reference
    kto     weight_y (1 - sigmoid(±beta (r(y) - z0)))          + for desirable episodes, - for others

each the mean over the pairs or episodes. KTO's reference point z0 = max(0, mean r(y')) estimates
KL(policy || reference): y' is the answer of the next episode of the batch after the prompt of this one.

Episodes are long and many make a step, so they do not share one graph. A first pass without gradient finds
every log p(y); the loss is a function of these few numbers, and its derivative by each of them weights the
tokens of a second pass. The gradient is that of the formula, whatever the micro-batches.

Rafailov et al., "Direct Preference Optimization", 2023, arXiv:2305.18290. Azar et al., "A General Theoretical
Paradigm to Understand Learning from Human Preferences" (IPO), 2023, arXiv:2310.12036. Meng et al., "SimPO:
Simple Preference Optimization with a Reference-Free Reward", 2024, arXiv:2405.14734. Ethayarajh et al., "KTO:
Model Alignment as Prospect Theoretic Optimization", 2024, arXiv:2402.01306.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from ludus.core.failures import ConfigError
from ludus.core.random import key
from ludus.core.trajectory import Group, Segment, SegmentKind, TokenSequence, Trajectory
from ludus.model import context_limit
from ludus.observe import rollout_metrics
from ludus.training.checkpoint import load_state
from ludus.training.config.parts import Parts, errors_at
from ludus.training.config.recipe import Recipe
from ludus.training.config.rl import RolloutSettings
from ludus.training.config.stages import PreferenceConfig
from ludus.training.controller import NextBatch, step_by_step
from ludus.training.data.batch import Batch
from ludus.training.data.conversations import read_labelled, read_pairs, trajectory_of
from ludus.training.data.micro_batches import MicroBatch
from ludus.training.data.tasks import items_of_step
from ludus.training.models.sharded import ModelSource
from ludus.training.optim.learner import Learner
from ludus.training.ranks.steps import StageTrainer, StepSettings
from ludus.training.run_context import RunContext
from ludus.training.stages.base import (
    Stage,
    StepResult,
    check_failures,
    check_readable,
    warn_of_large_batch,
)
from ludus.training.task_sets import tool_specs

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Pair:
    """Two episodes at one task, of which the first is preferred."""

    chosen: Trajectory
    rejected: Trajectory


@dataclass(frozen=True, slots=True)
class Labelled:
    """One episode, and whether it is desirable."""

    trajectory: Trajectory
    good: bool


@dataclass(frozen=True, slots=True)
class Scores:
    """Inputs of a loss, for each episode; pairs stand as chosen, rejected, chosen, ..."""

    policy_N: Tensor
    """log p(y): the sum over the action tokens."""
    reference_N: Tensor
    """log q(y); 0 where a loss has no reference."""
    tokens_N: Tensor
    """|y|: how many action tokens there are."""
    good_N: Tensor
    """Whether the episode is preferred, or desirable."""
    anchor: float = 0.0
    """KTO's z0."""


Loss = Callable[[Scores, PreferenceConfig], tuple[Tensor, Tensor]]
"""(scores, settings) -> the loss of each pair or episode, and the implicit reward of each episode."""


def _sides(values_N: Tensor) -> Tensor:
    """Chosen less rejected, for each pair."""
    return values_N[0::2] - values_N[1::2]


def dpo(scores: Scores, config: PreferenceConfig) -> tuple[Tensor, Tensor]:
    reward_N = config.loss.scale * (scores.policy_N - scores.reference_N)
    return -logsigmoid(_sides(reward_N)), reward_N


def ipo(scores: Scores, config: PreferenceConfig) -> tuple[Tensor, Tensor]:
    ratio_N = (scores.policy_N - scores.reference_N) / scores.tokens_N
    return (_sides(ratio_N) - 1 / (2 * config.loss.scale)) ** 2, config.loss.scale * ratio_N


def simpo(scores: Scores, config: PreferenceConfig) -> tuple[Tensor, Tensor]:
    reward_N = config.loss.scale * scores.policy_N / scores.tokens_N
    return -logsigmoid(_sides(reward_N) - config.loss.gamma), reward_N


def kto(scores: Scores, config: PreferenceConfig) -> tuple[Tensor, Tensor]:
    ratio_N = scores.policy_N - scores.reference_N
    side_N = torch.where(scores.good_N, 1.0, -1.0).to(ratio_N)
    weight_N = torch.where(scores.good_N, config.loss.desirable_weight, config.loss.undesirable_weight)
    value_N = torch.sigmoid(side_N * config.loss.scale * (ratio_N - scores.anchor))
    return weight_N.to(ratio_N) * (1 - value_N), config.loss.scale * ratio_N


LOSSES: dict[str, Loss] = {"dpo": dpo, "ipo": ipo, "simpo": simpo, "kto": kto}


def pairs_of(groups: Sequence[Group], margin: float = 0.0) -> list[Pair]:
    """The best against the worst attempt of each group that differ in reward, by `margin` at least.

    Among equals it is the earlier attempt. One that failed, or never said anything, is in no pair.
    """
    pairs: list[Pair] = []
    for group in groups:
        scored = [
            (trajectory.reward, trajectory)
            for trajectory in group.trainable
            if trajectory.reward is not None and any(action.tokens for action in trajectory.actions)
        ]
        if not scored:
            continue
        best = max(scored, key=lambda pair: pair[0])
        worst = min(scored, key=lambda pair: pair[0])
        if best[0] > worst[0] and best[0] - worst[0] >= margin:
            pairs.append(Pair(best[1], worst[1]))
    return pairs


def labelled_of(pairs: Sequence[Pair]) -> list[Labelled]:
    """Pairs taken apart: all chosen episodes, then all rejected ones; neighbours of several differ in task."""
    return [one for side in zip(*map(_apart, pairs), strict=True) for one in side]


def _apart(given: Pair | Labelled) -> list[Labelled]:
    if isinstance(given, Labelled):
        return [given]
    return [Labelled(given.chosen, True), Labelled(given.rejected, False)]


def has_equal_sides(pair: Pair) -> bool:
    """Whether there is nothing to prefer: the gradients of the two sides cancel."""
    chosen, rejected = Batch.of([pair.chosen]), Batch.of([pair.rejected])
    return chosen.lengths == rejected.lengths and torch.equal(chosen.tokens_T, rejected.tokens_T)


@dataclass(frozen=True, slots=True)
class PreferenceRows:
    """The rows of a step, as every rank gets them."""

    batch: Batch
    """Pairs stand as chosen, rejected, chosen, ..."""
    good_N: Tensor
    """bool: whether the episode is preferred, or desirable."""
    crossed: Batch
    """For KTO: each prompt with the next answer to another."""
    crossings: int
    """How many of these there are."""


def preference_rows(
    given: Sequence[Pair | Labelled], config: PreferenceConfig, limit: int | None
) -> PreferenceRows:
    """The rows of these pairs, or of labelled episodes for KTO; the model reads `limit` tokens at most."""
    labelled = [one for item in given for one in _apart(item)]
    episodes = [one.trajectory for one in labelled]
    good_N = torch.tensor([one.good for one in labelled], dtype=torch.bool)
    crossed = _crossed(episodes, limit) if config.loss.name == "kto" else []
    return PreferenceRows(Batch.of(episodes), good_N, Batch.of(crossed), len(crossed))


def prefer(
    learner: Learner,
    rows: PreferenceRows,
    reference: nn.Module | None,
    config: PreferenceConfig,
    at: int | None = None,
) -> dict[str, float]:
    """One step on pairs, or on labelled episodes for KTO; without any, nothing happens.

    Of the metrics, `accuracy` is the share of pairs that the policy already ranks as wanted (for KTO: of
    episodes on their side of the reference point), `margin` the mean reward of preferred less rejected ones.
    """
    batch, good_N = rows.batch, rows.good_N
    if not len(good_N):
        return {}
    policy_N, reference_N, tokens_N = _scored(learner, reference, batch, len(good_N))
    anchor = _anchor(learner, reference, rows)
    policy_N.requires_grad_()
    scores = Scores(policy_N, reference_N, tokens_N, good_N, anchor)
    loss_P, reward_N = LOSSES[config.loss.name](scores, config)
    loss = loss_P.mean()
    (slope_N,) = torch.autograd.grad(loss, policy_N)
    # -advantage * logprob has exactly the gradient that the loss has by each log-probability
    advantages_T = -slope_N[batch.trajectory_T].float() * len(loss_P)
    weights_T = torch.full_like(advantages_T, 1 / len(loss_P))
    batch = replace(batch, advantages_T=advantages_T, weights_T=weights_T)
    metrics = learner.step_on(batch, _along_advantages, at=at)
    return metrics | {"loss": loss.item()} | _standing(scores, reward_N.detach(), config)


def _along_advantages(
    logprobs_A: Tensor, entropy_A: Tensor, batch: MicroBatch
) -> tuple[Tensor, dict[str, Tensor]]:
    return -batch.advantages_A * logprobs_A, {}


def _scored(
    learner: Learner, reference: nn.Module | None, batch: Batch, episodes: int
) -> tuple[Tensor, Tensor, Tensor]:
    """log p, log q and the action tokens of each episode, in float64: small differences of large sums count."""

    def summed(values_T: Tensor) -> Tensor:
        empty_N = torch.zeros(episodes, dtype=torch.float64)
        return empty_N.index_add(0, batch.trajectory_T, values_T.double())

    policy_N = summed(learner.logprobs(batch))
    reference_N = torch.zeros_like(policy_N)
    if reference is not None:
        reference_N = summed(learner.logprobs(batch, reference))
    return policy_N, reference_N, summed(batch.action_T)


def _anchor(learner: Learner, reference: nn.Module | None, rows: PreferenceRows) -> float:
    """KTO's z0; 0 where all prompts are the same, as where policy and reference agree."""
    if not rows.crossings:
        return 0.0
    policy_N, reference_N, _ = _scored(learner, reference, rows.crossed, rows.crossings)
    return max(0.0, float((policy_N - reference_N).mean()))


def _crossed(episodes: Sequence[Trajectory], limit: int | None) -> list[Trajectory]:
    """Each episode's prompt with the next answer to another, as far as the model can read them."""
    prompts = [[token for segment in _prompt(one) for token in segment.tokens] for one in episodes]
    crossed = []
    for place, one in enumerate(episodes):
        following = [*range(place + 1, len(episodes)), *range(place)]
        other = next((i for i in following if prompts[i] != prompts[place]), None)
        if other is not None:
            crossed.append(mismatched(one, episodes[other]))
    return [one for one in crossed if limit is None or len(one.tokens) <= limit]


def _prompt(episode: Trajectory) -> list[Segment]:
    """The segments before the first action."""
    return list(takewhile(lambda s: s.kind is not SegmentKind.ACTION, episode.sequences[0].segments))


def mismatched(asked: Trajectory, answered: Trajectory) -> Trajectory:
    """The first episode's prompt, with what followed the second one's.

    Of an episode in several sequences, that is the first in which something is said. Later ones begin with a
    context that the episode made for itself, which has no counterpart after another prompt.
    """
    said = (one.segments for one in answered.sequences)
    theirs = next(one for one in said if any(s.kind is SegmentKind.ACTION for s in one))
    first = next(i for i, segment in enumerate(theirs) if segment.kind is SegmentKind.ACTION)
    sequence = TokenSequence([*_prompt(asked), *theirs[first:]])
    return Trajectory(answered.task, [sequence], stop=answered.stop)


def _standing(scores: Scores, reward_N: Tensor, config: PreferenceConfig) -> dict[str, float]:
    """Where the policy stands: how many it ranks as wanted, and by how much."""
    good_N = scores.good_N
    if config.loss.name != "kto":
        margin_P = _sides(reward_N)
        return {"accuracy": float((margin_P > 0).double().mean()), "margin": float(margin_P.mean())}
    above_N = reward_N > config.loss.scale * scores.anchor
    metrics = {"accuracy": float((above_N == good_N).double().mean()), "reference_point": scores.anchor}
    if bool(good_N.any()) and not bool(good_N.all()):
        metrics["margin"] = float(reward_N[good_N].mean() - reward_N[~good_N].mean())
    return metrics


class PreferenceStage(Stage[PreferenceConfig]):
    """Learn to prefer the better of two episodes."""

    def __init__(self, context: RunContext, folder: Path, config: PreferenceConfig) -> None:
        super().__init__(context, folder, config)
        # given pairs were not sampled: they are read at temperature 1, mined ones at the one they were drawn at
        mines = config.pairs is None
        self.open_trainer(config.steps, context.recipe.sampling.temperature if mines else 1.0)
        mining = RolloutSettings(config.tasks, config.attempts)
        self._rollouts = step_by_step(context.task_sets, mining, self.seed) if mines else None
        self._given: Sequence[Pair | Labelled] = []
        self._found_any = False
        """Whether any step so far has mined a pair."""

    @classmethod
    def check_parts(cls, config: PreferenceConfig, where: str, recipe: Recipe, parts: Parts) -> None:
        if config.pairs is None:
            return
        with errors_at(f"{where}.pairs"):
            read_preferences(config)

    @classmethod
    async def check_data(cls, context: RunContext, config: PreferenceConfig) -> None:
        if config.pairs is not None:
            what = "labelled answers" if config.loss.name == "kto" else "pairs"
            warn_of_large_batch(context, config, len(await load_preferences(context, config)), what)

    async def begin(self) -> None:
        if self.config.loss.name != "simpo":
            self.keep_start()
            self.context.ranks.perform("prepare_stage", self.start_source(), self.folder)
        if self.config.pairs is not None:
            self._given = await load_preferences(self.context, self.config)
            equal = sum(isinstance(one, Pair) and has_equal_sides(one) for one in self._given)
            if equal:
                log.warning(
                    "in %d of %d pairs both sides say the same, which teaches nothing",
                    equal,
                    len(self._given),
                )

    async def advance(self, number: int) -> StepResult:
        started = time.perf_counter()
        groups: Sequence[Group] = []
        metrics: dict[str, float] = {}
        learned: Sequence[Pair | Labelled]
        batch: NextBatch | None = None
        if self._rollouts is None:
            learned = items_of_step(self._given, number, self.config.batch, key(self.seed, "dpo"))
        else:
            batch = await self._rollouts.next_batch()
            groups = batch.played.groups
            check_failures(groups, self.context.recipe.max_failures)
            pairs = pairs_of(groups, self.config.margin)
            metrics = rollout_metrics(groups)
            self._note_found(number, pairs)
            learned = labelled_of(pairs) if self.config.loss.name == "kto" else pairs
        await self.context.pause_sampling()
        metrics["pairs"] = len(learned)
        with self.updating_weights():
            rows = preference_rows(learned, self.config, context_limit(self.context.policy))
            metrics |= self.train_step(rows, StepSettings(number))
        if self._rollouts is not None and batch is not None:
            self._rollouts.trained(batch)
        return StepResult({**metrics, "step_seconds": time.perf_counter() - started}, groups)

    def _note_found(self, number: int, pairs: Sequence[Pair]) -> None:
        """A step without pairs leaves the weights as they are; all of them are a mistake."""
        self._found_any |= bool(pairs)
        if number + 1 == self.steps and not self._found_any:
            apart = f" by {self.config.margin:g} at least" if self.config.margin else ""
            raise ConfigError(
                f"in {self.steps} step(s), no two attempts at a task differed in reward{apart}, so there was "
                "no pair to learn from: lower the margin, raise attempts or tasks, or use rewards that tell "
                "episodes apart"
            )

    def save(self, folder: Path) -> None:
        rollouts = self._rollouts.save(folder) if self._rollouts is not None else None
        state = {"rollouts": rollouts, "found_any": self._found_any}
        self.save_trainer(folder, state)

    def load(self, folder: Path) -> None:
        self.load_trainer(folder)
        if self._rollouts is not None:
            state = load_state(folder)
            self._rollouts.load(folder, state["rollouts"])
            self._found_any = state["found_any"]


class PreferenceTrainer(StageTrainer[PreferenceConfig]):
    """Holds the reference, where the loss has one."""

    reference: nn.Module | None = None

    def prepare(self, source: ModelSource | None, folder: Path) -> None:
        self.reference = self.load_start(source, folder)

    def learn(self, rows: PreferenceRows, settings: StepSettings) -> dict[str, float]:
        return prefer(self.learner, rows, self.reference, self.config, settings.number)


_ALL_EQUAL = "{source}: in every pair both sides say the same, so there is nothing to learn"


def read_preferences(config: PreferenceConfig) -> Sequence[tuple[Any, Any]]:
    """Conversations of the given data: chosen and rejected ones, or for KTO one and its label."""
    read = read_labelled if config.loss.name == "kto" else read_pairs
    rows: Sequence[tuple[Any, Any]] = read(config.pairs or "", config.columns)
    if not rows:
        raise ConfigError(f"{config.pairs} has no pairs to learn from")
    if config.loss.name == "kto":
        labels = {label for _, label in rows}
        if len(labels) == 1:
            label = str(labels.pop()).lower()
            raise ConfigError(
                f"{config.pairs}: all {len(rows)} answers have the label {label}, and KTO learns what good "
                'ones have over bad ones: add others (to imitate good ones alone: kind = "sft")'
            )
    elif all(list(first) == list(second) for first, second in rows):
        raise ConfigError(_ALL_EQUAL.format(source=config.pairs))
    return rows


async def load_preferences(context: RunContext, config: PreferenceConfig) -> Sequence[Pair | Labelled]:
    """The pairs of a file or dataset, or for KTO its labelled episodes."""
    source, given = config.pairs, read_preferences(config)
    renderer = context.rollout.renderer
    specs = await tool_specs(context.rollout)
    found: list[Pair | Labelled] = []
    for number, (first, second) in enumerate(given, start=1):
        try:
            answer = trajectory_of(first, renderer, specs)
            if config.loss.name == "kto":
                found.append(Labelled(answer, second))
            else:
                found.append(Pair(answer, trajectory_of(second, renderer, specs)))
        except ConfigError as error:
            raise ConfigError(f"{source}, pair {number}: {error}") from None
    pairs = [one for one in found if isinstance(one, Pair)]
    check_readable([one.chosen for one in pairs], context.policy, "what was chosen in pair")
    check_readable([one.rejected for one in pairs], context.policy, "what was rejected in pair")
    labelled = (one for one in found if isinstance(one, Labelled))
    check_readable([one.trajectory for one in labelled], context.policy, "answer")
    if all(isinstance(one, Pair) and has_equal_sides(one) for one in found):
        raise ConfigError(_ALL_EQUAL.format(source=source))
    return found
