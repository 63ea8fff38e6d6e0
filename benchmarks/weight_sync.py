"""New weights for engines in other processes: how long it takes beside a copy in memory of as many bytes.

    python benchmarks/weight_sync.py [--megabytes 500] [--engines 1 2] [--rounds 5]

One thread in each process. A sync is what `cluster.engines` costs after every update: the trainer writes its
weights into shared memory and scores the canary, every engine copies them into its model and scores the
canary. Engines pause for the second half only; how long is a row of its own. A copy of the bytes within one
process is the floor of each half. All take turns within a round.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from fsdp import VOCABULARY, model_of, seconds

from ludus.chat.tokenizers import HFTokenizer
from ludus.engine import Canary, EngineConfig
from ludus.engine.replicas import ProcessReplica, ReplicaSettings, ReplicatedEngine
from ludus.observe import ReportTable
from ludus.training.models.scratch import fit_tokenizer
from ludus.training.placement import PolicyWeights
from ludus.training.ranks.steps import Ranks


async def measure(options: argparse.Namespace) -> list[list[str]]:
    width = 1024
    layers = max(1, (options.megabytes * 250_000 - VOCABULARY * width) // (11 * width * width))
    model = model_of(layers, width)
    megabytes = sum(p.numel() for p in model.parameters()) * 4 / 1e6
    copies = [torch.zeros_like(p) for p in model.parameters()]

    def copy_all() -> None:
        for copied, parameter in zip(copies, model.parameters(), strict=True):
            copied.copy_(parameter.detach())

    source = PolicyWeights(Ranks.alone(model), HFTokenizer(fit_tokenizer([], 0)))
    canary = Canary.of(VOCABULARY, 4096, "float32")
    settings = ReplicaSettings(engine=EngineConfig(cache_tokens=4096), threads=1)
    times: dict[str, list[float]] = defaultdict(list)
    for count in options.engines:
        engine = ReplicatedEngine([ProcessReplica(n, settings) for n in range(count)], source, canary)
        await engine.open()
        try:
            for _ in range(options.rounds):
                times["a copy in memory"].append(seconds(copy_all))
                with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
                    written = seconds(lambda folder=folder: source.write(Path(folder)))  # type: ignore[misc]
                times["written into shared memory"].append(written)
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.mul_(1.001)
                started = time.perf_counter()
                await engine.update_weights()
                times[f"sync of {count} engine(s), canary included"].append(
                    time.perf_counter() - started
                )
                paused = engine.metrics()["paused_seconds"]
                times[f"of that, {count} engine(s) paused"].append(paused)
        finally:
            await engine.close()
    floor = statistics.median(times["a copy in memory"])
    return [
        [name, f"{megabytes:.0f}", f"{statistics.median(found):.2f}", f"{min(found):.2f}",
         f"{statistics.median(found) / floor:.1f}"]
        for name, found in times.items()
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--engines", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    columns = ["", "MB", "seconds (median)", "seconds (least)", "times a copy"]
    print(ReportTable(columns, asyncio.run(measure(options))).markdown(), flush=True)


if __name__ == "__main__":
    main()
