"""All algorithms on one small multi-turn task: same start, same budget, several seeds.

    python benchmarks/algorithms/compare.py                  # about 20 minutes on two cores
    python benchmarks/algorithms/compare.py --seeds 1 --only grpo --only ppo
    python benchmarks/algorithms/compare.py --only GRPO --reruns 4   # how far one seed varies between reruns
    python benchmarks/algorithms/compare.py --write          # also writes curves and numbers to docs/images

For each seed a small model is made and warm-started on an expert's demonstrations once; every algorithm then
trains it for the same number of steps, tasks and attempts, on one thread, as many runs at a time as there are
cores. Success is measured on held-out tasks before and after. A run's seed fixes its tasks and its random
numbers, but not which episodes share a batch: rounding then differs, and so does the outcome.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
RECIPE = "benchmarks/algorithms/treasure.toml"
EXPERT = "benchmarks/algorithms/treasure.py:expert"
STEPS, TASKS, ATTEMPTS = 20, 16, 8
OPTIMIZER = {"learning_rate": 5e-4, "warmup_steps": 2, "micro_batch_tokens": 4096}
CRITIC = {
    "optimizer": {"learning_rate": 1e-3, "micro_batch_tokens": 4096},
    "warmup_steps": 2,
    "passes": 2,
}
PPO: dict[str, Any] = {"algorithm": {"name": "ppo", "lam": 0.95}, "critic": CRITIC}

RUNS: dict[str, dict[str, Any]] = {
    "GRPO": {"algorithm": "grpo"},
    "Dr. GRPO": {"algorithm": "dr_grpo", "aggregation": {"length": 32}},
    "DAPO (refills, clip-higher)": {"algorithm": "dapo", "refill": {"rounds": 1}},
    "GSPO": {"algorithm": "gspo"},
    "CISPO": {"algorithm": "cispo"},
    "RLOO": {"algorithm": "rloo"},
    "REINFORCE, batch mean": {"algorithm": "reinforce"},
    "REINFORCE++": {"algorithm": "reinforce_pp"},
    "REINFORCE++-baseline": {"algorithm": "reinforce_pp_baseline"},
    "PPO, critic": PPO,
    "PPO, value head": {**PPO, "critic": {**CRITIC, "kind": "head"}},
    "turn-level GRPO": {"algorithm": "turn_grpo"},
    "GiGPO": {"algorithm": "gigpo"},
    "GRPO-RoC (16, keep 8)": {"algorithm": "grpo", "attempts": 16, "keep_attempts": 8, "tasks": 8},
}
DPO: dict[str, Any] = {
    "kind": "dpo", "steps": STEPS, "tasks": TASKS, "attempts": ATTEMPTS, "beta": 0.1, "optimizer": OPTIMIZER,
}  # fmt: skip
PARADIGMS: dict[str, list[dict[str, Any]]] = {
    "DPO, mined pairs": [DPO],
    "DPO, twice the learning rate": [{**DPO, "optimizer": {**OPTIMIZER, "learning_rate": 1e-3}}],
    "IPO, mined pairs": [{**DPO, "loss": "ipo"}],
    "SimPO, mined pairs": [{**DPO, "loss": "simpo", "beta": 2.0}],
    "KTO, mined pairs": [{**DPO, "loss": "kto"}],
    "rejection sampling, 4 rounds": [
        {"kind": "rejection", "rounds": 4, "tasks": TASKS * STEPS // 4, "attempts": ATTEMPTS, "keep": 2,
         "steps": 10, "optimizer": OPTIMIZER},
    ],
}  # fmt: skip
MASKS: dict[str, dict[str, Any]] = {
    "PPO, both masks": PPO,
    "PPO, no advantage mask": {**PPO, "advantage_mask": False},
    "PPO, no loss mask": {**PPO, "loss_mask": False},
    "PPO, neither mask": {**PPO, "loss_mask": False, "advantage_mask": False},
}
HORIZONS: dict[str, dict[str, Any]] = {
    "fixed at 2 turns": {"curriculum": [{"setting": "budgets.max_turns", "schedule": [[0, 2]]}]},
    "fixed at 8 turns": {"curriculum": [{"setting": "budgets.max_turns", "schedule": [[0, 8]]}]},
    "growing: 2, 4, 8": {
        "curriculum": [{"setting": "budgets.max_turns", "schedule": [[0, 2], [7, 4], [14, 8]]}]
    },
}
KINDS: dict[str, dict[str, Any]] = {
    "algorithms": {**RUNS, **PARADIGMS}, "masks": MASKS, "horizons": HORIZONS,
}  # fmt: skip


def settings_of(label: str) -> dict[str, Any]:
    """The recipe's tables for one run."""
    if label in PARADIGMS:
        return {"stage": PARADIGMS[label]}
    common = {"steps": STEPS, "tasks": TASKS, "attempts": ATTEMPTS, "updates": 2, "optimizer": OPTIMIZER}
    own = {**RUNS, **MASKS, **HORIZONS}[label]
    return {"rl": {**common, **own}}


def run_one(label: str, seed: int, start: str, folder: str) -> dict[str, Any]:
    """One run, in this process: what it reached, and how long it took."""
    import ludus

    began = time.perf_counter()
    result = ludus.train(
        RECIPE,
        seed=seed,
        model={"name": start, "scratch": None},
        run={"folder": folder, "trajectories_every": 0, "checkpoint_every": 1000},
        **settings_of(label),
    )
    rows = result.metrics
    held_out = [row["eval/success"] for row in rows if row.get("eval/success") is not None]
    names = ("success", "dpo/success", "rejection/success")
    curve = [row[name] for row in rows for name in names if row.get(name) is not None]
    found = {"label": label, "seed": seed, "before": held_out[0], "after": held_out[-1], "curve": curve}
    if label in HORIZONS:
        budgets = {"max_turns": 8, "max_turn_tokens": 24}
        for name, model in (("before_8", start), ("after_8", str(result.model))):
            longer = ludus.evaluate(RECIPE, model=model, budgets=budgets, attempts=4)
            found[name] = longer.metrics["success"]
    return {**found, "seconds": time.perf_counter() - began}


def warm_start(seed: int, folder: str) -> str:
    """A small model that can call the tool, and not much more."""
    import ludus

    steps = {"steps": 160, "batch": 16}
    optimizer = {"learning_rate": 3e-3, "warmup_steps": 10, "schedule": "cosine"}
    result = ludus.train(
        RECIPE, seed=seed, demonstrations=EXPERT, warm_start={**steps, "optimizer": optimizer},
        rl={"steps": 0}, evaluation={"tasks": 1}, run={"folder": folder, "trajectories_every": 0},
    )  # fmt: skip
    return str(result.model)


def in_process(*words: str) -> Any:
    """The last line that this script prints when called with `words`, as JSON."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    done = subprocess.run(
        [sys.executable, __file__, *words], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"{words}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def compare(labels: list[str], seeds: int, at_once: int, reruns: int = 1) -> list[dict[str, Any]]:
    """All runs, so many at a time; each of them `reruns` times."""
    with (
        tempfile.TemporaryDirectory(prefix="ludus-compare-") as folder,
        ThreadPoolExecutor(at_once) as pool,
    ):
        starts = list(
            pool.map(lambda s: in_process("--warm", str(s), f"{folder}/warm-{s}"), range(seeds))
        )
        jobs = [(label, seed) for label in labels for seed in range(seeds) for _ in range(reruns)]

        def job(numbered: tuple[int, tuple[str, int]]) -> dict[str, Any]:
            number, (label, seed) = numbered
            found = in_process("--one", label, str(seed), starts[seed], f"{folder}/run-{number}")
            shown = f"{found['before']:.1%} -> {found['after']:.1%} in {found['seconds']:.0f} s"
            print(f"{label}, seed {seed}: {shown}", file=sys.stderr, flush=True)
            return dict(found)

        return list(pool.map(job, enumerate(jobs)))


def table(results: list[dict[str, Any]], title: str, suffix: str = "") -> str:
    """Mean and spread over the seeds, as Markdown."""
    lines = [
        f"| {title} | before | after: mean | spread (lowest to highest) | seconds a run |",
        "|---|---|---|---|---|",
    ]
    for label in dict.fromkeys(result["label"] for result in results):
        own = [result for result in results if result["label"] == label]
        after = [result["after" + suffix] for result in own]
        before = statistics.fmean(result["before" + suffix] for result in own)
        seconds = statistics.fmean(result["seconds"] for result in own)
        spread = f"{min(after):.1%} to {max(after):.1%}"
        lines.append(
            f"| {label} | {before:.1%} | {statistics.fmean(after):.1%} | {spread} | {seconds:.0f} |"
        )
    return "\n".join(lines)


def reruns_table(results: list[dict[str, Any]]) -> str:
    """How far the outcome of one seed varies between reruns, as Markdown."""
    lines = ["| run | seed | after, each rerun | range |", "|---|---|---|---|"]
    for label, seed in dict.fromkeys((result["label"], result["seed"]) for result in results):
        after = [r["after"] for r in results if (r["label"], r["seed"]) == (label, seed)]
        shown = ", ".join(f"{value:.1%}" for value in after)
        lines.append(f"| {label} | {seed} | {shown} | {100 * (max(after) - min(after)):.1f} points |")
    return "\n".join(lines)


def draw(results: list[dict[str, Any]], path: Path) -> None:
    """Training success over the steps, the mean over seeds, one panel for each kind of run."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    kinds = [kind for kind in KINDS if any(r["label"] in KINDS[kind] for r in results)]
    figure, panels = pyplot.subplots(1, len(kinds), figsize=(7 * len(kinds), 5), squeeze=False)
    for panel, kind in zip(panels[0], kinds, strict=True):
        for label in KINDS[kind]:
            curves = [r["curve"] for r in results if r["label"] == label and r["curve"]]
            if curves:
                points = [statistics.fmean(values) for values in zip(*curves, strict=False)]
                places = [STEPS * (i + 1) / len(points) for i in range(len(points))]
                panel.plot(places, points, label=label, marker="o" if len(points) < 6 else None)
        panel.set(title=kind, xlabel="step", ylabel="success on training tasks", ylim=(0, 1))
        panel.legend(fontsize=7)
    figure.tight_layout()
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=110)


def main(options: argparse.Namespace) -> None:
    kinds = options.kind or list(KINDS)
    labels = [label for kind in kinds for label in KINDS[kind]]
    if options.only:
        labels = [
            label for label in labels if any(word.lower() in label.lower() for word in options.only)
        ]
    results = compare(labels, options.seeds, options.at_once, options.reruns)
    if options.reruns > 1:
        print(reruns_table(results))
        return
    parts: list[str] = []
    for kind in kinds:
        own = [result for result in results if result["label"] in KINDS[kind]]
        if own:
            parts.append(table(own, kind))
            if kind == "horizons":
                parts.append(table(own, "horizons, measured with 8 turns", "_8"))
    text = "\n\n".join(parts)
    print(text)
    if options.write:
        (ROOT / "docs" / "images").mkdir(exist_ok=True)
        draw(results, ROOT / "docs" / "images" / "algorithms.png")
        (ROOT / "docs" / "images" / "algorithms.json").write_text(json.dumps(results), encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--at-once", type=int, default=max(1, (os.cpu_count() or 2)))
    parser.add_argument(
        "--kind", action="append", choices=list(KINDS), help="only these runs; repeatable"
    )
    parser.add_argument("--only", action="append", help="only runs whose name has this word; repeatable")
    parser.add_argument(
        "--reruns", type=int, default=1, help="run each seed so often; print how far it varies"
    )
    parser.add_argument(
        "--write", action="store_true", help="write the curves and numbers into docs/images"
    )
    parser.add_argument(
        "--one", nargs=4, metavar=("LABEL", "SEED", "START", "FOLDER"), help=argparse.SUPPRESS
    )
    parser.add_argument("--warm", nargs=2, metavar=("SEED", "FOLDER"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(run_one(given.one[0], int(given.one[1]), *given.one[2:])))
    elif given.warm:
        print(json.dumps(warm_start(int(given.warm[0]), given.warm[1])))
    else:
        main(given)
