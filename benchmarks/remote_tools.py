"""An RL run whose agent writes Python in a sandboxed session: tools here, and tools behind the tool server.

    python benchmarks/remote_tools.py        # about four minutes on two cores

A small model is warm-started once on the hunt (recipes/hunt.toml). Then the same steps of RL are run from it
with local tools and with the address of a tool server, in turns, and their episodes per second are compared.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import ludus

RECIPE = Path(__file__).parent.parent / "recipes" / "hunt.toml"


def start_server() -> tuple[subprocess.Popen[str], str]:
    """A tool server with the sandboxed `python` tool, on a free port."""
    command = [sys.executable, "-m", "ludus.cli.main", "serve", "tools", "python", "--quiet"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, json.loads(process.stdout.readline())["address"]


def episodes_per_second(folder: Path, model: Path, tools: list[str], steps: int) -> list[float]:
    """RL from the warm-started model; the speed of every step but the first, which warms things up."""
    result = ludus.train(
        RECIPE,
        model={"name": str(model), "scratch": None},
        warm_start=None,
        agent={"tools": tools},
        rl={"steps": steps},
        evaluation={"tasks": 1, "attempts": 1},
        run={"folder": str(folder), "trajectories_every": 0},
    )
    rows = [row for row in result.metrics if row.get("episodes_per_second") is not None]
    return [row["episodes_per_second"] for row in rows[1:]]


def main(options: argparse.Namespace) -> None:
    os.chdir(RECIPE.parent.parent)
    speeds: dict[str, list[float]] = {"local": [], "remote": []}
    with tempfile.TemporaryDirectory(prefix="ludus-bench-") as temporary:
        folder = Path(temporary)
        settings: dict[str, Any] = {"folder": str(folder / "warm"), "trajectories_every": 0}
        warm = ludus.train(RECIPE, rl={"steps": 0}, evaluation={"tasks": 1, "attempts": 1}, run=settings)
        process, address = start_server()
        try:
            for turn in range(options.turns):
                for where, tools in (("local", ["python"]), ("remote", [address])):
                    place = folder / f"{where}-{turn}"
                    speeds[where] += episodes_per_second(place, warm.model, tools, options.steps)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(60)
    medians = {where: statistics.median(values) for where, values in speeds.items()}
    print("| tools | steps measured | episodes/s (median) |\n|---|---|---|")
    for where, median in medians.items():
        print(f"| {where} | {len(speeds[where])} | {median:.1f} |")
    print(f"\nremote / local: {medians['remote'] / medians['local']:.2f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=6, help="steps of RL in each run")
    parser.add_argument("--turns", type=int, default=2, help="how often both are run")
    main(parser.parse_args())
