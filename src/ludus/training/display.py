"""A run on the terminal while it goes on: a header, a bar for each stage, evaluation and wait, the way back."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ludus.kernels.device import all_memory
from ludus.observe import SHOWN_METRICS, Finding, Progress, RunWriter, printable, share_text
from ludus.observe.console import SHOWN_ELSEWHERE, say
from ludus.observe.findings import STYLES
from ludus.training.config.recipe import STAGE_CONFIGS
from ludus.training.config.rl import RLConfig
from ludus.training.config.stages import BaseStageConfig
from ludus.training.report import success_text

if TYPE_CHECKING:
    from ludus.training.run_context import RunContext

log = logging.getLogger(__name__)

_OWN = {
    "pairs": "pairs",
    "accuracy": "accuracy",
    "kept": "kept",
    "reverse_kl": "KL",
    "loss": "loss",
    "held_out_loss": "held-out loss",
}
SHOWN = {**SHOWN_METRICS} | {
    f"{stage.prefix}/{name}": label
    for stage in STAGE_CONFIGS
    if stage.prefix and stage.learns
    for name, label in {**SHOWN_METRICS, **_OWN}.items()
}
"""Metrics of a progress line, if present: RL's numbers, and under their names those of other stages."""
_TIMED_STEPS = 3
"""After so many steps of a stage its end can be estimated."""
_LONG = 60.0
"""Seconds from which an estimate is worth a line."""


class ProgressDisplay:
    """One progress bar for each stage, fed by the trainer after every step; and one for each wait."""

    def __init__(self, console: Console | None = None) -> None:
        """Without a console nothing is shown."""
        self._console = console or Console(quiet=True)
        self._open = ExitStack()
        self._phase = ""
        self._bar: Progress | None = None
        self._measuring = ExitStack()
        self._measured: Progress | None = None
        self._began = 0.0
        self._first = 0

    def __call__(self, phase: str, step: int, total: int, metrics: dict[str, float]) -> None:
        if phase == "evaluation":
            self._evaluated(step, metrics)
            return
        if phase != self._phase or self._bar is None:
            self.close()
            self._phase = phase
            # KTO learns from single episodes
            shown = {**SHOWN, "dpo/pairs": "episodes"} if phase.startswith("KTO") else SHOWN
            bar = Progress(total, phase, console=self._console, first=step - 1, shown=shown)
            self._bar = self._open.enter_context(bar)
            self._began, self._first = time.monotonic(), step
        self._bar.update(step, metrics)
        if step >= total:
            self.close()  # what comes next is below it
        elif step - self._first == _TIMED_STEPS:
            self._say_end(total - step)

    def _say_end(self, left: int) -> None:
        seconds = (time.monotonic() - self._began) / _TIMED_STEPS * left
        if seconds >= _LONG:
            when = datetime.now() + timedelta(seconds=seconds)
            self.say(
                f"{self._phase}: {_duration(seconds)} for the {left} steps that are left, until about "
                f"{when:%H:%M}, evaluations aside",
                is_prose=True,
            )

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Show that something without steps goes on."""
        with self._aside(), Progress(None, what, console=self._console, is_wait=True):
            yield

    def measured(self, done: int, total: int) -> None:
        """Show that `done` of the held-out tasks have been played; the bar ends with the last one."""
        if self._measured is None:
            self._measuring.enter_context(self._aside())
            bar = Progress(total, "held-out tasks", console=self._console, is_wait=True)
            self._measured = self._measuring.enter_context(bar)
        self._measured.update(done, {})
        if done >= total:
            self._end_measuring()

    def _end_measuring(self) -> None:
        self._measured = None
        self._measuring.close()

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """One bar is on the screen at a time."""
        if self._bar is None:
            yield
            return
        with self._bar.hidden():
            yield

    def _evaluated(self, step: int, metrics: dict[str, float]) -> None:
        shown = [f"success {success_text(metrics)}"]
        if (low := metrics.get("eval/success_low")) is not None and metrics.get("eval/failures"):
            bounds = f"{share_text(low)} to {share_text(metrics['eval/success_high'])}"
            shown.append(f"{metrics['eval/failures']:.0f} LOST (95% interval {bounds})")
        passes = [name for name in metrics if name.startswith("eval/pass@")]
        shown += [f"{name.removeprefix('eval/')} {share_text(metrics[name])}" for name in passes]
        modes = {
            n.rpartition("/")[2]: v for n, v in metrics.items() if n.startswith("eval/failure_mode/")
        }
        if (most := max(modes, key=lambda mode: modes[mode], default=None)) is not None and modes[most]:
            shown.append(f"most fail by {most.replace('_', ' ')} ({share_text(modes[most])})")
        self.say(f"held-out tasks after step {step}: {', '.join(shown)}", is_prose=True)

    def begin(self, context: RunContext) -> None:
        """The header: what is trained on what, where, and how long the way is."""
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="dim", no_wrap=True)
        grid.add_column(overflow="fold")
        for name, text in _header(context):
            grid.add_row(name, Text(printable(text)))
            log.info("%s: %s", name, text)
        self._console.print(grid)

    def say(self, text: str, *, style: str = "", is_prose: bool = False) -> None:
        """A line of its own, above the bar where there is one."""
        say(self._console, text, style=style, is_prose=is_prose)

    def find(self, step: int, finding: Finding) -> None:
        """A finding, in the colour of its severity; also in the log."""
        level = logging.INFO if finding.severity == "note" else logging.WARNING
        is_shown = {SHOWN_ELSEWHERE: not self._console.quiet}
        log.log(level, "step %d: %s. %s", step, finding.title, finding.detail, extra=is_shown)
        if finding.severity != "note":
            told = f"step {step}: {finding.title}. {finding.detail}"
            self.say(told, style=STYLES[finding.severity], is_prose=True)

    def close(self) -> None:
        self._end_measuring()
        self._open.close()
        self._bar = None


def _header(context: RunContext) -> Iterator[tuple[str, str]]:
    recipe, sets = context.recipe, context.task_sets
    weights = list(context.policy.parameters())
    total = sum(one.numel() for one in weights)
    trained = sum(one.numel() for one in weights if one.requires_grad)
    what = "all trained" if trained == total else f"{trained:,} ({share_text(trained / total)}) trained"
    dtype = str(weights[0].dtype).removeprefix("torch.")
    yield (
        "model",
        f"{recipe.model.name or 'from scratch'}, {total:,} parameters, {what}, {dtype}",
    )
    device = weights[0].device
    ranks = f", {context.ranks.size} trainer ranks" if context.ranks.size > 1 else ""
    yield "device", f"{device}, {all_memory(device) / 2**30:.1f} GiB memory{ranks}"
    held_out = sum(map(len, context.held_out(recipe.evaluation.tasks)))
    names = f" in {len(sets)} sets" if len(sets) > 1 else ""
    yield "tasks", f"{sum(len(one.tasks) for one in sets):,} to train on, {held_out:,} held out{names}"
    for number, config in enumerate(recipe.stages):
        yield "stages" if not number else "then", _stage_text(config)


def _stage_text(config: BaseStageConfig) -> str:
    steps = config.total_steps
    text = f"{config.title.removeprefix('the ')}: {steps} {'step' if steps == 1 else 'steps'}"
    if isinstance(config, RLConfig):
        each = config.tasks * config.attempts
        return f"{text} of {config.tasks} tasks × {config.attempts} attempts = {each} episodes"
    batch = getattr(config, "batch", None)
    return text if batch is None else f"{text}, {batch} examples each"


def _duration(seconds: float) -> str:
    minutes = round(seconds / 60)
    if minutes == 1:
        return "1 minute"
    return f"{minutes} minutes" if minutes < 120 else f"{minutes / 60:.1f} hours"


@contextmanager
def show_progress(
    run: RunWriter, console: Console | None, again: str, notes: Sequence[str] = ()
) -> Iterator[ProgressDisplay]:
    """Show a run: its folder, its progress, and where it was saved when it is stopped.

    `again` is how to go on with it, `notes` are lines to begin with. Without a console nothing is shown.
    """
    display = ProgressDisplay(console)
    display.say(f"run folder: {run.path}")
    for note in notes:
        display.say(note, is_prose=True)
    try:
        yield display
    except (KeyboardInterrupt, asyncio.CancelledError):
        display.close()
        latest = run.latest_checkpoint()
        saved = f"saved after step {latest.step} in {latest.path}" if latest else "nothing to save yet"
        display.say(f"stopped; {saved}. Go on with: {again}")
        raise
    finally:
        display.close()
