"""What the quickstart reaches, seed by seed, and what imitation alone reaches on the same demonstrations.

    python benchmarks/quickstart.py [--seeds 0 1 2] [--imitation 1000] [--threads 2]

Each run is the recipe of `make quickstart`; imitation runs have more warm-start steps and no RL. Measured on
the 200 held-out safes, sampled at temperature 1 and greedily. Wall time is the whole training, without the
installation.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the command line does, before torch is loaded

import ludus
from ludus.core import Sampling
from ludus.observe import ReportTable
from ludus.training import load_recipe

RECIPE = Path(__file__).parent.parent / "recipes" / "safe.toml"


def measured(seed: int, folder: Path, **settings: Any) -> tuple[dict[str, float], float]:
    """Success by stage, the final model's greedy success, and the seconds that training took."""
    recipe = load_recipe(
        RECIPE, [f"seed={seed}", *(f"{k.replace('__', '.')}={v}" for k, v in settings.items())]
    )
    recipe = recipe.model_copy(update={"run": recipe.run.model_copy(update={"folder": str(folder)})})
    started = time.perf_counter()
    result = ludus.train(recipe)
    seconds = time.perf_counter() - started
    stages = {when: float(share.rstrip("%")) for when, share in result.success.items()}
    greedy = ludus.evaluate(recipe, model=str(result.model), sampling=Sampling(temperature=0))
    stages["greedy"] = 100 * greedy.metrics["success"]
    losses = [row["sft/loss"] for row in result.metrics if "sft/loss" in row]
    stages["loss"] = sum(losses[-20:]) / len(losses[-20:])
    return stages, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--imitation", type=int, nargs="*", default=[1000])
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    rows: list[list[str]] = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in options.seeds:
            stages, seconds = measured(seed, Path(folder) / f"rl-{seed}", threads=options.threads)
            at = [
                f"{stages[name]:.1f}%"
                for name in ("at the start", "after the warm start", "after RL", "greedy")
            ]
            rows.append([str(seed), *at, f"{seconds:.0f} s"])
            print(rows[-1], flush=True)
        columns = [
            "seed",
            "at the start",
            "after the warm start",
            "after RL",
            "after RL, greedy",
            "wall time",
        ]
        print(ReportTable(columns, rows).markdown())
        rows = []
        for steps in options.imitation:
            stages, _ = measured(0, Path(folder) / f"sft-{steps}", threads=options.threads,
                                 warm_start__steps=steps, rl__steps=0)  # fmt: skip
            loss, success, greedy = stages["loss"], stages["after the warm start"], stages["greedy"]
            rows.append([str(steps), f"{loss:.3f}", f"{success:.1f}%", f"{greedy:.1f}%"])
            print(rows[-1], flush=True)
        print(
            ReportTable(["steps of imitation", "loss at the end", "success", "greedy"], rows).markdown()
        )


if __name__ == "__main__":
    main()
