"""`ludus mcp-rl SERVER --model M`: from an MCP server to a trained agent, without data and without a reward.

Discover the server's tools, have a language model write scenarios for them (`synth.scenarios`: each is tried),
play groups, rank each group by one question to a judge (RULER), update by GRPO, and compare the held-out
episodes of before and after in one ranking. All of it stands in one folder, in which the same command goes on:
the writer's answers, the scenarios, `recipe.toml`, the run, and `report.md`.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from ludus.cli.options import stopped_says, until_told
from ludus.core.config import read_toml, toml_text
from ludus.core.failures import ConfigError, Fault, InfraError
from ludus.core.messages import Json
from ludus.core.trajectory import Group, Trajectory, is_success
from ludus.observe import (
    Cell,
    ReportTable,
    RunFolder,
    atomic_write,
    markdown_text,
    numbered_folder,
    share_text,
)
from ludus.observe.console import say
from ludus.tools.mcp import MCPServerConfig, mcp_tools

if TYPE_CHECKING:
    from ludus.core.generation import ChatModel
    from ludus.synth.scenarios import ScenarioSet

SCENARIOS, RECIPE, REPORT, RUN, ANSWERS = (
    "scenarios.json",
    "recipe.toml",
    "report.md",
    "run",
    "answers",
)
SCRATCH = "scratch"
_SYSTEM = "Do what is asked with the tools, then answer."
_COLUMNS = (
    "held-out scenarios",
    "RULER score",
    "planned calls made",
    "legal calls",
    "calls per episode",
)
_LEAST = 2
_ILLEGAL = (Fault.UNKNOWN_TOOL, Fault.BAD_ARGUMENTS)


@dataclass(frozen=True, slots=True)
class McpRlSettings:
    """Options of the command."""

    server: Json
    """The table of the server, as a recipe has it."""
    model: str
    writer: str
    """An address, a table in TOML, a model to load, or `policy`: the model itself."""
    judge: str
    """In the form of the writer."""
    scenarios: int = 32
    held_out: int = 8
    about: str = ""
    imitate: int | None = None
    """Steps of imitating the demonstrations first; for a model from scratch 300, else none."""
    seed: int = 0

    @property
    def made_from(self) -> Json:
        """The settings that decide the scenarios: scenarios of other settings are not reused."""
        names = ("server", "writer", "scenarios", "held_out", "about", "seed")
        return {name: getattr(self, name) for name in names}

    def open(self, spec: str, **changes: Any) -> ChatModel:
        """The model of this spec outside of the run, where the policy is the model before training."""
        from ludus.llm import load_chat_model
        from ludus.llm.config import POLICY, model_table

        table = {**model_table(spec), **changes}
        if table.get("address") == POLICY:
            if self.model == SCRATCH:
                raise ConfigError(
                    "a model from scratch cannot write or judge before it is trained: give --writer and "
                    "--judge the address of another one"
                )
            table["address"] = self.model
        return load_chat_model(table)


def run_mcp_rl(settings: McpRlSettings, out: Path | None, overrides: Sequence[str]) -> None:
    from ludus.llm.config import check_reachable

    console = Console(stderr=True)
    MCPServerConfig.of(settings.server).check_program()
    asyncio.run(check_reachable(settings.writer, settings.judge))
    folder = numbered_folder("runs", "mcp-rl") if out is None else out
    folder.mkdir(parents=True, exist_ok=True)
    console.print(Text(f"folder: {folder}"), soft_wrap=True)
    again = f"the same command and --out {folder}"
    if not _has_scenarios(folder, settings):
        with stopped_says(console, f"the writer's answers are kept. Go on with {again}"):
            made = asyncio.run(until_told(_write_scenarios(settings, folder, console)))
            _save_scenarios(folder, settings, made)
        _say_scenarios(console, made)
    _train(folder, settings, overrides, console, again)
    console.print(Text(f"before and after: asking {settings.judge}"), soft_wrap=True)
    with stopped_says(console, f"the run has ended, and is not compared yet. Go on with {again}"):
        table, unjudged = asyncio.run(until_told(_compare(folder, settings)))
    atomic_write(folder / REPORT, _report(settings, folder, table, unjudged))
    Console().print(table.rich())
    if unjudged:
        say(console, f"warning: {unjudged}", style="yellow", is_prose=True)
    console.print(Text(f"report:  {folder / REPORT}"), soft_wrap=True)


# Scenarios


def _has_scenarios(folder: Path, settings: McpRlSettings) -> bool:
    path = folder / SCENARIOS
    if not path.exists():
        return False
    found = json.loads(path.read_text(encoding="utf-8"))
    if found.get("made_from") != settings.made_from:
        raise ConfigError(
            f"{path} holds scenarios of other settings: give another --out, or remove the folder"
        )
    return True


async def _write_scenarios(settings: McpRlSettings, folder: Path, console: Console) -> ScenarioSet:
    from ludus.synth.scenarios import ScenarioWriter

    writer = settings.open(settings.writer, cache=str(folder / ANSWERS))
    tools, began = mcp_tools(settings.server), time.monotonic()
    try:
        work = ScenarioWriter(writer, tools, settings.about, settings.seed)

        def say(kept: int, wanted: int) -> None:
            taken = f"{time.monotonic() - began:.0f} seconds"
            console.print(Text(f"scenarios: {kept} of {wanted}, {taken}"), soft_wrap=True)

        console.print(Text(f"scenarios: asking {writer.name}"), soft_wrap=True)
        made = await work.write(settings.scenarios, settings.held_out, say)
    finally:
        await tools.aclose()
        await writer.close()
    if len(made.train) < _LEAST:
        shutil.rmtree(folder / ANSWERS, ignore_errors=True)
        why = ", ".join(f"{reason}: {count}" for reason, count in made.rejected.most_common())
        raise ConfigError(
            f"only {len(made.train)} of {made.proposed} proposed scenarios can be used ({why or 'none came'}): "
            "try another --writer or --seed, say more with --about, or give the server something to work on "
            "(--files). The answers were not kept: the same command asks again"
        )
    return made


def _save_scenarios(folder: Path, settings: McpRlSettings, made: ScenarioSet) -> None:
    for name, some in (("train", made.train), ("held_out", made.held_out)):
        rows = [one.as_task(f"{name}-{number}") for number, one in enumerate(some)]
        atomic_write(folder / f"{name}.jsonl", _lines(rows))
    atomic_write(folder / "demonstrations.jsonl", _lines([one.as_demonstration() for one in made.train]))
    about = {"made_from": settings.made_from, "proposed": made.proposed, "rejected": dict(made.rejected)}
    about |= {"train": len(made.train), "held_out": len(made.held_out)}
    atomic_write(
        folder / SCENARIOS, json.dumps(about, indent=1) + "\n"
    )  # last: it says that all is there


def _say_scenarios(console: Console, made: ScenarioSet) -> None:
    reasons = "".join(f"; {reason}: {count}" for reason, count in made.rejected.most_common())
    kept = f"{len(made.train)} to train on, {len(made.held_out)} held out"
    console.print(Text(f"scenarios: {kept}, of {made.proposed} proposed{reasons}"), soft_wrap=True)


def _lines(rows: Sequence[Json]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


# Training


def recipe_of_scenarios(settings: McpRlSettings, train: int, most_calls: int) -> Json:
    """The recipe: everything that is not said by the settings is what small runs need."""
    is_scratch = settings.model == SCRATCH
    steps = settings.imitate if settings.imitate is not None else 300 if is_scratch else 0
    raw: Json = {
        "name": "mcp-rl",
        "seed": settings.seed,
        "rewards": ["ludus.synth.scenarios:planned_calls"],
        "group_rewards": [{"reward": "ruler", "model": settings.judge}],
        "model": {"scratch": {"layers": 2, "width": 128}} if is_scratch else {"name": settings.model},
        "tasks": {"train": "train.jsonl", "evaluation": "held_out.jsonl"},
        "agent": {"system": _SYSTEM, "tools": [settings.server]},
        "budgets": {"max_turns": most_calls + 2, "max_turn_tokens": 256},
        "rl": {"algorithm": "grpo", "steps": 20, "tasks": min(8, train), "attempts": 8},
        "evaluation": {"attempts": 1},
    }
    raw["rl"]["optimizer"] = {"learning_rate": 3e-4 if is_scratch else 1e-5}
    if steps:
        rate = 3e-3 if is_scratch else 2e-5
        raw["warm_start"] = {"demonstrations": "demonstrations.jsonl", "steps": steps, "batch": 16}
        raw["warm_start"]["optimizer"] = {
            "learning_rate": rate,
            "warmup_steps": 10,
            "schedule": "cosine",
        }
    return raw


def _train(
    folder: Path, settings: McpRlSettings, overrides: Sequence[str], console: Console, again: str
) -> None:
    from ludus.cli.train import run_training

    again = again.replace("{", "{{").replace("}", "}}")  # it is a template there
    run = RunFolder(folder / RUN)
    if run.is_run:
        _check_unchanged(folder, settings)
        console.print(Text(f"going on with {run.path}"), soft_wrap=True)
        run_training(None, list(overrides), run.path, again=again)
        return
    rows = [
        json.loads(line) for line in (folder / "train.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    most = max(len(row["plan"]) for row in rows)
    text = toml_text(
        recipe_of_scenarios(settings, len(rows), most), "Made by ludus mcp-rl; ludus train reads it."
    )
    atomic_write(folder / RECIPE, text)
    own = f"run.folder={json.dumps(str(run.path))}"
    run_training(folder / RECIPE, [own, *overrides], None, again=again)


def _check_unchanged(folder: Path, settings: McpRlSettings) -> None:
    """Refuse settings that the run in the folder was not begun with: it goes on by its own recipe."""
    stored = read_toml(str(folder / RECIPE)) if (folder / RECIPE).exists() else {}
    asked = recipe_of_scenarios(settings, train=1, most_calls=1)
    decided: dict[str, Callable[[Mapping[str, Any]], Any]] = {
        "--model": lambda raw: raw.get("model"),
        "--judge": lambda raw: raw.get("group_rewards"),
        "--imitate": lambda raw: raw.get("warm_start", {}).get("steps"),
    }
    for option, value in decided.items():
        if stored and value(stored) != value(asked):
            raise ConfigError(
                f"the run in {folder} was begun with another {option} ({value(stored)}, not {value(asked)}) "
                "and goes on by its own recipe: give the option as it was, or another folder (--out)"
            )


# Before and after


async def _compare(folder: Path, settings: McpRlSettings) -> tuple[ReportTable, str]:
    """The held-out episodes of each evaluation, ranked together: one question for each scenario.

    With the table, why scenarios have no verdict; empty where all have.
    """
    from ludus.rewards.judges import Ruler
    from ludus.training.config.recipe import Recipe
    from ludus.training.report import stage_of

    run = RunFolder(folder / RUN)
    recipe = Recipe.parse(run.recipe(), str(run.path))
    found: dict[str, list[Trajectory]] = {}
    for file in run.trajectory_files():
        if file.split == "eval":
            stage = stage_of(file.step, recipe)
            found[stage] = run.trajectories(file.step, "eval")
    judge = settings.open(settings.judge)
    try:
        scores, reasons = await _ranked(Ruler(judge), found)
    finally:
        await judge.close()
    rows = [_row(stage, episodes, scores.get(stage, [])) for stage, episodes in found.items()]
    total = len({one.task.id for episodes in found.values() for one in episodes})
    unjudged = ""
    if reasons:
        why, times = reasons.most_common(1)[0]
        often = "" if times == reasons.total() else f", most often ({times})"
        unjudged = f"{reasons.total()} of {total} held-out scenarios have no verdict{often}: {why}"
    return ReportTable(_COLUMNS, rows), unjudged


async def _ranked(
    ruler: Any, found: Mapping[str, Sequence[Trajectory]]
) -> tuple[dict[str, list[float]], Counter[str]]:
    """The scores of each stage's episodes, and why scenarios have none."""
    reasons: Counter[str] = Counter()
    scores: dict[str, list[float]] = {stage: [] for stage in found}
    tasks = {t.task.id: t.task for episodes in found.values() for t in episodes}
    for name, task in tasks.items():
        chosen = {stage: next((t for t in episodes if t.task.id == name and t.failure is None), None)
                  for stage, episodes in found.items()}  # fmt: skip
        there = {stage: one for stage, one in chosen.items() if one is not None}
        if len(there) < len(found):
            reasons["an episode was lost, or not played at every stage"] += 1
            continue
        try:
            given = await ruler.score_group(Group(task, list(there.values())))
        except InfraError as error:
            reasons[f"the judge gave none: {error}"] += 1
            continue
        for stage, score in zip(there, given, strict=True):
            scores[stage].append(score)
    return scores, reasons


def _row(stage: str, episodes: Sequence[Trajectory], scores: Sequence[float]) -> list[Cell]:
    played = [t for t in episodes if t.failure is None]
    calls = [call for t in played for call in t.calls]
    faults = [fault for t in played for action in t.actions for fault in action.faults]
    illegal = sum(call.fault is not None for call in calls) + sum(fault in _ILLEGAL for fault in faults)
    legal = f"{share_text(1 - illegal / len(calls))} of {len(calls)}" if calls else "no calls"
    planned = sum(is_success(t) for t in played)
    mean = f"{sum(scores) / len(scores):.3f} ({len(scores)})" if scores else None
    each = len(calls) / len(played) if played else None
    return [stage, mean, f"{planned} of {len(played)}", legal, each]


def _report(settings: McpRlSettings, folder: Path, table: ReportTable, unjudged: str) -> str:
    about = json.loads((folder / SCENARIOS).read_text(encoding="utf-8"))
    reasons = "".join(f"\n- left out, {reason}: {count}" for reason, count in about["rejected"].items())
    return (
        f"# {settings.server['mcp']}\n\nModel `{settings.model}`, scenarios by `{settings.writer}`, judged by "
        f"`{settings.judge}`.\n\n- {about['train']} scenarios to train on, {about['held_out']} held out, of "
        f"{about['proposed']} proposed{reasons}\n\n"
        f"{table.markdown()}\n{f'**Warning:** {markdown_text(unjudged)}' if unjudged else ''}\n\n"
        "RULER score: the judge ranks the episodes of all stages at one scenario together, from 0 to 1; in "
        "brackets, the scenarios that have a verdict. Planned calls: episodes that made every call of the "
        "scenario's plan, with the same arguments; another way to do it does not count there.\n"
    )
