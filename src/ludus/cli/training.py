"""`ludus train`: progress while it runs, a report when it ends, and the way back after Ctrl-C."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from ludus.core.failures import ConfigError
from ludus.observe import Progress, RunWriter, episode_text, printable, table_rich
from ludus.observe.progress import SHOWN
from ludus.training.parts import load_parts
from ludus.training.recipe import Recipe, load_recipe

if TYPE_CHECKING:
    from ludus.training.api import Result

_OWN = {
    "pairs": "pairs",
    "accuracy": "accuracy",
    "kept": "kept",
    "reverse_kl": "KL",
    "loss": "loss",
    "held_out_loss": "held-out loss",
}
_SHOWN = {**SHOWN} | {
    f"{stage}/{name}": label
    for stage in ("sft", "dpo", "rejection", "distill")
    for name, label in {**SHOWN, **_OWN}.items()
}
"""What a progress line has, where a step has it: RL's numbers, and under their names those of other stages."""


class Display:
    """One progress bar for each stage, fed by the trainer after every step."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._open = ExitStack()
        self._phase = ""
        self._bar: Progress | None = None

    def __call__(self, phase: str, step: int, total: int, metrics: dict[str, float]) -> None:
        if phase == "evaluation":
            self._evaluated(step, metrics)
            return
        if phase != self._phase or self._bar is None:
            self.close()
            self._phase = phase
            bar = Progress(total, phase, console=self._console, first=step - 1, shown=_SHOWN)
            self._bar = self._open.enter_context(bar)
        self._bar.update(step, metrics)

    def _evaluated(self, step: int, metrics: dict[str, float]) -> None:
        from ludus.training.report import success_text

        shown = [f"success {success_text(metrics)}"]
        if (low := metrics.get("eval/success_low")) is not None and metrics.get("eval/failures"):
            high = metrics["eval/success_high"]
            shown.append(f"{metrics['eval/failures']:.0f} FAILED (95% interval {low:.1%} to {high:.1%})")
        passes = [name for name in metrics if name.startswith("eval/pass@")]
        shown += [f"{name.removeprefix('eval/')} {metrics[name]:.1%}" for name in passes]
        text = f"held-out tasks after step {step}: {', '.join(shown)}"
        if self._bar is not None:
            self._bar.say(text)
        else:
            self._console.print(Text(text))

    def close(self) -> None:
        self._open.close()
        self._bar = None


def run_training(recipe_path: Path | None, overrides: list[str], resume: Path | None) -> None:
    """Train, show, report."""
    console = Console(stderr=True)
    if recipe_path is not None and resume is not None:
        raise ConfigError(
            f"a resumed run goes on by its own recipe: leave out {str(recipe_path)!r}, or begin a "
            "new run from its last checkpoint with model.name=FOLDER"
        )
    if recipe_path is None and resume is None:
        raise ConfigError("give either a recipe, or --resume and a run's folder")
    if resume is not None:
        run = RunWriter.resume(resume)
        recipe = Recipe.parse(run.recipe(), f"{resume}/recipe.json")
        parts = load_parts(recipe)
    else:
        assert recipe_path is not None
        recipe = load_recipe(recipe_path, overrides)
        parts = load_parts(recipe)
    # torch and transformers are imported from here on: what is wrong with a recipe is said before
    from ludus.training.api import new_run, train_async
    from ludus.training.beginning import check_parts
    from ludus.training.models import check_source

    if resume is None:
        check_parts(recipe, parts)  # before there is a folder
        check_source(recipe.model)
        run = new_run(recipe)
    console.print(Text(f"run folder: {run.path}"), soft_wrap=True)
    display = Display(console)
    try:
        result = asyncio.run(_until_told(train_async(recipe, parts, run, display)))
    except (KeyboardInterrupt, asyncio.CancelledError):
        display.close()
        latest = run.latest_checkpoint()
        saved = f"saved after step {latest.step}" if latest else "nothing to save yet"
        text = f"stopped; {saved}. Go on with: ludus train --resume {run.path}"
        console.print(Text(text), soft_wrap=True)  # it is there to be copied
        raise KeyboardInterrupt from None
    finally:
        display.close()
    _report(console, result)


async def _until_told(work: Coroutine[Any, Any, Result]) -> Result:
    """Run `work`; SIGTERM stops it as Ctrl-C does, so that `kill` and schedulers lose nothing."""
    task = asyncio.ensure_future(work)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await task


def _report(console: Console, result: Result) -> None:
    from ludus.training.report import COLUMNS

    for label, trajectory in result.report.samples:
        console.rule(Text(f"an episode {label}"))
        console.print(Text(episode_text(trajectory)), soft_wrap=True)
    if result.report.rows:
        console.print(table_rich("", COLUMNS, result.report.rows))
    for text in result.report.warnings:
        console.print(Text(f"warning: {printable(text)}", style="yellow"), soft_wrap=True)
    console.print(Text(f"curve:   {result.run.curve_path}"), soft_wrap=True)
    console.print(Text(f"report:  {result.run.report_path}"), soft_wrap=True)
    console.print(Text(f"model:   {result.model}"), soft_wrap=True)
    console.print(
        Text(f"next:    ludus rollout {result.run.path} --tasks 3   (watch it play)"), soft_wrap=True
    )
