"""Rejection sampling to a dataset: attempt each task many times, keep what is right, short, new and complete.

The checks, each with the name of its reason, are in order: failed, too_short, too_many_calls, wasteful,
duplicate (Jaccard overlap of the sets of actions), low_quality (0.5 · max(0, 1 − 0.1 · calls) + 0.5 · share of
complete turns). It finds only what the model can do already; the report says how much, and how alike.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from ludus.core.generation import HOTTEST, Sampling
from ludus.core.trajectory import Group, Trajectory, is_lost, is_success
from ludus.llm.embeddings import load_embedder, open_embedder
from ludus.synth.episodes import CLOSE, EpisodeStep, Parse, action_set, count_calls, quality_of, steps_of
from ludus.synth.method import SynthConfig, SynthContext, SynthMethod
from ludus.synth.quality.checks import Difficulty, check_waste, difficulty_of, difficulty_table
from ludus.synth.quality.similarity import KeptExamples, cluster, jaccard, sketch, strategy_text
from ludus.synth.result import Rejected, SynthResult, mean, nothing_kept_hint, with_provenance

_COMPARED = 500
"""Kept examples that are compared with each other for the report."""


class RejectionSamplingConfig(SynthConfig):
    """Attempt each task many times, and keep what is right, short, new and complete."""

    attempts: int = Field(default=16, ge=1)
    """Episodes for each task."""
    temperature: float | None = Field(default=None, ge=0, le=HOTTEST)
    """How actions are drawn; as the recipe says (sampling.temperature) when left out."""
    threshold: float = 1.0
    """The least reward of a success, where no reward is called success."""
    min_turns: int = Field(default=2, ge=1)
    """Successes of fewer turns are left out."""
    max_calls: int = Field(default=8, ge=1)
    """Successes of more tool calls are left out."""
    max_useless: float = Field(default=0.3, ge=0, le=1)
    """Most calls, as a share, that bring nothing: empty results, the same call with the same result."""
    max_detour: float = Field(default=2.0, ge=1)
    """A success with more than so many times the calls of the shortest one at its task is wasteful."""
    max_similarity: float = Field(default=0.85, ge=0, le=1)
    """The largest Jaccard overlap of an example's set of actions with that of a kept one."""
    similar_to: Literal["all", "task"] = "all"
    """Examples that a new one must differ from: all that were kept, or those of its own task."""
    min_quality: float = Field(default=0.6, ge=0, le=1)
    """The least quality: half of it brevity, half of it the share of complete turns."""
    needs_thought: bool = True
    """Whether a complete turn has a thought, beside its action and its observation."""
    embedder: str = "hashed"
    """The embedder of the clusters: hashed, http://HOST/v1#NAME, sentence:MODEL, or 'module:object'."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """An episode with what the checks look at."""

    trajectory: Trajectory
    steps: list[EpisodeStep]
    actions: frozenset[int]
    quality: float

    @classmethod
    def of(cls, trajectory: Trajectory, parse: Parse | None, *, needs_thought: bool = True) -> Candidate:
        steps = steps_of(trajectory, parse)
        quality = quality_of(steps, needs_thought=needs_thought)
        return cls(trajectory, steps, sketch(action_set(steps)), quality)


class RejectionSampling(SynthMethod[RejectionSamplingConfig]):
    """Attempt each task many times; keep what is right, short and new."""

    title = "rejection sampling"
    settings_type = RejectionSamplingConfig

    async def run(self, context: SynthContext) -> SynthResult:
        settings = self.settings
        tasks = context.tasks(settings.tasks)
        await asyncio.to_thread(
            open_embedder, settings.embedder
        )  # one that fails is reported before it is needed
        sampling = None if settings.temperature is None else Sampling(temperature=settings.temperature)
        groups = await context.groups("attempts", tasks, settings.attempts, sampling=sampling)
        parsers = [one.source.rollout.renderer.format.parse for one in tasks]
        return choose(groups, parsers, settings)


def choose(
    groups: Sequence[Group], parsers: Sequence[Parse | None], settings: RejectionSamplingConfig
) -> SynthResult:
    """Choose the episodes to keep; the others get a reason."""
    result = SynthResult()
    candidates = [
        [Candidate.of(one, parse, needs_thought=settings.needs_thought) for one in group.trajectories]
        for group, parse in zip(groups, parsers, strict=True)
    ]
    everything = [one.actions for own in candidates for one in own]
    kept = KeptExamples(settings.max_similarity, everything)
    chosen: list[tuple[Candidate, Difficulty]] = []
    elsewhere = 0
    for group, own in zip(groups, candidates, strict=True):
        won = [is_success(one, settings.threshold) for one in group.trainable]
        rate = sum(won) / len(won) if won else None
        if settings.similar_to == "task":
            kept = KeptExamples(settings.max_similarity, everything)
        best: Candidate | None = None
        right = [one for one in own if not _refused(one, settings)[0]]
        shortest = min((count_calls(one.steps) for one in right), default=None)
        for one in sorted(own, key=lambda one: (-one.quality, one.trajectory.attempt)):
            if is_lost(one.trajectory) or one.trajectory.reward is None:
                continue  # not scored: no candidate
            reason, detail = _refused(one, settings, shortest)
            if not reason and (alike := kept.alike(one.actions)) is not None:
                other, detail = alike
                elsewhere += other.task.id != one.trajectory.task.id
                reason = "duplicate"
            if not reason and one.quality < settings.min_quality - CLOSE:
                reason, detail = "low_quality", f"{one.quality:.2f} < {settings.min_quality:g}"
            if reason:
                result.rejected.append(Rejected(one.trajectory, reason, detail))
                continue
            kept.add(one.trajectory, one.actions)
            best = best or one
            level = difficulty_of(group.task, count_calls(one.steps), rate)
            chosen.append((one, level))
            result.kept.append(
                with_provenance(
                    one.trajectory, method="rejection", quality=one.quality, difficulty=level
                )
            )
        failed = [one for one in group.trainable if not is_success(one, settings.threshold)]
        worst = min(failed, key=lambda one: (one.reward or 0.0, one.attempt), default=None)
        if best is not None and worst is not None:
            result.pairs.append((best.trajectory, worst))
    _describe(result, chosen, groups, settings)
    if elsewhere > len(result.kept):
        result.warnings.append(
            f"{elsewhere} successes were left out because they do what an example of another task does: "
            'where that is as it should be, set similar_to = "task" of rejection (ludus check data needs no '
            "such setting: it compares what was asked too)"
        )
    if not result.kept and settings.needs_thought and result.reasons["low_quality"]:
        result.warnings.append(
            "nothing was kept, and successes were too low in quality: without thoughts no turn is complete. "
            "For a model that does not think aloud, set needs_thought = false"
        )
    elif not result.kept and (hint := nothing_kept_hint(result.reasons)) is not None:
        result.warnings.append(hint)
    return result


def _refused(
    one: Candidate, settings: RejectionSamplingConfig, shortest: int | None = None
) -> tuple[str, str]:
    """Why a candidate is left out whatever was kept before it; ("", "") where it is not.

    `shortest` is the number of calls of the shortest one at its task that is not.
    """
    calls, turns = count_calls(one.steps), one.trajectory.turns
    if not is_success(one.trajectory, settings.threshold):
        return "failed", f"reward {one.trajectory.reward:g}, {one.trajectory.stop}"
    if turns < settings.min_turns:
        return "too_short", f"{turns} turn(s) < {settings.min_turns}"
    if calls > settings.max_calls:
        return "too_many_calls", f"{calls} calls > {settings.max_calls}"
    waste = check_waste(
        one.steps,
        max_useless=settings.max_useless,
        shortest=shortest,
        max_detour=settings.max_detour,
    )
    return waste or ("", "")


def _describe(
    result: SynthResult,
    chosen: Sequence[tuple[Candidate, Difficulty]],
    groups: Sequence[Group],
    settings: RejectionSamplingConfig,
) -> None:
    scored = [one for group in groups for one in group.trainable]
    good = [one for one in scored if is_success(one, settings.threshold)]
    kept = [one for one, _ in chosen]
    result.numbers |= {
        "tasks": len(groups),
        "tasks_with_examples": len({one.trajectory.task.id for one in kept}),
        "attempts": sum(len(group.trajectories) for group in groups),
        "success": len(good) / max(1, len(scored)),
        "calls_of_successes": mean([len(one.calls) for one in good]),
        "calls_of_kept": mean([count_calls(one.steps) for one in kept]),
        "quality_of_kept": mean([one.quality for one in kept]),
        "similarity_of_kept": nearest_similarity([one.actions for one in kept[:_COMPARED]]),
    }
    if kept:
        texts = [strategy_text(one.steps) for one in kept]
        found = cluster(load_embedder(settings.embedder).embed(texts))
        result.numbers |= {
            "clusters": found.count,
            "clusters_effective": found.effective,
            "largest_cluster": found.largest_share,
        }
    result.tables.append(difficulty_table([level for _, level in chosen]))


def nearest_similarity(sets: Sequence[frozenset[int]]) -> float:
    """How alike examples are: the mean, over them, of the similarity to the nearest other one."""
    if len(sets) < 2:
        return 0.0
    nearest = [
        max(jaccard(one, other) for place, other in enumerate(sets) if place != number)
        for number, one in enumerate(sets)
    ]
    return mean(nearest)
