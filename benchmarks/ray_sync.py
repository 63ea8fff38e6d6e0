"""New weights for engines on a Ray cluster: how long it takes beside a copy in memory of as many bytes.

    python benchmarks/ray_sync.py [--megabytes 500] [--rounds 5]

Two raylets on this machine, each with an engine, and the trainer on the first: the second raylet has an object
store of its own and fetches the weights from the first one's over a socket, as another machine would over its
network. Both share this machine's cores and memory, so that a network's limits are not measured. One thread in
each process. Beside it, in the same rounds: a copy within one process (the floor of each step), one put into
the object store, one fetch by the other node, and as many engines in plain processes.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import ray
import torch
from fsdp import VOCABULARY, model_of, seconds
from ray.cluster_utils import Cluster

from ludus.chat.tokenizers import HFTokenizer
from ludus.dist import RayPlacement
from ludus.dist.cluster import alive_nodes, on_node
from ludus.engine import Canary, EngineConfig
from ludus.engine.replicas import ProcessReplica, ReplicaSettings, ReplicatedEngine
from ludus.observe import ReportTable
from ludus.training.models.scratch import fit_tokenizer
from ludus.training.placement import PolicyWeights
from ludus.training.ranks.steps import Ranks

CONFIG = EngineConfig(cache_tokens=4096)


class Fetcher:
    """An actor on the other node that gets an object into its store, and no further."""

    def fetch(self, objects: list[Any]) -> int:
        fetched: np.ndarray[Any, Any] = ray.get(objects[0])
        return fetched.nbytes


async def measure(options: argparse.Namespace, address: str) -> list[list[str]]:
    width = 1024
    layers = max(1, (options.megabytes * 250_000 - VOCABULARY * width) // (11 * width * width))
    model = model_of(layers, width)
    megabytes = sum(p.numel() for p in model.parameters()) * 4 / 1e6
    copies = [torch.zeros_like(p) for p in model.parameters()]

    def copy_all() -> None:
        for copied, parameter in zip(copies, model.parameters(), strict=True):
            copied.copy_(parameter.detach())

    placement = RayPlacement(
        "ray_sync", address=address, nodes=2, ranks=1, engines=2, tools=0, hosts=0, gpus=False
    )
    source = PolicyWeights(Ranks.alone(model), HFTokenizer(fit_tokenizer([], 0)))
    canary = Canary.of(VOCABULARY, 4096, "float32")
    settings = ReplicaSettings(engine=CONFIG, threads=1)
    other = alive_nodes()[1].id
    fetcher = ray.remote(Fetcher).options(num_cpus=0, scheduling_strategy=on_node(other)).remote()
    engines = {
        "two engines on two raylets": ReplicatedEngine(
            placement.replicas("float32", CONFIG, 1, 600.0), source, canary
        ),
        "two engines in processes": ReplicatedEngine(
            [ProcessReplica(n, settings) for n in range(2)], source, canary
        ),
    }
    times: dict[str, list[float]] = defaultdict(list)
    try:
        for engine in engines.values():
            await engine.open()
        for _ in range(options.rounds):
            times["a copy in memory"].append(seconds(copy_all))
            data = np.random.default_rng().integers(0, 255, int(megabytes * 1e6), np.uint8)
            begun = time.perf_counter()
            stored = ray.put(data)
            times["a put into the object store"].append(time.perf_counter() - begun)
            begun = time.perf_counter()
            await fetcher.fetch.remote([stored])
            times["a fetch by the other raylet"].append(time.perf_counter() - begun)
            del stored
            for name, engine in engines.items():
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.mul_(1.001)
                begun = time.perf_counter()
                await engine.update_weights()
                times[f"sync of {name}, canary included"].append(time.perf_counter() - begun)
                times[f"of that, {name} paused"].append(engine.metrics()["paused_seconds"])
    finally:
        for engine in engines.values():
            await engine.close()
        await placement.close()
    floor = statistics.median(times["a copy in memory"])
    return [
        [name, f"{megabytes:.0f}", f"{statistics.median(found):.2f}", f"{min(found):.2f}",
         f"{statistics.median(found) / floor:.1f}"]
        for name, found in times.items()
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    store = 4 * options.megabytes * 1_000_000
    head = {"num_cpus": 2, "include_dashboard": False, "object_store_memory": store}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        cluster.add_node(num_cpus=1, object_store_memory=store)
        os.environ["PYTHONPATH"] = str(Path(__file__).parent)
        columns = ["", "MB", "seconds (median)", "seconds (least)", "times a copy"]
        rows = asyncio.run(measure(options, cluster.address))
        print(ReportTable(columns, rows).markdown(), flush=True)
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main()
