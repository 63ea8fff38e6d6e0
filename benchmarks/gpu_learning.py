"""A pretrained model learns on one GPU: success at first, after imitation and after RL, and where time goes.

    python benchmarks/gpu_learning.py                                   # the recipes for SmolLM2
    python benchmarks/gpu_learning.py recipes/smollm2_safe.toml seed=1 rl.steps=16 --limit 300 --out results

Each recipe is trained through the public `ludus.train`. The clock runs from the call to its end: loading the
model, demonstrations, imitation, RL and all evaluations on held-out tasks; the one-time unpacking of a GGUF
file comes before it and is reported by itself. A run over its limit is stopped after the step of RL that it is
in, and measured as it then stands. For each recipe, NAME.json and NAME.png are written, and a table of all.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

import ludus
from ludus.observe import ReportTable, RunFolder
from ludus.training import Recipe, load_recipe
from ludus.training.models.gguf import located

RECIPES = (
    "recipes/smollm2_safe.toml",
    "recipes/smollm2_directory.toml",
    "recipes/smollm2_safe_lora.toml",
)
PHASES = ("generation", "tools", "rewards", "training")


class TimeUpError(Exception):
    """The run has had its time."""


@dataclass
class Clock:
    """Notes when each step ended, and stops a run that takes too long."""

    limit: float
    started: float = field(default_factory=time.perf_counter)
    rows: list[dict[str, Any]] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.started

    def __call__(self, phase: str, step: int, total: int, metrics: dict[str, float]) -> None:
        self.rows.append({"phase": phase, "step": step, "seconds": self.seconds, **metrics})
        shown = {
            n: metrics[n]
            for n in ("success", "eval/success", "sft/loss", "step_seconds")
            if n in metrics
        }
        if phase != "warm start" or step % 20 == 0:
            told = ", ".join(f"{name} {value:.3f}" for name, value in shown.items())
            print(f"{self.seconds:7.1f} s  {phase} {step}/{total}: {told}", flush=True)
        if self.seconds > self.limit and phase == "RL" and step < total:
            raise TimeUpError


@dataclass
class Outcome:
    """What one recipe's run has shown."""

    recipe: str
    seed: int
    machine: str
    conversion_seconds: float
    seconds: float = 0.0
    stopped_after: int | None = None
    success: dict[str, float] = field(default_factory=dict)
    gained_by_rl: float = 0.0
    rl_step_seconds: float = 0.0
    time_shares: dict[str, float] = field(default_factory=dict)
    tokens_per_second: float = 0.0
    logprob_difference_max: float = 0.0
    peak_memory_gib: float = 0.0
    rows: list[dict[str, Any]] = field(default_factory=list)


def learn(path: str, overrides: list[str], limit: float, folder: Path) -> Outcome:
    """Train by one recipe, and say how it went."""
    recipe = load_recipe(path, [*overrides, f"run.folder={folder}"])
    converting = time.perf_counter()
    located(recipe.model.name or "")
    outcome = Outcome(Path(path).stem, recipe.seed, _machine(), time.perf_counter() - converting)
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    clock = Clock(limit)
    try:
        ludus.train(recipe, on_step=clock)
    except TimeUpError:
        outcome.stopped_after = next(r["step"] for r in reversed(clock.rows) if r["phase"] == "RL")
        final = ludus.evaluate(recipe, model=_checkpoint(folder))
        clock("evaluation", outcome.stopped_after, outcome.stopped_after, _prefixed(final.metrics))
    outcome.seconds = clock.seconds
    if torch.cuda.is_available():
        outcome.peak_memory_gib = torch.cuda.max_memory_allocated() / 2**30
    return _filled(outcome, clock.rows, recipe)


def _filled(outcome: Outcome, rows: list[dict[str, Any]], recipe: Recipe) -> Outcome:
    outcome.rows = rows
    rl = [row for row in rows if row["phase"] == "RL"]
    first_rl = rows.index(rl[0]) if rl else len(rows)
    before = [row["eval/success"] for row in rows[:first_rl] if "eval/success" in row]
    after = [row["eval/success"] for row in rows[first_rl:] if "eval/success" in row]
    outcome.success["base"] = before[0]
    if recipe.stages[0].kind == "sft":
        outcome.success["after the warm start"] = before[-1]
    if after:
        outcome.success["after RL"] = after[-1]
        outcome.gained_by_rl = after[-1] - before[-1]
    if rl:
        outcome.rl_step_seconds = _mean(rl, "step_seconds")
        outcome.tokens_per_second = _mean(rl, "tokens_per_second")
        outcome.time_shares = {phase: _mean(rl, f"time_share/{phase}") for phase in PHASES}
        outcome.logprob_difference_max = max(row.get("logprob_difference_max", 0.0) for row in rl)
    return outcome


def draw(outcome: Outcome, path: Path) -> None:
    """Success over wall time, and where the time of each step of RL went."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    rl = [row for row in outcome.rows if row["phase"] == "RL"]
    held_out = [row for row in outcome.rows if "eval/success" in row]
    left.plot(
        [r["seconds"] for r in rl], [r["success"] for r in rl], label="training tasks, RL", alpha=0.6
    )
    left.plot(
        [r["seconds"] for r in held_out],
        [r["eval/success"] for r in held_out],
        "o-",
        label="held-out tasks",
    )
    left.set(xlabel="seconds since the start", ylabel="success", ylim=(0, 1), title=outcome.recipe)
    left.legend()
    bottom = [0.0] * len(rl)
    for phase in PHASES:
        height = [row.get(f"time_share/{phase}", 0.0) * row["step_seconds"] for row in rl]
        right.bar([row["step"] for row in rl], height, bottom=bottom, label=phase, width=1.0)
        bottom = [below + more for below, more in zip(bottom, height, strict=True)]
    right.set(xlabel="step of RL", ylabel="seconds", title=f"seed {outcome.seed}, {outcome.machine}")
    right.legend()
    figure.savefig(path, dpi=120)


def table(outcomes: list[Outcome]) -> str:
    """One row for each recipe."""
    columns = ["recipe", "seed", "base", "after the warm start", "after RL", "gained by RL", "wall time",
               "a step of RL", *PHASES]  # fmt: skip
    rows = [
        [
            one.recipe,
            str(one.seed),
            *(_percent(one.success.get(name)) for name in ("base", "after the warm start", "after RL")),
            f"{100 * one.gained_by_rl:+.1f} points",
            f"{one.seconds:.0f} s"
            + (f", stopped after {one.stopped_after}" if one.stopped_after else ""),
            f"{one.rl_step_seconds:.1f} s",
            *(_percent(one.time_shares.get(phase)) for phase in PHASES),
        ]
        for one in outcomes
    ]
    return ReportTable(columns, rows).markdown()


def _checkpoint(folder: Path) -> str:
    latest = RunFolder(folder).latest_checkpoint()
    assert latest is not None, "a run that was stopped has saved its last step"
    return str(latest.path)


def _prefixed(metrics: dict[str, float]) -> dict[str, float]:
    return {f"eval/{name}": value for name, value in metrics.items()}


def _mean(rows: list[dict[str, Any]], name: str) -> float:
    return sum(row.get(name, 0.0) for row in rows) / len(rows)


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f}%"


def _machine() -> str:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or "CPU"
    return f"{device}, torch {torch.__version__}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("what", nargs="*", help="recipes, and overrides such as seed=1 for all of them")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for each recipe")
    parser.add_argument("--out", type=Path, default=Path("evaluations/gpu_learning"))
    options = parser.parse_args()
    if not torch.cuda.is_available() and not options.what:
        parser.error(
            "there is no GPU here, and these recipes would take hours: name those to run anyway"
        )
    overrides = [word for word in options.what if "=" in word]
    recipes = [word for word in options.what if "=" not in word] or list(RECIPES)
    options.out.mkdir(parents=True, exist_ok=True)
    outcomes: list[Outcome] = []
    for path in recipes:
        with tempfile.TemporaryDirectory() as folder:
            outcome = learn(path, overrides, options.limit, Path(folder) / "run")
        outcomes.append(outcome)
        name = f"{outcome.recipe}-seed{outcome.seed}"
        (options.out / f"{name}.json").write_text(json.dumps(asdict(outcome)))
        draw(outcome, options.out / f"{name}.png")
        print(table(outcomes), flush=True)
    (options.out / "table.md").write_text(table(outcomes))


if __name__ == "__main__":
    main()
