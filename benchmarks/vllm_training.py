"""What training through a vLLM server costs against the embedded engine: one recipe, in turns, in one run.

    python benchmarks/vllm_training.py vllm-venv/bin/python [--rounds 2] [--steps 20]

The server has one thread, the trainer another. Prints medians over the RL steps of each run, and ratios.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ludus.observe import RunFolder
from ludus.training import load_recipe, train_async
from ludus.training.config.parts import load_parts

RECIPE = "tickets"
SHOWN = (
    "step_seconds",
    "seconds/generate",
    "engine/sync_seconds",
    "paused_seconds",
    "tokens_per_second",
)


@contextmanager
def vllm(python: str, folder: Path, model: list[str]) -> Iterator[str]:
    """A server for the recipe, until it is well."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    command = [sys.executable, "-m", "ludus", "serve", "vllm", RECIPE, *model, "--python", python]
    command += ["--folder", str(folder / "served"), "--port", str(port), "--extra=--enforce-eager"]
    settings = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    with (folder / "vllm.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **settings})
        try:
            url = f"http://127.0.0.1:{port}"
            while not _is_well(url):
                if process.poll() is not None:
                    sys.exit((folder / "vllm.log").read_text()[-2000:])
                time.sleep(1)
            yield url
        finally:
            process.terminate()
            process.wait(60)


def _is_well(url: str) -> bool:
    with suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
        return bool(answer.status == 200)
    return False


def run(folder: Path, settings: list[str]) -> dict[str, float]:
    """The medians of a run's RL steps, the first left out."""
    recipe = load_recipe(RECIPE, [*settings, f"run.folder={folder}", "threads=1"])
    asyncio.run(train_async(recipe, load_parts(recipe)))
    rows = [row for row in RunFolder(folder).metrics() if "step_seconds" in row][1:]
    return {name: statistics.median(row[name] for row in rows) for name in SHOWN if name in rows[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("python", help="an interpreter that has vLLM")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    given = parser.parse_args()
    model = [f"model.scratch.layers={given.layers}", f"model.scratch.width={given.width}"]
    load = [*model, "warm_start.steps=20", f"rl.steps={given.steps}", "evaluation.tasks=1"]
    ratios: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as name, vllm(given.python, Path(name), model) as url:
        for number in range(given.rounds):
            for staleness in (0, 1):
                case = [*load, f"rl.staleness={staleness}", "rl.updates=1"]
                place = Path(name) / f"{number}-{staleness}"
                embedded = run(place / "embedded", case)
                remote = run(place / "vllm", [*case, f'cluster.servers=["{url}"]'])
                ratio = remote["step_seconds"] / embedded["step_seconds"]
                ratios.setdefault(f"staleness {staleness}", []).append(ratio)
                for engine, found in (("embedded", embedded), ("vllm", remote)):
                    told = ", ".join(f"{one} {value:.4g}" for one, value in found.items())
                    print(f"staleness {staleness}, {engine}: {told}")
                print(f"staleness {staleness}: a step on vLLM takes {ratio:.2f} times as long")
    for case_name, values in ratios.items():
        print(f"{case_name}: {statistics.median(values):.2f} times the embedded engine's step (median)")


if __name__ == "__main__":
    main()
