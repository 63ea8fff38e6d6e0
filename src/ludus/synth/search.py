"""TSR: trajectory search while generating. Search where the tokens go, keep the best, and say what that did.

What search selects is not what the policy would have done, so every example carries the weight that undoes it:

    best_of  w(r) = p(r) / (F(r)^N - F(r-)^N), with p and F of the attempts' rewards: the density of the policy
             over that of the best of N
    tree     the share of the policy's own attempts that a leaf stands for (`leaf_weights`): 1 / roots, divided
             at every branching on its way by the number of ways that go on from there
    turns    the product of the first over an episode's turns, with the scores of the candidates at each; so few
             make poor weights, and the policy's mean is the rewards less what choosing has gained at each turn

The tree's weights are exact where branching looks at prefixes alone; `beam` looks at how the attempts below a
prefix have ended, so the estimate lies a little below the policy's mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from ludus.core.trajectory import Group, Trajectory, is_success
from ludus.rollouts.branching import check_forkable
from ludus.rollouts.tree import SEARCH_SCORE, TreeConfig, best_of_weight, leaf_weights, selections
from ludus.synth.method import SynthConfig, SynthContext, SynthMethod
from ludus.synth.result import Rejected, SynthResult, mean, with_provenance


class SearchConfig(SynthConfig):
    """Search for good episodes while playing, and keep the best of each task."""

    search: Literal["tree", "turns", "best_of"] = "tree"
    """Trees that branch off the best prefixes of attempts, candidates at each turn, or whole attempts."""
    attempts: int = Field(default=8, ge=2)
    """Attempts at each task: the leaves of a tree."""
    roots: int = Field(default=2, ge=1)
    """Attempts of a tree that begin at the prompt."""
    rounds: int = Field(default=3, ge=1)
    """Rounds of branching."""
    beam: int = Field(default=2, ge=1)
    """Prefixes that are kept in a round, or at a turn."""
    candidates: int = Field(default=4, ge=2)
    """turns: actions that are sampled and done at a turn, from each prefix that was kept."""
    score: str = "total"
    """turns: what a prefix is kept by: the total of the rewards, if it ended there, or one of them by name."""
    max_tokens: int | None = Field(default=None, ge=1)
    """Tokens that the search at one task may sample."""
    branches: int = Field(default=1, ge=1)
    """Branches from each of them."""
    keep: int = Field(default=1, ge=1)
    """Examples of each task at most: the best, the shorter first."""
    needs_success: bool = True
    """Whether an example must be a success by the recipe's rewards."""
    threshold: float = 1.0
    """The least reward of a success, where no reward is called success."""


class TrajectorySearch(SynthMethod[SearchConfig]):
    """Search for good episodes while playing; keep the best."""

    title = "TSR, trajectory search"
    settings_type = SearchConfig

    async def run(self, context: SynthContext) -> SynthResult:
        settings = self.settings
        tree = None
        if settings.search != "best_of":
            tree = TreeConfig(
                branch="beam" if settings.search == "tree" else "turns",
                candidates=settings.candidates,
                score=settings.score,
                max_tokens=settings.max_tokens,
                roots=min(settings.roots, settings.attempts - 1),
                rounds=settings.rounds,
                beam=settings.beam,
                branches=settings.branches,
            )
            for source in context.sources:
                check_forkable(source.rollout.pools, source.rollout.tools)
        tasks = context.tasks(settings.tasks)
        groups = await context.groups("search", tasks, settings.attempts, tree=tree)
        return choose_best([group for group in groups if group.trainable], settings)


def choose_best(groups: Sequence[Group], settings: SearchConfig) -> SynthResult:
    """The best of each group with their weights; all others are siblings."""
    result = SynthResult()
    kept_rewards: list[float] = []
    plain: list[float] = []
    corrected: list[float] = []
    for group in groups:
        scored = group.trainable
        rewards = {id(one): one.reward or 0.0 for one in scored}
        ranked = sorted(scored, key=lambda one: (-rewards[id(one)], one.turns, one.attempt))
        good = [o for o in ranked if not settings.needs_success or is_success(o, settings.threshold)]
        chosen = good[: settings.keep]
        average = mean(list(rewards.values()))
        if settings.search == "turns":
            searched = selections(group.trajectories)
            weights = {attempt: one.weight for attempt, one in searched.items()}
            policy = average - sum(searched[one.attempt].gain for one in scored) / len(scored)
        else:
            weights = leaf_weights(group.trajectories)
            mass = sum(weights[one.attempt] for one in scored)
            policy = sum(weights[one.attempt] * rewards[id(one)] for one in scored) / mass
        plain.append(average)
        corrected.append(policy)
        for one in scored:
            if any(one is other for other in chosen):
                continue
            reason = "sibling" if chosen else "no_success"
            told = f"reward {one.reward:g}"
            result.rejected.append(Rejected(one, reason, told))
        for one in group.trajectories:
            if SEARCH_SCORE in one.counts:
                told = f"turn {one.turns}, score {one.counts[SEARCH_SCORE]:g}"
                result.rejected.append(Rejected(one, "candidate", told))
        for one in chosen:
            kept_rewards.append(rewards[id(one)])
            facts = {
                "selected_from": len(scored),
                "selection_weight": _weight(one, scored, weights, settings.search),
                "siblings_mean": round(average, 6),
                "policy_mean": round(policy, 6),
            }
            result.kept.append(with_provenance(one, method="tsr", **facts))
        if chosen and rewards[id(ranked[-1])] < rewards[id(chosen[0])]:
            result.pairs.append((chosen[0], ranked[-1]))
    result.numbers = {
        "tasks": len(groups),
        "tasks_with_examples": len({one.task.id for one in result.kept}),
        "reward_of_kept": mean(kept_rewards),
        "reward_of_all": mean(plain),
        "reward_of_the_policy": mean(corrected),
        "selection_bias": mean(kept_rewards) - mean(corrected) if kept_rewards else 0.0,
    }
    return result


def _weight(
    one: Trajectory, scored: Sequence[Trajectory], weights: dict[int, float], search: str
) -> float:
    """Weight of an example as a sample of the policy; 1 is an ordinary attempt."""
    if search == "tree":
        return round(weights[one.attempt] * len(scored), 6)
    if search == "turns":
        return round(weights[one.attempt], 6)
    return round(best_of_weight(one.reward or 0.0, [other.reward or 0.0 for other in scored]), 6)
