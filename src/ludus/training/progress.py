"""Progress of a run, on the terminal or in a notebook."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from rich.console import Console
from rich.text import Text

from ludus.observe import SHOWN_METRICS, Progress, RunWriter, share_text
from ludus.training.config.recipe import STAGE_CONFIGS
from ludus.training.report import success_text

_OWN = {
    "pairs": "pairs",
    "accuracy": "accuracy",
    "kept": "kept",
    "reverse_kl": "KL",
    "loss": "loss",
    "held_out_loss": "held-out loss",
}
_SHOWN = {**SHOWN_METRICS} | {
    f"{stage.prefix}/{name}": label
    for stage in STAGE_CONFIGS
    if stage.prefix and stage.learns
    for name, label in {**SHOWN_METRICS, **_OWN}.items()
}
"""Metrics of a progress line, if present: RL's numbers, and under their names those of other stages."""


class ProgressDisplay:
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
            # KTO learns from single episodes
            shown = {**_SHOWN, "dpo/pairs": "episodes"} if phase.startswith("KTO") else _SHOWN
            bar = Progress(total, phase, console=self._console, first=step - 1, shown=shown)
            self._bar = self._open.enter_context(bar)
        self._bar.update(step, metrics)

    def _evaluated(self, step: int, metrics: dict[str, float]) -> None:
        shown = [f"success {success_text(metrics)}"]
        if (low := metrics.get("eval/success_low")) is not None and metrics.get("eval/failures"):
            bounds = f"{share_text(low)} to {share_text(metrics['eval/success_high'])}"
            shown.append(f"{metrics['eval/failures']:.0f} FAILED (95% interval {bounds})")
        passes = [name for name in metrics if name.startswith("eval/pass@")]
        shown += [f"{name.removeprefix('eval/')} {share_text(metrics[name])}" for name in passes]
        modes = {
            n.rpartition("/")[2]: v for n, v in metrics.items() if n.startswith("eval/failure_mode/")
        }
        if (most := max(modes, key=lambda mode: modes[mode], default=None)) is not None and modes[most]:
            shown.append(f"most failures by {most.replace('_', ' ')} ({share_text(modes[most])})")
        self.say(f"held-out tasks after step {step}: {', '.join(shown)}")

    def say(self, text: str) -> None:
        """A line of its own, above the bar where there is one."""
        if self._bar is not None:
            self._bar.say(text)
        else:
            self._console.print(Text(text), soft_wrap=True)  # paths and commands are there to be copied

    def close(self) -> None:
        self._open.close()
        self._bar = None


@contextmanager
def show_progress(
    run: RunWriter, console: Console | None, again: str, notes: Sequence[str] = ()
) -> Iterator[ProgressDisplay | None]:
    """Show a run: its folder, its progress, and where it was saved when it is stopped.

    `again` is how to go on with it, `notes` are lines to begin with. Without a console nothing is shown.
    """
    if console is None:
        yield None
        return
    display = ProgressDisplay(console)
    display.say("\n".join([f"run folder: {run.path}", *notes]))
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
