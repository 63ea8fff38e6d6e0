"""Synchronous against asynchronous training: wall time and what is learned, with tools that are slow or hang.

    python benchmarks/async_training.py [--rounds 3] [--steps 12] [--staleness 0 1 2] [--deadline 4]
    python benchmarks/async_training.py --engines 0 1 [...]
    python benchmarks/async_training.py --learning [--seeds 0 1 2] [--staleness 0 1 2 4 8]
    python benchmarks/async_training.py --recipe recipes/gsm8k.toml --model FOLDER --own-tools [KEY=VALUE]
    python benchmarks/async_training.py --recipe recipes/textcraft.toml --model FOLDER --latency 2

The task is the safe of the quickstart, after its warm start, which is done once. A step has 8 tasks × 8
attempts = 64 episodes, one optimizer update, one thread (OMP_NUM_THREADS=1). Every turn's calls take a
lognormal time of 0.4 s on average (sigma 1); 1% get no answer until their deadline. All runs have the same
tasks, the same seeds and the same number of episodes; each is a process of its own, and they take turns,
because the machine may have other users: compare within a round. Wall time is from the beginning of the first
step to the end of the last; success is over 200 held-out safes afterwards, with tools that answer at once.

With `--engines N` the asynchronous runs sample in N further processes, each with one thread of its own; the run
without staleness is in one process, as before.

With `--recipe` another recipe is trained, from a model that you have, with its own batch: a pretrained one on a
GPU. `--own-tools` adds no latency, so that its tools take what they take (programs that hang are GSM8K's
stragglers); the table then has the GPU's utilisation too, by NVML.

`--learning` leaves out the latency and asks what staleness does to learning, with and without importance
correction, from the same warm start.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import ludus
from ludus.observe import ReportTable
from ludus.training import load_recipe

RECIPE = Path(__file__).parent.parent / "recipes" / "safe.toml"
MEAN, SIGMA, HANGING = 0.4, 1.0, 0.01


class SlowTools(ludus.Agent):
    """The usual loop, whose calls take time; some get no answer before their deadline."""

    def __init__(self, mean: float, deadline: float) -> None:
        self.mean, self.deadline = mean, deadline

    async def run(self, episode: ludus.Episode) -> None:
        draw = random.Random(episode.trajectory.seed)
        while not episode.over:
            turn = await episode.generate()
            if not turn.calls:
                episode.answer(turn.answer)
                return
            if self.mean and draw.random() < HANGING:
                await asyncio.sleep(self.deadline)
                episode.observe("The tool did not answer in time.")
                continue
            # the mean of a lognormal is exp(mu + sigma**2 / 2)
            seconds = self.mean * draw.lognormvariate(-(SIGMA**2) / 2, SIGMA)
            await asyncio.sleep(min(seconds, self.deadline) if self.mean else 0)
            episode.observe(await episode.call(turn.calls))


def child(options: dict[str, Any]) -> dict[str, float]:
    """One run: its wall time, its lag, and the success afterwards."""
    agent = SlowTools(options["latency"], options["deadline"]) if options["latency"] else None
    times: list[float] = []

    def on_step(phase: str, step: int, total: int, metrics: dict[str, float]) -> None:
        times.append(time.perf_counter())
        if agent is not None and phase == "evaluation":
            agent.mean = options["latency"]  # the first one measures the model that all begin with
        if agent is not None and phase != "evaluation" and step == total:
            agent.mean = 0.0

    if agent is not None:
        agent.mean = 0.0
    settings = [f"seed={options['seed']}", "warm_start=none", "threads=1", "evaluation.every=0"]
    recipe = load_recipe(options["recipe"], [*settings, *options["overrides"]])
    rl = {
        **recipe.model_dump()["rl"],
        "steps": options["steps"],
        "updates": 1,
        "staleness": options["staleness"],
        "correction": options["correction"],
    }
    run = {"folder": options["folder"], "checkpoint_every": 1000, "trajectories_every": 0}
    result = ludus.train(
        recipe,
        model={"name": options["model"], "scratch": None},
        cluster={"engines": options.get("engines", 0)},
        rl=rl,
        run=run,
        progress=False,
        **({} if agent is None else {"agent": agent}),
        on_step=on_step,
    )
    rows = [row for row in result.metrics if "step_seconds" in row]
    measured = [row["eval/success"] for row in result.metrics if "eval/success" in row]
    return {
        "seconds": times[-2] - times[0],
        "lag_mean": statistics.fmean(row.get("lag_mean", 0.0) for row in rows),
        "lag_max": max(row.get("lag_max", 0.0) for row in rows),
        "versions": statistics.fmean(row.get("versions_per_episode", 1.0) for row in rows),
        "sync": statistics.fmean(row.get("engine/sync_seconds", 0.0) for row in rows),
        "paused": statistics.fmean(row.get("paused_seconds", 0.0) for row in rows),
        "training": statistics.fmean(row["time_share/training"] * row["step_seconds"] for row in rows),
        "busy": statistics.fmean(row.get("gpu/utilisation", 0.0) for row in rows),
        "slowest": max(row["step_seconds"] for row in rows),
        "ess": min(row.get("ess", 1.0) for row in rows),
        "before": measured[0],
        "success": measured[-1],
        "last": statistics.fmean(row["success"] for row in rows[-4:]),
    }


def run_child(**options: Any) -> dict[str, float]:
    command = [sys.executable, __file__, "--child", json.dumps(options)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def warm_start(folder: Path) -> str:
    """The model that all runs begin with."""
    recipe = load_recipe(RECIPE, ["rl.steps=0", "threads=1", "evaluation.every=0"])
    settings = {"run": {"folder": str(folder)}, "progress": False}
    return str(ludus.train(recipe, **settings).model)


def speed(options: argparse.Namespace, folder: Path, model: str) -> None:
    rows: list[list[str]] = []
    for number in range(options.rounds):
        base = 0.0
        cases = [(s, e) for s in options.staleness for e in (options.engines if s else [0])]
        for staleness, engines in cases:
            place = folder / f"{number}-{staleness}-{engines}"
            found = run_child(
                model=model, folder=str(place), staleness=staleness, seed=number, steps=options.steps,
                correction=None, latency=0.0 if options.own_tools else options.latency,
                deadline=options.deadline, engines=engines, recipe=options.recipe,
                overrides=options.overrides,
            )  # fmt: skip
            base = base or found["seconds"]
            rows.append([
                str(number), "sync" if staleness == 0 else f"S = {staleness}", str(1 + engines),
                f"{found['seconds']:.1f} s",
                f"{base / found['seconds']:.2f}", f"{found['slowest']:.1f} s", f"{found['training']:.2f} s",
                f"{found['busy']:.0%}" if found["busy"] else "–",
                f"{found['lag_mean']:.2f} / {found['lag_max']:.0f}", f"{found['versions']:.2f}",
                f"{found['before']:.1%} → {found['success']:.1%}",
            ])  # fmt: skip
            print(" | ".join(rows[-1]), flush=True)
    columns = [
        "round",
        "",
        "processes",
        "wall",
        "times as fast",
        "slowest step",
        "update",
        "GPU busy",
        "lag mean / max",
        "versions an episode",
    ]
    print(ReportTable([*columns, "success"], rows).markdown())


def learning(options: argparse.Namespace, folder: Path, model: str) -> None:
    rows: list[list[str]] = []
    for staleness in options.staleness:
        for correction in ["truncated", "none"] if staleness else [None]:
            found = [
                run_child(
                    model=model, folder=str(folder / f"{staleness}-{correction}-{seed}"), seed=seed,
                    staleness=staleness, steps=options.steps, correction=correction,
                    latency=0.0, deadline=0.0, recipe=options.recipe, overrides=options.overrides,
                )
                for seed in options.seeds
            ]  # fmt: skip
            success = [one["success"] for one in found]
            spread = statistics.stdev(success) if len(success) > 1 else 0.0
            rows.append([
                str(staleness), correction or "–", ", ".join(f"{one:.1%}" for one in success),
                f"{statistics.fmean(success):.1%} ± {spread:.1%}",
                f"{statistics.fmean(one['last'] for one in found):.1%}",
                f"{max(one['lag_max'] for one in found):.0f}", f"{min(one['ess'] for one in found):.2f}",
            ])  # fmt: skip
            print(" | ".join(rows[-1]), flush=True)
    columns = [
        "S",
        "correction",
        "success by seed",
        "mean ± sd",
        "last 4 steps",
        "lag max",
        "smallest ESS",
    ]
    print(ReportTable(columns, rows).markdown())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--staleness", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--engines", type=int, nargs="*", default=[0])
    parser.add_argument("--latency", type=float, default=MEAN)
    parser.add_argument("--deadline", type=float, default=4.0)
    parser.add_argument("--learning", action="store_true")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--model", help="a folder with the model that all runs begin with")
    parser.add_argument("--recipe", default=str(RECIPE))
    parser.add_argument("--own-tools", action="store_true", help="add no latency")
    parser.add_argument("overrides", nargs="*", default=[], help="settings of the recipe: KEY=VALUE")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_intermixed_args()
    if options.child is not None:
        print(json.dumps(child(json.loads(options.child))))
        return
    if options.recipe == str(RECIPE):
        options.overrides = ["rl.tasks=8", *options.overrides]
    elif not options.model:
        parser.error("--recipe needs --model: a folder, or a name on the hub")
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or warm_start(Path(folder) / "warm-start")
        (learning if options.learning else speed)(options, Path(folder), model)


if __name__ == "__main__":
    main()
