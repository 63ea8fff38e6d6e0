"""TSR: how many tasks does search solve, with how many tokens? Turn by turn, as trees, and by whole attempts.

    python benchmarks/turn_search.py [--seeds 0 1 2] [--tasks 24] [--attempts 32] [--warm-steps 90]

The task is the safe of the quickstart (up to 14 turns, each depends on the state that those before it have
left), the policy its tiny model after a short warm start, which is done once. `best_of` plays so many whole
attempts at each task; the others may sample as many tokens at a task as these took on average. The score of a
prefix is the recipe's reward, as if the episode ended there (which counts the dials found). All by `ludus synth
tsr`, one thread each. Solved: tasks with at least one success.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

import ludus
from ludus.core.trajectory import SegmentKind, Trajectory, is_success
from ludus.observe import ReportTable, read_trajectories
from ludus.training import load_recipe

RECIPE = Path(__file__).parent.parent / "recipes" / "safe.toml"

SEARCHES: dict[str, list[str]] = {
    "whole attempts": ["search=best_of"],
    "tree, beam 4": ["search=tree", "roots=8", "beam=4", "rounds=6"],
    "turns, 4 candidates, beam 1": ["search=turns", "candidates=4", "beam=1"],
    "turns, 8 candidates, beam 1": ["search=turns", "candidates=8", "beam=1"],
    "turns, 8 candidates, beam 4": ["search=turns", "candidates=8", "beam=4"],
}


def warm_model(folder: Path, steps: int) -> tuple[str, float]:
    """The quickstart's model after so many steps of imitation, and its success on held-out safes."""
    recipe = load_recipe(RECIPE, [f"warm_start.steps={steps}", "rl.steps=0", "threads=1"])
    result = ludus.train(recipe, run={"folder": str(folder)}, progress=False)
    return str(folder), [row["eval/success"] for row in result.metrics if "eval/success" in row][-1]


def own_tokens(one: Trajectory) -> int:
    """What was sampled for this attempt and not for the one that it branched off."""
    first = one.branch.segments if one.branch is not None else 0
    segments = one.sequences[0].segments[first:]
    return sum(len(segment.tokens) for segment in segments if segment.kind is SegmentKind.ACTION)


def searched(model: str, folder: Path, settings: list[str], tasks: int, seed: int) -> tuple[int, int]:
    """Tasks that were solved, and tokens that were sampled."""
    given = [f"synth.{one}" for one in [*settings, f"tasks={tasks}"]]
    command = [sys.executable, "-m", "ludus", "synth", "tsr", str(RECIPE), "--model", model]
    command += ["--out", str(folder), f"seed={seed}", "threads=1", *given]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    written = [read_trajectories(folder / f"{name}.parquet") for name in ("examples", "rejected")]
    episodes = {(one.task.id, one.attempt): one for some in written for one in some}
    solved = {one.task.id for one in episodes.values() if one.reward is not None and is_success(one)}
    return len(solved), sum(map(own_tokens, episodes.values()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--tasks", type=int, default=24, help="safes of each search")
    parser.add_argument("--attempts", type=int, default=32, help="whole attempts at each task")
    parser.add_argument("--warm-steps", type=int, default=90, help="steps of imitation before")
    options = parser.parse_args()
    found: dict[str, list[tuple[int, int]]] = {name: [] for name in SEARCHES}
    with tempfile.TemporaryDirectory() as place:
        model, success = warm_model(Path(place) / "warm", options.warm_steps)
        print(f"the policy opens {success:.1%} of held-out safes at the first attempt", flush=True)
        for seed in options.seeds:
            budget = 0
            for number, (name, settings) in enumerate(SEARCHES.items()):
                limit = [f"max_tokens={budget}"] if budget else []
                one = searched(
                    model,
                    Path(place) / f"{seed}-{number}",
                    [*settings, f"attempts={options.attempts}", *limit],
                    options.tasks,
                    seed,
                )
                budget = budget or one[1] // options.tasks
                found[name].append(one)
                print(f"seed {seed}, {name}: {one[0]} of {options.tasks}, {one[1]:,} tokens", flush=True)
    whole = [tokens for _, tokens in found["whole attempts"]]
    rows = [
        [
            name,
            " ".join(str(solved) for solved, _ in ones),
            f"{statistics.fmean(solved for solved, _ in ones) / options.tasks:.0%}",
            f"{statistics.fmean(tokens / all for (_, tokens), all in zip(ones, whole, strict=True)):.0%}",
        ]
        for name, ones in found.items()
    ]
    print(ReportTable(["search", "solved, by seed", "solved", "tokens"], rows).markdown())


if __name__ == "__main__":
    main()
