"""What an adapter costs on one GPU: decoding and training with one, next to the bare model and peft's layers.

    python benchmarks/gpu_lora.py [--shapes 0.5b 1.5b] [--rank 16] [--steps 5] [--no-stock] [--out FILE]

Random weights in bf16 in the shapes of Qwen2.5, float32 adapters on all linear layers of the decoder.

    none             the model itself: all of it is trained, with float32 masters. An adapter adds so few bytes
                     and operations that its decoding could be as fast
    adapter          the adapter computed beside joined products (`model/fused_linear.py`)
    layer by layer   each layer's own forward, as peft writes it, in the same engine and learner
    stock            Hugging Face with peft: `generate`, and the stock step of `gpu_training.py`

Decoding is 256 requests at contexts of 512 through `Engine.generate`; training is one step over 8 rows of 2,048
tokens. Rates and memory are measured as in `gpu_decode.py` and `gpu_training.py`.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gpu_decode
import gpu_training
import peft
import torch
from gpu_common import machine, say, table, write
from gpu_training import Case, Line, Sample, build, even_batch, operations

from ludus.model import fused_linear, use_ludus_attention

CASES = ("none", "adapter", "layer by layer", "stock")


@contextmanager
def layer_by_layer() -> Iterator[None]:
    """Adapted layers compute in their own way."""
    own = fused_linear.find_lora
    fused_linear.find_lora = lambda layers: None  # type: ignore[assignment]
    try:
        yield
    finally:
        fused_linear.find_lora = own


def adapted(model: Any, rank: int) -> Any:
    config = peft.LoraConfig(
        r=rank, lora_alpha=2 * rank, target_modules="all-linear", init_lora_weights=False
    )
    return peft.get_peft_model(model, config)


def decoded(case: str, model: Any, batch: int, context: int) -> float:
    """Tokens a second."""
    if case == "stock":
        return gpu_decode.stock_rate(
            model, gpu_decode.prompts(model, batch, context), str(model.device.type)
        )
    use_ludus_attention(model)
    model.eval()
    new = min(192, context // 2)
    return asyncio.run(gpu_decode.measure(model, batch, context, new))["steady"]


def trained(case: str, model: Any, batch: Sample, steps: int) -> Line:
    line = Line("", batch.name, case)
    tokens = sum(batch.lengths)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        own = sum(parameter.nbytes for parameter in model.parameters())
        line.left_gib = (torch.cuda.memory_allocated() - own) / 2**30
    step = (
        gpu_training.stock_step(model, batch)
        if case == "stock"
        else gpu_training.ludus_step(model, batch, Case("ludus", tokens))
    )
    gpu_training.measure(line, step, steps, operations(model, batch), tokens)
    return line


def row(case: str, shape: str, given: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    model: Any = build(shape, device)
    if case != "none":
        model = adapted(model, given.rank)
    size, context = (256, 512) if device.type == "cuda" else (4, 64)
    rate = decoded(case, model, size, context)
    gc.collect()
    batch = even_batch(given.tokens, model.config.vocab_size)
    line = trained(case, model, batch, given.steps)
    return {
        "shape": shape, "adapter": case, "decoding tokens/s": rate,
        "training tokens/s": line.tokens_per_second, "ms a step": 1e3 * line.seconds, "peak GiB": line.peak_gib,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--shapes", nargs="+", default=["0.5b", "1.5b"], choices=list(gpu_training.SHAPES)
    )
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=gpu_training.TOKENS)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--stock", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and given.shapes != ["tiny"]:
        parser.error(
            "there is no GPU here; --shapes tiny --tokens 512 shows on a CPU that everything runs"
        )
    say(machine(device.type) + "\n")
    rows: list[dict[str, Any]] = []
    for shape in given.shapes:
        for case in CASES if given.stock else CASES[:-1]:
            if case == "layer by layer":
                with layer_by_layer():
                    rows.append(row(case, shape, given, device))
            else:
                rows.append(row(case, shape, given, device))
            gc.collect()
            say(table(rows[-1:]).splitlines()[-1])
    say("\n" + table(rows))
    write(given.out, {"machine": machine(device.type), "rows": rows})


if __name__ == "__main__":
    main()
