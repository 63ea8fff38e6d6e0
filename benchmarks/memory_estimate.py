"""Memory that `ludus check model` estimates, beside the peak of real training steps on this machine's CPU.

    python benchmarks/memory_estimate.py

Each case trains a small model for three steps (`Learner`, float32) in a process of its own. The peak is what
the kernel says that the process held at most (VmHWM), less what it held before the model was made. The table
of an H200's peaks in docs/performance.md is compared by a test.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig

from ludus.model import set_activation_checkpointing, use_ludus_attention
from ludus.model.hf_model import auto_class
from ludus.training import (
    Batch,
    Learner,
    LoraConfig,
    MicroBatch,
    OptimizerConfig,
    add_adapter,
    micro_batches,
)
from ludus.training.optim.estimate import Load, model_size, training_memory

MIB = 1 << 20
SHAPE: dict[str, Any] = {
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 4096,
}
ROW = 256


@dataclass(frozen=True)
class Case:
    """A way to train."""

    name: str
    family: str
    passes: int = 1
    tokens: int = 2048
    recomputed: bool = False
    rank: int = 0
    dtype: str = "float32"
    more: tuple[tuple[str, Any], ...] = ()


CASES = (
    Case("llama", "llama"),
    Case("llama, two passes", "llama", passes=2, tokens=1024),
    Case("llama, recomputed", "llama", recomputed=True),
    Case("llama, rank 16", "llama", rank=16),
    Case("llama, half the tokens", "llama", tokens=1024),
    Case("qwen3, many words", "qwen3", more=(("vocab_size", 32000), ("tie_word_embeddings", True))),
    Case("gemma2", "gemma2"),
    Case("olmoe", "olmoe", more=(("num_experts", 8), ("num_experts_per_tok", 2))),
)


def config_of(case: Case) -> Any:
    return AutoConfig.for_model(case.family, **SHAPE | dict(case.more))


def lora_of(case: Case) -> LoraConfig | None:
    return LoraConfig(rank=case.rank) if case.rank else None


def estimated(case: Case) -> int:
    """Bytes at the peak, by the estimate."""
    size = model_size(config_of(case), getattr(torch, case.dtype), lora_of(case), on_gpu=False)
    load = Load(
        tokens=case.tokens,
        passes=case.passes,
        checkpointed=size.costs.layers if case.recomputed else 0,
    )
    return training_memory(size, load).peak


def measured(case: Case) -> int:
    """Bytes at the peak, of a process that trains."""
    command = [sys.executable, __file__, "--child", case.name]
    # large tensors of their own mappings, which go back when they are freed
    own = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=os.environ | own, capture_output=True, text=True, check=True)
    return int(json.loads(done.stdout.splitlines()[-1]))


def train(case: Case) -> int:
    """Three steps; the bytes at the peak."""
    torch.set_num_threads(1)
    warm_up()
    before = held("VmRSS")
    model: Any = auto_class(config_of(case)).from_config(
        config_of(case), dtype=getattr(torch, case.dtype)
    )
    use_ludus_attention(model)
    if case.rank:
        model = add_adapter(model, LoraConfig(rank=case.rank), "tiny", seed=0)
    rows = [[(7 * i + j) % 8000 for j in range(ROW)] for i in range(case.passes * case.tokens // ROW)]
    batch = Batch.of_tokens(rows, [[i > 0 for i in range(ROW)] for _ in rows])
    batch = replace(batch, weights_T=torch.full_like(batch.weights_T, 1e-4))
    set_activation_checkpointing(model, 99 if case.recomputed else 0)
    config = OptimizerConfig(micro_batch_tokens=case.tokens, learning_rate=1e-4)
    learner = Learner(model, config, total_steps=3)

    def objective(logprobs_A: Tensor, _: Tensor, part: MicroBatch) -> tuple[Tensor, dict[str, Tensor]]:
        return -logprobs_A, {}

    for _ in range(3):
        learner.step(micro_batches(batch, case.tokens), objective)
    return held("VmHWM") - before


def warm_up() -> None:
    """Load what a first matrix product loads."""
    x = torch.randn(64, 64, requires_grad=True)
    torch.nn.functional.scaled_dot_product_attention(
        x[None, None], x[None, None], x[None, None]
    ).sum().backward()


def held(name: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--child", help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.child:
        print(train(next(case for case in CASES if case.name == given.child)))
        return
    print("| case | estimated MiB | measured MiB | difference |\n|---|--:|--:|--:|")
    for case in CASES:
        one, other = estimated(case), measured(case)
        print(
            f"| {case.name} | {one / MIB:,.0f} | {other / MIB:,.0f} | {one / other - 1:+.0%} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
