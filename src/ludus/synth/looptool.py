"""`ludus synth looptool`: train, probe, expand, verify, accumulate, and train again.

Each round trains on everything that has been gathered so far, by the recipe's own stages: with [warm_start]
alone it is LoopTool; with [rl] behind it, it is the iterative third stage (SFT, RL, diagnose, synthesise,
again). All that a round makes is in the folder (`round-2/data.parquet`, `round-2/run`), so that a stopped
loop goes on there.

Zhang et al., "LoopTool: Closing the Data-Training Loop for Robust LLM Tool Calls", 2025, arXiv:2511.09148.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from ludus.core.config import Place
from ludus.core.failures import ConfigError, LudusError
from ludus.core.generation import HOTTEST, ChatModel, ChatOptions
from ludus.core.messages import Json, ToolSpec
from ludus.core.random import key, shuffled
from ludus.core.registry import import_object
from ludus.core.task import Task
from ludus.core.trajectory import Group, StopReason, Trajectory, is_success
from ludus.llm import UnusableReply
from ludus.observe import Diagnosis, ReportTable, Share, diagnose, read_trajectories, write_trajectories
from ludus.rollouts.agent import Agent, Demonstrator
from ludus.rollouts.episode import Episode
from ludus.synth.episodes import demonstrated_call, offered_tools, plain_reply
from ludus.synth.expansion import (
    CapabilityRate,
    Generator,
    LabelledTask,
    calls_of_target,
    capability_of_task,
    capability_rates,
    from_function,
    from_pool,
    from_writer,
    judge_label,
    mended,
    plan_expansion,
)
from ludus.synth.method import (
    ModelSpec,
    ModelTrainer,
    SynthConfig,
    SynthContext,
    SynthMethod,
    TaskSource,
)
from ludus.synth.result import ItemResult, SynthResult, with_provenance


class LoopToolConfig(SynthConfig):
    """LoopTool, and the iterative third stage: a loop of training and data."""

    rounds: int = Field(default=2, ge=1)
    """How often new examples are made; the model is trained once more than that."""
    first_examples: int = Field(default=64, ge=1)
    """Examples that the first training begins with: the expert's, or labels that tasks come with."""
    first_data: Place | None = None
    """Begin with the episodes of this Parquet file instead."""
    examples: int = Field(default=64, ge=1)
    """New examples in each round, shared out by where the model fails."""
    probe: int = Field(default=64, ge=1)
    """Training tasks that are set apart to measure failures by; no example is made of them."""
    attempts: int = Field(default=1, ge=1)
    """Episodes for each of them."""
    temperature: float = Field(default=0.0, ge=0, le=HOTTEST)
    """Of these episodes; 0 is greedy."""
    by: str = "capability"
    """The key of a task's metadata that says what it is practice in."""
    expand: str = "tasks"
    """Where new examples come from: "tasks" (further training tasks), "writer", or 'file.py:function'."""
    writer: ModelSpec | None = None
    """The language model that writes new tasks, for expand = "writer"."""
    judge: ModelSpec | None = None
    """The language model that keeps, mends or drops the labels of new examples; none when left out."""
    start: Literal["last", "base"] = "last"
    """Which model a round trains: the last round's, or the recipe's own."""


@dataclass(slots=True)
class _Round:
    """Measurements and results of a round."""

    rates: dict[str, CapabilityRate]
    diagnosis: Diagnosis
    model: str
    wanted: dict[str, int] = field(default_factory=dict)
    made: dict[str, int] = field(default_factory=dict)


class LoopTool(SynthMethod[LoopToolConfig]):
    """A loop of training and data: probe, correct, extend, train."""

    title = "LoopTool"
    settings_type = LoopToolConfig
    needs_policy = False

    async def run(self, context: SynthContext) -> SynthResult:
        settings, source = self.settings, context.sources[0]
        if context.trainer is None:
            raise ConfigError("there is nothing here that trains: use ludus synth looptool")
        order = shuffled(len(source.tasks), key(context.seed, "probe"))
        tasks = [source.tasks[place] for place in order[: settings.tasks]]
        if len(tasks) <= settings.probe and settings.expand == "tasks":
            raise ConfigError(
                f"there are {len(tasks)} training tasks, and {settings.probe} of them are set apart to probe "
                "with (synth.looptool.probe): lower it, give more tasks, or set expand"
            )
        if settings.expand == "writer" and settings.writer is None:
            raise ConfigError('expand = "writer" needs synth.looptool.writer, a language model')
        specs = await offered_tools(source.rollout, tasks[0] if tasks else None)
        judge = await context.model(settings.judge) if settings.judge is not None else None
        probe, pool = tasks[: settings.probe], tasks[settings.probe :]
        return await _Loop(settings, context, context.trainer, source, specs, probe, pool, judge).run()


@dataclass(slots=True)
class _Loop:
    settings: LoopToolConfig
    context: SynthContext
    trainer: ModelTrainer
    source: TaskSource
    specs: Sequence[ToolSpec]
    probe: Sequence[Task]
    pool: Sequence[Task]
    judge: ChatModel | None
    used: set[str] = field(default_factory=set)
    result: SynthResult = field(default_factory=SynthResult)
    rounds: list[_Round] = field(default_factory=list)

    async def run(self) -> SynthResult:
        kept = await self._first_data()
        model: str | None = None
        for number in range(self.settings.rounds + 1):
            model = await self._trained(number, kept, model)
            groups = await self._probed(number, model)
            played = [one for group in groups for one in group.trajectories]
            rates = capability_rates(groups, self.settings.by)
            self.rounds.append(_Round(rates, diagnose(played), model))
            if number < self.settings.rounds:
                kept += await self._expanded(number, played)
        self.result.kept = kept
        self._report()
        return self.result

    async def _first_data(self) -> list[Trajectory]:
        if self.settings.first_data is not None:
            return read_trajectories(self.settings.first_data)
        # as many of each capability as the tasks have of it
        chosen = self.pool[: self.settings.first_examples]
        self.used.update(task.id for task in chosen)
        by = self.settings.by
        first = [
            LabelledTask(task, calls_of_target(task.target), capability_of_task(task, by))
            for task in chosen
        ]
        return await self._checked("first", first)

    async def _trained(self, number: int, data: Sequence[Trajectory], model: str | None) -> str:
        """The model of a round, trained on everything so far."""
        if not data:
            raise LudusError(f"round {number}: there is not a single example to train on")
        folder = Path(self.context.folder.path) / f"round-{number}"

        async def train() -> ItemResult:
            folder.mkdir(exist_ok=True)
            write_trajectories(folder / "data.parquet", data)
            start = model if self.settings.start == "last" else None
            trained = await self.trainer.train(folder / "data.parquet", folder / "run", start)
            return ItemResult(notes={"model": trained})

        return str((await self.context.once(f"train-{number}", train)).notes["model"])

    async def _probed(self, number: int, model: str) -> list[Group]:
        settings = self.settings

        async def play() -> ItemResult:
            groups = await self.trainer.play(model, self.probe, settings.attempts, settings.temperature)
            return ItemResult([one for group in groups for one in group.trajectories])

        made = await self.context.once(f"probe-{number}", play)
        by_task: dict[str, Group] = {}
        for one in made.trajectories:
            by_task.setdefault(one.task.id, Group(one.task, [])).trajectories.append(one)
        return list(by_task.values())

    async def _expanded(self, number: int, played: Sequence[Trajectory]) -> list[Trajectory]:
        settings, this = self.settings, self.rounds[-1]
        this.wanted = plan_expansion(this.rates, settings.examples)
        if settings.expand == "tasks":
            new = from_pool(
                self.pool, this.wanted, settings.by, self.used, key(self.context.seed, number)
            )
        elif settings.expand == "writer":
            new = await self._written(number, played)
        else:
            function: Generator = import_object(settings.expand)
            prefix = f"round-{number}"
            new = from_function(function, this.wanted, settings.by, prefix, self.context.seed)
        kept = await self._checked(f"round-{number}", new)
        for one in kept:
            name = capability_of_task(one.task, settings.by)
            this.made[name] = this.made.get(name, 0) + 1
        if len(kept) < sum(this.wanted.values()):
            self.result.warnings.append(
                f"round {number}: {len(kept)} of {sum(this.wanted.values())} examples could be made"
            )
        return kept

    async def _written(self, number: int, played: Sequence[Trajectory]) -> list[LabelledTask]:
        assert self.settings.writer is not None
        writer = await self.context.model(self.settings.writer)
        this, by = self.rounds[-1], self.settings.by
        found: list[LabelledTask] = []
        for name, count in this.wanted.items():
            lost = [
                one for one in played if capability_of_task(one.task, by) == name and not is_success(one)
            ]
            if count and lost:
                options = ChatOptions(max_tokens=4096, temperature=0.7)
                prefix = f"round-{number}-{name}"
                seed = self.context.seed
                found += await from_writer(
                    writer, self.specs, lost, name, count, by, prefix, seed, options
                )
        return found

    async def _checked(self, stage: str, candidates: Sequence[LabelledTask]) -> list[Trajectory]:
        """Judge labels, play what is left, and keep what the rewards call a success."""

        async def make(candidate: LabelledTask) -> ItemResult:
            verdict: Json = {}
            if self.judge is not None and candidate.calls is not None:
                try:
                    said = await judge_label(candidate, self.specs, self.judge)
                except UnusableReply as error:
                    return ItemResult.left_out("no_verdict", str(error)[:300], _unplayed(candidate))
                verdict = {"verdict": said.verdict, "judged": said.reason[:300]}
                if said.verdict == "drop":
                    return ItemResult.left_out("wrong_label", said.reason[:300], _unplayed(candidate))
                if said.verdict == "mend":
                    candidate = mended(candidate, said)
            played = await self._played(candidate)
            facts = {"method": "looptool", "made_in": stage, **candidate.provenance, **verdict}
            example = with_provenance(played, **facts)
            if not is_success(played):
                return ItemResult.left_out("failed", f"reward {played.reward}", example)
            return ItemResult([example])

        made = await self.context.each(
            stage, list(candidates), make, name=lambda one: one.task.id, needs_some=False
        )
        own = SynthResult()
        for piece in made:
            own.add(piece)
        self.result.rejected += own.rejected
        return own.kept

    async def _played(self, candidate: LabelledTask) -> Trajectory:
        if candidate.calls is not None:
            agent: Agent = LabelAgent(candidate)
        elif self.trainer.expert is not None:
            agent = Demonstrator(self.trainer.expert, self.source.rollout.agent)
        else:
            raise ConfigError(
                "tasks without a label (a target that is a list of calls) need an expert: set "
                "warm_start.demonstrations to 'module:function'"
            )
        given = self.source.rollout
        limits = given.budgets.model_copy(update={"max_turns": 1000, "max_tokens": 10_000_000})
        rollout = replace(given, agent=agent, attempts=1, budgets=limits)
        return await rollout.play(candidate.task, 0, key(self.context.seed, "labels"))

    def _report(self) -> None:
        names = sorted({name for one in self.rounds for name in one.rates})
        rows: list[list[Any]] = []
        for number, one in enumerate(self.rounds):
            for name in names:
                rate = one.rates.get(name)
                shown = Share(1 - rate.failure_rate) if rate is not None else None
                rows.append([number, name, shown, one.wanted.get(name, 0), one.made.get(name, 0)])
                if rate is not None:
                    self.result.numbers[f"round_{number}_{name}"] = 1 - rate.failure_rate
        columns = ("round", self.settings.by, "success", "asked for", "made")
        self.result.tables.append(ReportTable(columns, rows, "Rounds"))
        modes: list[list[Any]] = [
            [number, found.mode.value, found.count]
            for number, one in enumerate(self.rounds)
            for found in one.diagnosis.findings
        ]
        of_modes = ReportTable(("round", "failure mode", "episodes"), modes, "Failure modes")
        self.result.tables.append(of_modes)
        self.result.warnings.append(f"the last model is in {self.rounds[-1].model}")


class LabelAgent(Agent):
    """Makes the calls of a label, and ends with the last result."""

    def __init__(self, candidate: LabelledTask) -> None:
        self._calls = candidate.calls or ()

    async def run(self, episode: Episode) -> None:
        texts: list[str] = []
        for call in self._calls:
            texts.append((await demonstrated_call(episode, call)).content)
            if episode.over:
                return
        said = episode.demonstrate(await plain_reply(episode, texts))
        episode.answer(said.answer)


def _unplayed(candidate: LabelledTask) -> Trajectory:
    """A candidate that was never played, for the list of those that were left out."""
    messages = list(candidate.task.messages)
    told = Trajectory(candidate.task, messages=messages, stop=StopReason.TERMINATED)
    return with_provenance(told, method="looptool", label=candidate.label)
