"""Quality control: one pipeline for any file of episodes. The first check that an example fails is its reason.

    lost, bad_reward, no_success                                                   how it ended
    malformed_call, unknown_tool, bad_arguments, refused_call                      what it did
    incoherent, too_short, too_long, wasteful                                      how it did it
    replay_differs, replay_fails                                                   whether it happens again
    judged_incoherent                                                              what a language model says
    held_out, duplicate, low_quality, crowded_cluster, difficulty_mix              what else is in the set

Per example first, then playing and asking, then the set, whose checks look at what is left. An example is taken
in the order of the file, so the same file gives the same answer.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import Field

from ludus.core.messages import ToolSpec
from ludus.core.random import key
from ludus.core.task import Task
from ludus.core.trajectory import Trajectory, is_lost, is_success
from ludus.llm.embeddings import TextEmbedder, open_embedder
from ludus.observe import share_text
from ludus.rollouts.rollout import Rollout
from ludus.synth.episodes import (
    CLOSE,
    EpisodeStep,
    Parse,
    action_set,
    count_calls,
    first_difference,
    quality_of,
    recorded_actions,
    replay,
    steps_of,
)
from ludus.synth.method import ModelSpec, SynthConfig, SynthContext
from ludus.synth.quality.checks import (
    LEAST_ATTEMPTS,
    TARGET,
    Difficulty,
    Finding,
    balanced,
    check_calls,
    check_coherence,
    check_waste,
    difficulty_of,
    difficulty_table,
    judge_coherence,
)
from ludus.synth.quality.similarity import (
    REWORDED_SIMILARITY,
    Clusters,
    HeldOut,
    KeptExamples,
    Senses,
    asked,
    cluster,
    first_wordings,
    given,
    shingles,
    sketch,
    strategy_text,
)
from ludus.synth.result import ItemResult, Rejected, SynthResult, nothing_kept_hint, with_provenance


class QualityConfig(SynthConfig):
    """Settings of quality control."""

    needs_success: bool = True
    """Leave out episodes that were scored and are no success; those without a score pass."""
    threshold: float = 1.0
    """The least reward of a success, where no reward is called success."""
    min_turns: int = Field(default=2, ge=1)
    """Fewest actions."""
    max_turns: int = Field(default=40, ge=1)
    """Most actions."""
    max_calls: int = Field(default=40, ge=1)
    """Most tool calls."""
    max_useless: float = Field(default=0.3, ge=0, le=1)
    """Most calls, as a share, that bring nothing: empty results, the same call with the same result."""
    max_detour: float = Field(default=2.0, ge=1)
    """A success with more than so many times the calls of the shortest one at its task is wasteful."""
    replay: bool = True
    """Play the calls again with the recipe's tools and environments, and compare results and rewards."""
    judge: ModelSpec | None = None
    """A language model that says whether a step does not follow from those before it."""
    max_similarity: float = Field(default=0.85, ge=0, le=1)
    """The largest Jaccard overlap with a kept example: of task and actions."""
    held_out_similarity: float = Field(default=0.8, ge=0, le=1)
    """From this overlap of their words on, a task counts as one that is held out."""
    reworded_similarity: float = Field(default=REWORDED_SIMILARITY, ge=0, le=1)
    """From this cosine on, two tasks with the same names and numbers ask the same; needs an embedder."""
    min_quality: float = Field(default=0.6, ge=0, le=1)
    """The least quality: half of it brevity, half of it the share of complete turns."""
    needs_thought: bool | Literal["auto"] = "auto"
    """Whether a complete turn has a thought: auto, where most of the file's turns have one."""
    embedder: str = "hashed"
    """hashed: for clusters; or, for reworded tasks too, http://HOST/v1#NAME, sentence:MODEL, module:object."""
    cluster_similarity: float = Field(default=0.8, ge=0, le=1)
    """From this cosine on, two examples do the same."""
    max_cluster_share: float | None = Field(default=None, gt=0, le=1)
    """Most examples, as a share, of one cluster; the later ones are left out."""
    mix: Literal["report", "enforce"] = "report"
    """Whether the mix of difficulties, 30% easy, 50% medium, 20% hard, is reported or enforced."""


@dataclass(slots=True)
class Example:
    """An episode on its way through the checks."""

    trajectory: Trajectory
    steps: list[EpisodeStep]
    finding: Finding | None = None
    quality: float = 0.0
    difficulty: Difficulty = "medium"


@dataclass(slots=True)
class QualityPipeline:
    """The checks, with what they look things up in. What is not given is not checked, and reported as such."""

    settings: QualityConfig
    specs: Mapping[str, ToolSpec] | None = None
    """The tools by name; None where they are not known."""
    held_out: Sequence[Task] | None = None
    """The tasks that nothing may be learned from."""
    rollouts: Mapping[str, Rollout] = field(default_factory=dict)
    """Rollouts that play calls again: by the id of a task, or under "" for all."""
    parse: Parse | None = None

    async def run(self, trajectories: Sequence[Trajectory], context: SynthContext) -> SynthResult:
        """Every example with its first finding, or kept."""
        embedder = await asyncio.to_thread(
            open_embedder, self.settings.embedder
        )  # before hours of replays
        examples = [Example(one, steps_of(one, self.parse)) for one in trajectories]
        self._each_alone(examples)
        await self._replayed(examples, context)
        await self._judged(examples, context)
        clusters = await asyncio.to_thread(
            self._together, examples, embedder
        )  # embedding takes its time
        return self._result(examples, clusters)

    def _each_alone(self, examples: Sequence[Example]) -> None:
        settings = self.settings
        shortest: dict[str, int] = {}
        for one in examples:
            one.finding = self._alone(one)
            if one.finding is None and is_success(one.trajectory, settings.threshold):
                name, calls = one.trajectory.task.id, count_calls(one.steps)
                shortest[name] = min(shortest.get(name, calls), calls)
        for one in examples:
            name = one.trajectory.task.id
            one.finding = one.finding or check_waste(
                one.steps,
                max_useless=settings.max_useless,
                shortest=shortest.get(name) if name else None,
                max_detour=settings.max_detour,
            )

    def _alone(self, one: Example) -> Finding | None:
        settings, episode = self.settings, one.trajectory
        turns, calls = len(one.steps), count_calls(one.steps)
        if is_lost(episode):
            return "lost", str(episode.failure.message if episode.failure else "it was aborted")[:200]
        if broken := _not_finite(episode):
            return "bad_reward", broken
        is_failure = episode.reward is not None and not is_success(episode, settings.threshold)
        if settings.needs_success and is_failure:
            return "no_success", f"reward {episode.reward:g}, {episode.stop}"
        found = check_calls(one.steps, self.specs, episode)
        found = found or check_coherence(episode, one.steps, self.specs)
        if found is not None:
            return found
        if turns < settings.min_turns:
            return "too_short", f"{turns} turn(s) < {settings.min_turns}"
        if turns > settings.max_turns or calls > settings.max_calls:
            return "too_long", f"{turns} turns, {calls} calls"
        return None

    async def _replayed(self, examples: Sequence[Example], context: SynthContext) -> None:
        if not (self.settings.replay and self.rollouts):
            return
        left = [one for one in examples if one.finding is None and self._rollout(one) is not None]
        names = _numbered_names(left)

        async def check(one: Example) -> ItemResult:
            rollout = self._rollout(one)
            assert rollout is not None
            recorded = one.trajectory
            actions = recorded_actions(recorded, rollout.renderer)
            seed = key(context.seed, "check", names[id(one)])
            played = await replay(rollout, recorded.task, actions, seed=seed, attempt=recorded.attempt)
            if played.failure is not None:
                return ItemResult([played])
            return ItemResult(notes={"finding": _replay_finding(recorded, played, self.settings)})

        await self._asked("replay", left, check, context)

    def _rollout(self, one: Example) -> Rollout | None:
        return self.rollouts.get(one.trajectory.task.id, self.rollouts.get(""))

    async def _judged(self, examples: Sequence[Example], context: SynthContext) -> None:
        if self.settings.judge is None:
            return
        model = await context.model(self.settings.judge)

        async def check(one: Example) -> ItemResult:
            return ItemResult(notes={"finding": await judge_coherence(model, one.trajectory)})

        await self._asked("coherence", [o for o in examples if o.finding is None], check, context)

    async def _asked(
        self,
        stage: str,
        left: Sequence[Example],
        check: Callable[[Example], Awaitable[ItemResult]],
        context: SynthContext,
    ) -> None:
        """Findings that take playing or asking; what could not be had is no finding."""
        names = _numbered_names(left)
        pieces = await context.each(
            stage, left, check, name=lambda one: names[id(one)], needs_some=False
        )
        for one, piece in zip(left, pieces, strict=True):
            found = piece.notes.get("finding")
            one.finding = (found[0], found[1]) if found else None

    def _together(self, examples: Sequence[Example], embedder: TextEmbedder) -> Clusters:
        """Checks of an example against the rest of the set."""
        settings = self.settings
        needs_thought = self._needs_thought(examples)
        rates = _success_rates(examples, settings.threshold)
        left = [one for one in examples if one.finding is None]
        # hashed words are no better at senses than words are
        senses = (
            None if settings.embedder == "hashed" else Senses(embedder, settings.reworded_similarity)
        )
        prompts = _prompts(left, senses)
        held_out = HeldOut(self.held_out or (), settings.held_out_similarity, senses)
        sets = [sketch(_elements(one, prompt)) for one, prompt in zip(left, prompts, strict=True)]
        known = KeptExamples(settings.max_similarity, sets)
        kept: list[Example] = []
        for one, elements in zip(left, sets, strict=True):
            task = one.trajectory.task
            one.quality = quality_of(one.steps, needs_thought=needs_thought)
            one.difficulty = difficulty_of(task, count_calls(one.steps), rates.get(task.id))
            copy = held_out.find(task, one.trajectory.messages)
            if copy is not None:
                one.finding = "held_out", f"{copy[1]:.2f} like the held-out task {copy[0]}"
            elif (alike := known.alike(elements)) is not None:
                one.finding = "duplicate", alike[1]
            elif one.quality < settings.min_quality - CLOSE:
                one.finding = "low_quality", f"{one.quality:.2f} < {settings.min_quality:g}"
            else:
                known.add(one.trajectory, elements)
                kept.append(one)
        clusters = self._clustered(kept, embedder)
        left = [one for one in kept if one.finding is None]
        if settings.mix == "enforce":
            chosen = balanced([one.difficulty for one in left], [one.quality for one in left])
            for number, one in enumerate(left):
                if number not in chosen:
                    share = TARGET[one.difficulty]
                    one.finding = (
                        "difficulty_mix",
                        f"{one.difficulty} examples are {share_text(share)} already",
                    )
        return clusters

    def _needs_thought(self, examples: Sequence[Example]) -> bool:
        if self.settings.needs_thought != "auto":
            return self.settings.needs_thought
        calling = [step for one in examples for step in one.steps if step.calls]
        return sum(bool(step.said.strip()) for step in calling) > len(calling) / 2

    def _clustered(self, kept: Sequence[Example], embedder: TextEmbedder) -> Clusters:
        if not kept:
            return Clusters([])
        vectors = embedder.embed([strategy_text(one.steps) for one in kept])
        found = cluster(vectors, self.settings.cluster_similarity)
        most = self.settings.max_cluster_share
        if most is not None:
            limit, taken = max(1, int(most * len(kept))), Counter[int]()
            for one, label in zip(kept, found.labels, strict=True):
                taken[label] += 1
                if taken[label] > limit:
                    one.finding = "crowded_cluster", f"{found.sizes[label]} of {len(kept)} do the same"
        return found

    def _result(self, examples: Sequence[Example], clusters: Clusters) -> SynthResult:
        result = SynthResult()
        for one in examples:
            if one.finding is not None:
                result.rejected.append(Rejected(one.trajectory, *one.finding))
                continue
            facts: dict[str, Any] = {"quality": round(one.quality, 4), "difficulty": one.difficulty}
            result.kept.append(with_provenance(one.trajectory, **facts))
        levels = [one.difficulty for one in examples if one.finding is None]
        result.numbers = {
            "clusters": clusters.count,
            "clusters_effective": clusters.effective,
            "largest_cluster": clusters.largest_share,
        }
        result.tables.append(difficulty_table(levels))
        result.warnings += self._not_checked()
        if not result.kept and (hint := nothing_kept_hint(result.reasons)) is not None:
            result.warnings.append(hint)
        return result

    def _not_checked(self) -> list[str]:
        missing = {
            "schemas of calls": self.specs is None,
            "replays of calls": self.settings.replay and not self.rollouts,
            "held-out tasks": self.held_out is None,
        }
        told = [name for name, is_missing in missing.items() if is_missing]
        return [f"not checked, because no recipe was given: {', '.join(told)}"] if told else []


def _replay_finding(recorded: Trajectory, played: Trajectory, settings: QualityConfig) -> Finding | None:
    difference = first_difference(recorded, played)
    if difference:
        return "replay_differs", difference
    if recorded.reward is None or played.reward is None:
        return None
    if is_success(recorded, settings.threshold) and not is_success(played, settings.threshold):
        return "replay_fails", f"reward {played.reward:g} instead of {recorded.reward:g}"
    if "judge/calls" in played.counts:
        return None  # a language model need not say the same twice
    # by their parts: a total may have other weights now, or the reward of a group
    for name in recorded.rewards.keys() & played.rewards.keys():
        before, now = recorded.rewards[name], played.rewards[name]
        if not math.isclose(before, now, rel_tol=1e-6, abs_tol=1e-6):
            return "replay_fails", f"the reward {name} is {now:g} instead of {before:g}"
    return None


def _not_finite(episode: Trajectory) -> str:
    """A reward that is no number to learn from; empty if there is none."""
    values = {**episode.rewards, **({} if episode.reward is None else {"the total": episode.reward})}
    bad = [f"{name} = {value}" for name, value in values.items() if not math.isfinite(value)]
    return ", ".join(bad)[:200]


def _numbered_names(examples: Sequence[Example]) -> dict[int, str]:
    """A name for each example that tells it from others of the same task and attempt."""
    seen: Counter[tuple[str, int]] = Counter()
    names: dict[int, str] = {}
    for one in examples:
        key = one.trajectory.task.id, one.trajectory.attempt
        names[id(one)] = f"{key[0]}/{key[1]}/{seen[key]}"
        seen[key] += 1
    return names


def _prompts(examples: Sequence[Example], senses: Senses | None) -> list[str]:
    """The prompt of each example; of several wordings of one task, the first."""
    tasks = [one.trajectory.task for one in examples]
    texts = [asked(one.trajectory.task.messages) or asked(one.trajectory.messages) for one in examples]
    if senses is None:
        return texts
    first = first_wordings(zip(tasks, texts, strict=True), senses)
    return [first[given(task), text] for task, text in zip(tasks, texts, strict=True)]


def _elements(one: Example, prompt: str) -> set[str]:
    """Elements that copies of an example share: the request, its objects, and the actions."""
    task = one.trajectory.task
    return {*shingles(prompt), *(f"env {name} {args}" for name, args in task.envs.items())} | set(
        action_set(one.steps)
    )


def _success_rates(examples: Sequence[Example], threshold: float) -> dict[str, float]:
    """Of tasks with enough scored attempts in the file."""
    scored: defaultdict[str, list[bool]] = defaultdict(list)
    for one in examples:
        if one.trajectory.is_trainable:
            scored[one.trajectory.task.id].append(is_success(one.trajectory, threshold))
    return {name: sum(own) / len(own) for name, own in scored.items() if len(own) >= LEAST_ATTEMPTS}
