"""Training on two ranks against one, on the same tokens; and moving 500 MB of weights beside its floor.

    python benchmarks/fsdp.py [--rounds 5] [--layers 4] [--width 512] [--tokens 16384] [--megabytes 500]

Each rank is a process with one thread, so two ranks have twice the processor that one has: the ratio would be 2
if gathering weights, reducing gradients and agreeing cost nothing. One and two ranks take turns within a round,
because the machine may have other users: compare within a round. The floors of moving weights are a copy in
memory of as many bytes, and one broadcast by gloo tensor by tensor.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import torch
import torch.distributed as dist
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from called_ranks import ALONE, CalledRanks, called_ranks
from ludus.core import Segment, SegmentKind, StopReason, Task, TokenSequence, Trajectory
from ludus.model import use_ludus_attention
from ludus.observe import ReportTable
from ludus.training import Learner, OptimizerConfig, sft_step
from ludus.training.optim.sharding import current_group

VOCABULARY = 4096


def model_of(layers: int, width: int) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=width,
            intermediate_size=width * 8 // 3 // 8 * 8,
            num_hidden_layers=layers,
            num_attention_heads=8,
            num_key_value_heads=4,
            max_position_embeddings=4096,
            tie_word_embeddings=True,
        )
    )
    use_ludus_attention(model)
    return model


def episodes(tokens: int, seed: int = 0) -> list[Trajectory]:
    """Ragged episodes, half of whose tokens are trained, with as many tokens in all."""
    draw = torch.Generator().manual_seed(seed)
    found: list[Trajectory] = []
    left = tokens
    while left > 32:
        length = min(left, int(torch.randint(64, 1024, (), generator=draw)))
        ids = torch.randint(VOCABULARY, (length,), generator=draw).tolist()
        half = length // 2
        prompt = Segment(SegmentKind.PROMPT, ids[:half])
        action = Segment(SegmentKind.ACTION, ids[half:], logprobs=[0.0] * (length - half))
        task = Task.of("x", id=str(len(found)))
        found.append(
            Trajectory(task, [TokenSequence([prompt, action])], stop=StopReason.ANSWERED, reward=1.0)
        )
        left -= length
    return found


def seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def compare_steps(pair: CalledRanks, options: argparse.Namespace) -> list[list[str]]:
    shown = episodes(options.tokens)
    config = OptimizerConfig(micro_batch_tokens=4096)
    steps: dict[str, Callable[[], object]] = {}
    for name, ranks in (("one", ALONE), ("two", pair)):
        policy = ranks.shard(model_of(options.layers, options.width))
        learner = ranks.make(Learner, policy, config, 1000)
        steps[name] = lambda ranks=ranks, learner=learner: ranks.run(sft_step, learner, shown)  # type: ignore[misc]
        steps[name]()
    rows: list[list[str]] = []
    ratios: list[float] = []
    for number in range(options.rounds):
        one, two = seconds(steps["one"]), seconds(steps["two"])
        ratios.append(one / two)
        rates = [f"{options.tokens / each:,.0f}" for each in (one, two)]
        rows.append([str(number + 1), *rates, f"{one / two:.2f}"])
    return [*rows, ["median", "", "", f"{statistics.median(ratios):.2f}"]]


def broadcast_all(sizes: list[int]) -> None:
    """On every rank: as many bytes as the weights, tensor by tensor, and nothing else."""
    for size in sizes:
        dist.broadcast(torch.zeros(size) if current_group().rank == 0 else torch.empty(size), 0)


def compare_moves(pair: CalledRanks, options: argparse.Namespace) -> list[list[str]]:
    count = options.megabytes * 250_000  # float32
    width = 1024
    layers = max(1, (count - VOCABULARY * width) // (11 * width * width))
    model = model_of(layers, width)
    sizes = [parameter.numel() for parameter in model.parameters()]
    policy = pair.shard(model)
    copies = [torch.zeros(size) for size in sizes]

    def copy_all() -> None:
        for copied, parameter in zip(copies, model.parameters(), strict=True):
            copied.copy_(parameter.detach().flatten())

    works: dict[str, Callable[[], object]] = {
        "a copy in memory": copy_all,
        "gloo broadcast, tensor by tensor": lambda: pair.run(broadcast_all, sizes),
        "shards to rank 0's engine (publish)": lambda: pair.publish(policy, model),
    }
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(options.rounds):
        for name, work in works.items():
            times[name].append(seconds(work))
    megabytes = sum(sizes) * 4 / 1e6
    return [
        [name, f"{megabytes:.0f}", f"{statistics.median(found):.2f}", f"{min(found):.2f}"]
        for name, found in times.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--megabytes", type=int, default=500)
    options = parser.parse_args()
    torch.set_num_threads(1)
    pair = called_ranks(timeout=600)
    try:
        columns = ["round", "tokens/s, one rank", "tokens/s, two ranks", "ratio"]
        print(ReportTable(columns, compare_steps(pair, options)).markdown(), flush=True)
        print()
        columns = ["", "MB", "seconds (median)", "seconds (least)"]
        print(ReportTable(columns, compare_moves(pair, options)).markdown(), flush=True)
    finally:
        pair.close()


if __name__ == "__main__":
    # by its name, so that the other rank finds the functions that it is told to call
    import fsdp

    fsdp.main()
