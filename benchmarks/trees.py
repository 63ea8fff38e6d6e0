"""Trees against flat groups at the same number of sampled tokens, and what a fork costs.

    python benchmarks/trees.py [--seeds 0 1 2] [--steps 12] [--branch random entropy] [--model FOLDER]
    python benchmarks/trees.py --forks

The task is the safe of the quickstart, after its warm start, which is done once: up to 14 turns, each of which
depends on the state that those before it have left. A flat step plays 16 tasks × 8 attempts (GRPO). A tree
may sample as many tokens per group as the flat groups did on average (`rl.tree.max_tokens`), in as many steps,
and makes of them what attempts it can (`tree_grpo`). All runs have the same tasks and seeds, one thread
(OMP_NUM_THREADS=1), and take turns, because the machine may have other users: compare within a seed. Success is
over 200 held-out safes afterwards.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import ludus
from ludus.envs import load_env
from ludus.envs.env import reset_env
from ludus.envs.world import WORLDS
from ludus.observe import ReportTable
from ludus.sandbox import Sandbox, SandboxConfig
from ludus.training import load_recipe

RECIPE = Path(__file__).parent.parent / "recipes" / "safe.toml"
TASKS, ATTEMPTS, MOST_LEAVES = 16, 8, 24


def child(options: dict[str, Any]) -> dict[str, float]:
    """One run: what it sampled, how many attempts that made, its wall time, and the success afterwards."""
    recipe = load_recipe(RECIPE, [f"seed={options['seed']}", "warm_start.steps=0", "threads=1"])
    rl = {
        **recipe.model_dump()["rl"],
        "steps": options["steps"],
        "tasks": TASKS,
        "attempts": MOST_LEAVES if options["tree"] else ATTEMPTS,
        "updates": 1,
        "algorithm": options["algorithm"],
        "tree": options["tree"],
    }
    run = {"folder": options["folder"], "checkpoint_every": 1000, "trajectories_every": 0}
    model = {"name": options["model"], "scratch": None}
    result = ludus.train(recipe, model=model, rl=rl, run=run, progress=False)
    rows = [row for row in result.metrics if "step_seconds" in row]
    measured = [row["eval/success"] for row in result.metrics if "eval/success" in row]
    return {
        "tokens": sum(row["tokens/action"] * row["episodes_scored"] for row in rows),
        "attempts": sum(row["episodes_scored"] for row in rows),
        "saved": sum(row.get("tree/tokens_saved", 0.0) for row in rows),
        "calls": sum(row.get("tree/calls_saved", 0.0) for row in rows),
        "fresh": sum(row.get("tree/fresh", 0.0) for row in rows),
        "no_signal": statistics.fmean(row["groups_without_signal"] for row in rows),
        "seconds": sum(row["step_seconds"] for row in rows),
        "before": measured[0],
        "success": measured[-1],
    }


def run_child(**options: Any) -> dict[str, float]:
    command = [sys.executable, __file__, "--child", json.dumps(options)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def warm_start(folder: Path) -> str:
    """The model that all runs begin with."""
    recipe = load_recipe(RECIPE, ["rl.steps=0", "threads=1", "evaluation.every=0"])
    return str(ludus.train(recipe, run={"folder": str(folder)}, progress=False).model)


def compare(options: argparse.Namespace, folder: Path, model: str) -> None:
    rows: list[list[str]] = []
    for seed in options.seeds:
        same = {"model": model, "seed": seed, "steps": options.steps}
        flat = run_child(folder=str(folder / f"{seed}-flat"), tree=None, algorithm="grpo", **same)
        rows.append(row_of(seed, "flat, grpo", flat, flat))
        limit = round(flat["tokens"] / (options.steps * TASKS))
        for branch in options.branch:
            tree = {"branch": branch, "roots": 4, "rounds": 4, "max_tokens": limit}
            at = str(folder / f"{seed}-{branch}")
            found = run_child(folder=at, tree=tree, algorithm=options.algorithm, **same)
            rows.append(row_of(seed, f"{branch}, {options.algorithm}", found, flat))
        print("\n".join("  ".join(row) for row in rows[-1 - len(options.branch) :]), flush=True)
    columns = ["seed", "groups", "sampled", "attempts", "attempts/token"]
    columns += ["saved", "no signal", "seconds", "before", "success"]
    print(ReportTable(columns, rows).markdown())


def row_of(seed: int, name: str, found: dict[str, float], flat: dict[str, float]) -> list[str]:
    ratio = found["attempts"] / found["tokens"] / (flat["attempts"] / flat["tokens"])
    return [
        str(seed), name, f"{found['tokens'] / 1000:.0f}k", f"{found['attempts']:.0f}", f"{ratio:.2f}",
        f"{found['saved'] / 1000:.0f}k", f"{found['no_signal']:.0%}", f"{found['seconds']:.0f}",
        f"{found['before']:.1%}", f"{found['success']:.1%}",
    ]  # fmt: skip


async def forks() -> None:
    """What a fork costs after a few turns, in milliseconds: median / least."""
    rows: list[list[str]] = []
    for name in ("safe", "textcraft", "babyai"):
        world = WORLDS[name]
        if world.missing():
            continue
        task, make = world.tasks("train")[0], load_env(name)
        one, other = make(), make()
        await reset_env(one, task, name)
        moves = world.expert(task)
        call = next(moves)
        with suppress(StopIteration):  # short tasks end earlier
            for _ in range(4):
                assert isinstance(call, ludus.ToolCall)
                did = await getattr(one, call.name)(**call.arguments)
                call = moves.send(did if isinstance(did, str) else str(did.observation))
        state = await one.snapshot()
        again = partial(restored, other, task, name, state)
        rows.append([name, await timed(one.snapshot), await timed(again)])
    async with Sandbox(SandboxConfig()) as sandbox, await sandbox.session() as session:
        await session.python("x = list(range(1000))\nopen('f', 'w').write('a' * 1000)")
        took = []
        for number in range(20):
            await session.python(f"x.append({number})")
            started = time.perf_counter()
            snapshot = await session.snapshot()
            middle = time.perf_counter()
            await (await snapshot.restore()).close()
            took.append((middle - started, time.perf_counter() - middle))
            await snapshot.close()
        rows.append(["sandbox session", *(shown([pair[i] for pair in took]) for i in (0, 1))])
    print(ReportTable(["state of", "snapshot, ms", "reset and restore, ms"], rows).markdown())


async def restored(env: Any, task: ludus.Task, name: str, state: Any) -> None:
    """What a branch does: an instance of the pool is reset, and takes over the state."""
    await reset_env(env, task, name)
    await env.restore(state)


async def timed(call: Callable[[], Awaitable[Any]]) -> str:
    took = []
    for _ in range(50):
        started = time.perf_counter()
        await call()
        took.append(time.perf_counter() - started)
    return shown(took)


def shown(seconds: list[float]) -> str:
    """Median and least: the machine may have other users."""
    return f"{1000 * statistics.median(seconds):.3f} / {1000 * min(seconds):.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--branch", nargs="+", default=["random", "entropy"])
    parser.add_argument("--algorithm", default="tree_grpo")
    parser.add_argument("--model", help="a warm-started model; made anew when left out")
    parser.add_argument("--forks", action="store_true", help="measure forks alone")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(child(json.loads(options.child))))
    elif options.forks:
        asyncio.run(forks())
    else:
        with tempfile.TemporaryDirectory() as folder:
            model = options.model or warm_start(Path(folder) / "warm")
            compare(options, Path(folder), model)


if __name__ == "__main__":
    main()
