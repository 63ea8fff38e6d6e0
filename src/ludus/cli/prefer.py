"""`ludus prefer` and `ludus reward-model`: which of two attempts is better, and a model that learns it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.columns import Columns
from rich.console import Console
from rich.panel import Panel
from rich.progress import track
from rich.text import Text

from ludus.core.config import apply_overrides
from ludus.core.failures import ConfigError, LudusError, not_there
from ludus.core.trajectory import Group
from ludus.core.user_files import file_problem, json_lines, read_user_text
from ludus.llm import ChatError
from ludus.observe import ReportTable, RunFolder, printable, read_groups, share_text
from ludus.rewards.judges import PairJudge
from ludus.rewards.judges.asking import transcript
from ludus.rewards.judges.comparisons import (
    AttemptPair,
    PairVerdict,
    Side,
    agreement,
    choose_pairs,
    preference_row,
)

_KEYS: dict[str, Side] = {"1": "first", "2": "second", "=": "tie"}
_AT_ONCE = 8


class _Stopped(Exception):
    """The person has had enough."""


def collect_preferences(
    source: Path,
    out: Path,
    *,
    judge: str | None,
    dimensions: Sequence[str],
    pairs: int,
    seed: int,
    labels: Path | None,
    split: str = "train",
) -> None:
    """Ask for preferences on pairs of attempts, and append them to a file; pairs that it has are skipped.

    Of a run, `split` says whose: what is learnt from held-out episodes cannot be measured on them.
    """
    console = Console()
    rows = list(_rows(out)) if out.exists() else []
    known = {row.get("id") for row in rows}
    chosen = [pair for pair in choose_pairs(_groups(source, split), pairs, seed) if pair.id not in known]
    if not chosen and not rows:
        raise ConfigError(
            f"{source} has no two different attempts at one task: play more with --attempts"
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("a", encoding="utf-8") as file:

        def write(pair: AttemptPair, verdict: PairVerdict) -> None:
            row = preference_row(pair, verdict)
            if row is not None:
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
                file.flush()
                rows.append(row)

        if judge is None:
            asked = _ask_person(console, chosen, dimensions, write)
            console.print(f"{asked} pairs answered; {len(rows)} in {out}", soft_wrap=True)
        else:
            _ask_judge(console, PairJudge(judge, dimensions=dimensions), chosen, write, out)
    if labels is not None:
        same, both = agreement(rows, _rows(labels))
        shown = (
            f"{same} of {both} ({share_text(same / both)})" if both else "no pair that both files have"
        )
        console.print(f"agreement with {labels}: {shown}", soft_wrap=True)


def _groups(source: Path, split: str) -> Iterator[Group]:
    run = RunFolder(source)
    if run.is_run:
        files = run.trajectory_files()
        splits = sorted({file.split for file in files})
        if files and split not in splits:
            raise ConfigError(
                f"{source} has no episodes of the split {split!r}, only of {', '.join(splits)} (--split "
                f"{splits[0]}); ludus rollout {source} --attempts 4 --out FILE plays training tasks"
            )
        for file in reversed(files):
            if file.split == split:
                yield from read_groups(file.path)
        return
    if not source.is_file():
        raise ConfigError(f"{not_there(source, 'run or file of episodes')}")
    yield from read_groups(source)


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    for _, row in json_lines(read_user_text(path, beside_recipe=False), str(path)):
        if isinstance(row, dict):
            yield row


def _ask_person(
    console: Console, pairs: Sequence[AttemptPair], dimensions: Sequence[str], write: Any
) -> int:
    answered = 0
    console.print("1: the first is better · 2: the second · =: neither · s: skip · q: stop (Ctrl-C too)")
    try:
        for number, pair in enumerate(pairs, start=1):
            console.rule(f"{number} of {len(pairs)} · task {printable(pair.first.task.id)}")
            console.print(Text(printable(transcript(pair.first.asked))))
            sides = [
                Panel(Text(printable(transcript(one.messages[len(one.asked) :]))), title=title)
                for one, title in ((pair.first, "1"), (pair.second, "2"))
            ]
            console.print(Columns(sides, equal=True, expand=True))
            better = _side(console, "which is better?")
            if better is None:
                continue
            respects = {name: _side(console, f"  {name}?") for name in dimensions}
            told = {name: side for name, side in respects.items() if side is not None}
            write(pair, PairVerdict(better, told))
            answered += 1
    except (_Stopped, EOFError, KeyboardInterrupt):
        console.print("stopped; what was answered is kept")
    return answered


def _side(console: Console, question: str) -> Side | None:
    while True:
        answer = console.input(f"{question} [1/2/=/s/q] ").strip().lower()
        if answer == "q":
            raise _Stopped
        if answer == "s":
            return None
        if answer in _KEYS:
            return _KEYS[answer]
        console.print("1, 2, =, s or q")


def _ask_judge(
    console: Console, judge: PairJudge, pairs: Sequence[AttemptPair], write: Any, out: Path
) -> None:
    verdicts: list[PairVerdict] = []
    failed: list[str] = []

    async def ask(pair: AttemptPair, places: asyncio.Semaphore) -> None:
        async with places:
            try:
                verdict = await judge.prefer(pair)
            except ChatError as error:
                failed.append(str(error))
                return
        verdicts.append(verdict)
        write(pair, verdict)

    async def main() -> None:
        places = asyncio.Semaphore(_AT_ONCE)
        tasks = [asyncio.create_task(ask(pair, places)) for pair in pairs]
        try:
            for task in track(
                asyncio.as_completed(tasks), "judging", total=len(tasks), console=console, transient=True
            ):
                await task
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await judge.close()

    asyncio.run(main())
    ties = sum(one.better == "tie" for one in verdicts)
    changed = sum(not one.is_consistent for one in verdicts)
    console.print(
        f"{len(verdicts)} pairs judged, {ties} ties ({changed} of them judged otherwise in the other order), "
        f"{len(failed)} without a verdict; written to {out}",
        soft_wrap=True,
    )
    if failed and not verdicts:
        raise LudusError(f"no verdict could be had: {failed[0]}")


def train_reward_model(data: Path, out: Path, model: str | None, settings: Sequence[str]) -> None:
    """Train a reward model on a file of pairs or of scored steps, and print what it is worth."""
    from ludus.training.config.stages import CRITIC_RATES
    from ludus.training.reward_models import RewardModelConfig, fit_reward_model

    console = Console()
    if (problem := file_problem(data, beside_recipe=False)) is not None:
        raise ConfigError(problem)
    named: dict[str, Any] = {"scratch": {}} if model == "scratch" else {"name": model}
    given: dict[str, Any] = {} if model is None else {"model": named}
    config = RewardModelConfig.parse(apply_overrides(given, settings), "the reward model")
    rate = config.optimizer.for_model(CRITIC_RATES, config.model).peak_rate
    console.print(f"learning rate {rate:g} (usual for this model: {CRITIC_RATES.of(config.model):g})")
    with console.status("training") as status:
        result = fit_reward_model(
            data,
            out,
            config,
            lambda step, steps, metrics: status.update(
                f"step {step} of {steps}, loss {metrics['loss']:.3f}"
            ),
        )
    what = "held-out accuracy" if result.kind == "preference" else "held-out correlation"
    rows = [[name, result.measured.get(name), count] for name, count in result.counts.items()]
    console.print(ReportTable(("head", what, "held out"), rows, "reward model").rich())
    reward = "reward_model" if result.kind == "preference" else "step_model"
    console.print(
        f"trained on {result.trained_on}; written to {result.folder}. In a recipe: "
        f'rewards = [{{ reward = "{reward}", folder = "{result.folder}" }}]',
        soft_wrap=True,
        markup=False,
    )
