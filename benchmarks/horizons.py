"""Fixed short, fixed long and growing horizon from the same model: what ScalingInter-RL claims, on any recipe.

    python benchmarks/horizons.py recipes/textcraft.toml --model FOLDER [--turns 6 12 20] [KEY=VALUE]

Three runs of RL for each seed, with the same tasks and the same number of steps. While training an episode may
have the fewest of `--turns`, the most, or one after the other of them, for as many steps each. All are measured
on the held-out tasks with the most turns and with the fewest, before and after. The paper saw a long horizon
collapse: the largest gradient norm and the entropy at the end are in the table too. The model should be able to
play already (a checkpoint after the warm start); a recipe's own warm start is left out.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import ludus
from ludus.observe import ReportTable
from ludus.training import load_recipe

Row = dict[str, float]


def schedules(turns: list[int], steps: int) -> dict[str, list[list[int]]]:
    """From which step on how many turns an episode may have, for each way to train."""
    share = steps / len(turns)
    growing = [[round(place * share), most] for place, most in enumerate(turns)]
    return {
        f"fixed at {turns[0]}": [[0, turns[0]]],
        f"fixed at {turns[-1]}": [[0, turns[-1]]],
        "growing: " + ", ".join(map(str, turns)): growing,
    }


def trained(options: argparse.Namespace, schedule: list[list[int]], seed: int, folder: Path) -> Row:
    """One run, measured with the fewest and the most turns."""
    settings = [f"seed={seed}", "warm_start=none", "evaluation.every=0", *options.overrides]
    recipe = load_recipe(options.recipe, settings)
    budgets = recipe.model_dump(exclude_unset=True).get("budgets", {})
    longest = {**budgets, "max_turns": options.turns[-1]}
    shortest = {**budgets, "max_turns": options.turns[0]}
    model: dict[str, Any] = {**recipe.model.model_dump(), "name": options.model, "scratch": None}
    curriculum = [{"setting": "budgets.max_turns", "schedule": schedule}]
    started = time.perf_counter()
    result = ludus.train(
        recipe,
        model=model,
        budgets=longest,
        rl={**recipe.model_dump()["rl"], "steps": options.steps, "curriculum": curriculum},
        run={"folder": str(folder), "checkpoint_every": 100_000, "trajectories_every": 0},
    )
    seconds = time.perf_counter() - started
    rows = [row for row in result.metrics if "step_seconds" in row]
    held_out = [row["eval/success"] for row in result.metrics if "eval/success" in row]
    short = ludus.evaluate(recipe, model=str(result.model), budgets=shortest).metrics["success"]
    return {
        "before": held_out[0],
        "after": held_out[-1],
        "after_short": short,
        "grad_norm": max(row.get("gradient_norm", 0.0) for row in rows),
        "entropy": rows[-1].get("entropy", 0.0),
        "tokens": statistics.fmean(row["action_tokens"] for row in rows),
        "seconds": seconds,
    }


def shown(name: str, seeds: list[Row]) -> list[str]:
    """A row of the table: means, and the lowest and highest of what was reached."""

    def mean(key: str) -> float:
        return statistics.fmean(row[key] for row in seeds)

    after = [row["after"] for row in seeds]
    return [
        name, f"{mean('before'):.1%}", f"{mean('after'):.1%}", f"{min(after):.1%} to {max(after):.1%}",
        f"{mean('after_short'):.1%}", f"{max(row['grad_norm'] for row in seeds):.2f}",
        f"{mean('entropy'):.3f}", f"{mean('tokens'):.0f}", f"{mean('seconds'):.0f}",
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*", default=[], help="settings of the recipe: KEY=VALUE")
    parser.add_argument("--model", required=True, help="the model that all runs begin with")
    parser.add_argument("--turns", type=int, nargs="+", default=[6, 12, 20])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    options = parser.parse_intermixed_args()
    if len(options.turns) < 2 or sorted(set(options.turns)) != options.turns:
        parser.error("--turns must be at least two numbers that grow")
    table: list[list[str]] = []
    with tempfile.TemporaryDirectory() as folder:
        for name, schedule in schedules(options.turns, options.steps).items():
            runs = [
                trained(options, schedule, seed, Path(folder) / f"{len(table)}-{seed}")
                for seed in options.seeds
            ]
            table.append(shown(name, runs))
            print(" | ".join(table[-1]), flush=True)
    most, fewest = options.turns[-1], options.turns[0]
    columns = [
        "turns while training", f"before, {most} turns", f"after, {most} turns", "lowest to highest",
        f"after, {fewest} turns", "largest gradient norm", "entropy at the end", "action tokens a step",
        "seconds",
    ]  # fmt: skip
    print(ReportTable(columns, table).markdown())


if __name__ == "__main__":
    main()
