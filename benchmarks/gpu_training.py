"""The training step on one GPU, next to the stock Hugging Face step on the same model and tokens.

    python benchmarks/gpu_training.py [--shapes 0.5b 1.5b] [--steps 5] [--out training.json]
                                      [--profile] [--attention]

Models have the shapes of Qwen2.5-0.5B and 1.5B, random weights in bf16 and a vocabulary of 151,936 tokens. Two
batches of 16,384 tokens: 8 rows of 2,048, all of them trained, and ragged multi-turn rows (lengths lognormal,
about half of the tokens said by the model).

    stock     model(input_ids, labels), sdpa attention, all logits, fused AdamW on bf16 weights; ragged rows are
              padded, in the given order, into batches of at most 16,384 places
    ludus     `Learner.step` over `micro_batches` with the clipped surrogate of GRPO: packed, fp32 masters,
              fp32 gradient sums, entropy and ratios measured

each without recomputation and with all layers recomputed, and Ludus, on even rows, also in two passes of 8,192
tokens, and with a budget of 3 GiB for activations, from which passes and recomputed layers follow. A step is
timed from Python lists to new weights, the reading of its metrics included; the median of the steps counts.
MFU (6N) counts 6 floating-point operations for each parameter and real token; MFU (all) the products that the
batch needs: matrices, attention within rows, the head at trained places only; against 989 TFLOP/s. Memory is
the peak that torch had allocated, less what earlier cases had left behind. `--profile` adds a table of kernels
for a step of Ludus on each shape, `--attention` the time that one layer's attention takes by each of the
kernels there are.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from ludus.algos import LossInputs, load_algorithm
from ludus.model import (
    AttentionParams,
    packed_attention,
    set_activation_checkpointing,
    use_ludus_attention,
)
from ludus.training import Batch, Learner, MicroBatch, OptimizerConfig, micro_batches

TOKENS = 16384
PEAK = 989e12
SHAPES: dict[str, dict[str, Any]] = {
    "0.5b": {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
    },
    "1.5b": {
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
    },
    "tiny": {
        "vocab_size": 997,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
}


@dataclass(frozen=True, slots=True)
class Row:
    """A row's tokens, and which of them were said."""

    tokens: list[int]
    action_mask: list[bool]


@dataclass(frozen=True, slots=True)
class Sample:
    """Rows of a step."""

    name: str
    rows: list[Row]

    @property
    def lengths(self) -> list[int]:
        return [len(row.tokens) for row in self.rows]

    @property
    def trained(self) -> int:
        return sum(sum(row.action_mask) for row in self.rows)


@dataclass(frozen=True, slots=True)
class Case:
    """A way to make the step."""

    name: str
    tokens: int
    """In a pass."""
    recomputes: bool = False
    memory: float | None = None
    """GiB for activations."""

    @property
    def is_ours(self) -> bool:
        return self.name.startswith("ludus")


@dataclass(slots=True)
class Line:
    """One measured step."""

    shape: str
    batch: str
    step: str
    seconds: float = float("nan")
    tokens_per_second: float = float("nan")
    mfu_6n: float = float("nan")
    mfu_all: float = float("nan")
    peak_gib: float = float("nan")
    left_gib: float = 0.0
    """What earlier cases had left behind, which is not counted."""
    trouble: str = ""


def build(shape: str, device: torch.device) -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    settings = {"vocab_size": 151936, "max_position_embeddings": 32768, "tie_word_embeddings": True}
    config = Qwen2Config(**settings | SHAPES[shape])
    torch.set_default_dtype(torch.bfloat16)
    try:
        with device:
            return Qwen2ForCausalLM(config)
    finally:
        torch.set_default_dtype(torch.float32)


def even_batch(tokens: int, vocabulary: int) -> Sample:
    """8 rows of one length, every token trained but the first."""
    width = tokens // 8
    ids = torch.randint(5, vocabulary, (8, width), generator=torch.Generator().manual_seed(1)).tolist()
    return Sample(f"8 x {width:,}", [Row(row, [False] + [True] * (width - 1)) for row in ids])


def ragged_batch(tokens: int, vocabulary: int) -> Sample:
    """As many tokens in rows of lognormal lengths, in turns of what was heard and what was said."""
    generator = torch.Generator().manual_seed(2)
    mean = tokens / 20
    lengths: list[int] = []
    while (left := tokens - sum(lengths)) > 0:
        drawn = float(torch.randn((), generator=generator) * 0.8)
        length = int(mean * torch.tensor(drawn).exp())
        lengths.append(min(left, max(16, min(length, tokens // 4))))
    rows: list[Row] = []
    for length in lengths:
        ids = torch.randint(5, vocabulary, (length,), generator=generator).tolist()
        mask: list[bool] = []
        while len(mask) < length:
            heard, said = torch.randint(8, 120, (2,), generator=generator).tolist()
            mask += [False] * heard + [True] * said
        mask = mask[:length]
        mask[-1] = True
        rows.append(Row(ids, mask))
    return Sample(f"{len(rows)} ragged", rows)


def stock_step(model: Qwen2ForCausalLM, batch: Sample) -> Callable[[], None]:
    model.set_attn_implementation("sdpa")
    model.train()
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=1e-6,
        betas=(0.9, 0.99),
        weight_decay=0.0,
        fused=model.device.type == "cuda",
    )

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        for ids, mask, labels, share in _padded(batch, model.device):
            loss = model(input_ids=ids, attention_mask=mask, labels=labels, use_cache=False).loss
            (loss * share).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        float(norm)

    return step


def _padded(
    batch: Sample, device: torch.device
) -> Iterator[tuple[Tensor, Tensor | None, Tensor, float]]:
    """Batches of padded rows, in order, of no more places than there are tokens in all."""
    limit, waiting = sum(batch.lengths), list(batch.rows)
    while waiting:
        count = 1
        while count < len(waiting) and _places(waiting[: count + 1]) <= limit:
            count += 1
        chosen, waiting = waiting[:count], waiting[count:]
        width = max(len(row.tokens) for row in chosen)
        ids = torch.zeros(len(chosen), width, dtype=torch.long)
        labels = torch.full_like(ids, -100)
        mask = torch.zeros_like(ids)
        for i, row in enumerate(chosen):
            tokens, said = torch.tensor(row.tokens), torch.tensor(row.action_mask)
            ids[i, : len(tokens)] = tokens
            labels[i, : len(tokens)] = torch.where(said, tokens, -100)
            mask[i, : len(tokens)] = 1
        share = sum(sum(row.action_mask) for row in chosen) / batch.trained
        is_full = bool(mask.all())
        yield ids.to(device), None if is_full else mask.to(device), labels.to(device), share


def _places(rows: list[Row]) -> int:
    return len(rows) * max(len(row.tokens) for row in rows)


def ludus_step(model: Qwen2ForCausalLM, batch: Sample, case: Case) -> Callable[[], None]:
    use_ludus_attention(model)
    config = OptimizerConfig(
        learning_rate=1e-6, micro_batch_tokens=case.tokens, activation_memory=case.memory or "auto"
    )
    learner = Learner(model, config, total_steps=1000)
    algorithm = load_algorithm(name="grpo")
    generator = torch.Generator().manual_seed(3)
    advantages_T = torch.randn(sum(batch.lengths), generator=generator)
    given = Batch.of_tokens(
        [row.tokens for row in batch.rows], [row.action_mask for row in batch.rows], logprob=-12.0
    )
    weights_T = torch.full_like(advantages_T, 1 / batch.trained)
    given = replace(given, advantages_T=advantages_T, weights_T=weights_T)

    def objective(
        logprobs_A: Tensor, entropy_A: Tensor, pack: MicroBatch
    ) -> tuple[Tensor, dict[str, Tensor]]:
        old_A = logprobs_A.detach()  # random weights: the first update's ratios are 1
        return algorithm.loss(LossInputs(logprobs_A, old_A, pack.advantages_A, pack.row_A, old_A))

    def step() -> None:
        # "auto" would undo a recomputation that the case asks for
        budget = learner.micro_batch_tokens(batch.lengths) if case.memory else case.tokens
        learner.step(micro_batches(given, budget), objective)

    return step


def operations(model: Qwen2ForCausalLM, batch: Sample) -> tuple[float, float]:
    """(6N for each token, the products that a step needs)."""
    config, tokens = model.config, sum(batch.lengths)
    parameters = sum(p.numel() for p in model.parameters())
    head = config.vocab_size * config.hidden_size
    inside = parameters - head - (0 if config.tie_word_embeddings else head)
    attention = 6 * config.num_hidden_layers * config.hidden_size * sum(n * n for n in batch.lengths)
    return 6.0 * parameters * tokens, 6.0 * (inside * tokens + head * batch.trained) + attention


def measure(
    line: Line, step: Callable[[], None], steps: int, work: tuple[float, float], tokens: int
) -> None:
    is_cuda = torch.cuda.is_available()
    for _ in range(2):
        step()
    if is_cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    times: list[float] = []
    for _ in range(steps):
        started = time.perf_counter()
        step()
        if is_cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    line.seconds = statistics.median(times)
    line.tokens_per_second = tokens / line.seconds
    line.mfu_6n, line.mfu_all = (count / line.seconds / PEAK for count in work)
    if is_cuda:
        line.peak_gib = torch.cuda.max_memory_allocated() / 2**30 - line.left_gib


def attention_table(shape: str, tokens: int) -> str:
    """Forward and backward pass of one layer's attention, in ms, by what computes it."""
    settings, device = SHAPES[shape], torch.device("cuda")
    heads, kv_heads = settings["num_attention_heads"], settings["num_key_value_heads"]
    size = settings["hidden_size"] // heads
    lines = ["| rows | flash, grouped | flash, expanded | sdpa in blocks |", "|---|---|---|---|"]
    for batch in (even_batch(tokens, 100), ragged_batch(tokens, 100)):
        drawn = (
            torch.randn(1, count, tokens, size, device=device, dtype=torch.bfloat16, requires_grad=True)
            for count in (heads, kv_heads, kv_heads)
        )
        query, key, value = drawn
        times: list[float] = []
        chosen_by_device = packed_attention.kernel_for
        flash, expanded = packed_attention.flash, packed_attention.flash_expanded
        kernels: tuple[packed_attention.Kernel | None, ...] = (flash, expanded, None)
        for kernel in kernels:
            packed_attention.kernel_for = lambda *_, chosen=kernel: chosen  # type: ignore[assignment]
            context = packed_attention.PackedContext(batch.lengths, device)
            rule = AttentionParams(size**-0.5)
            for turn in range(13):
                if turn == 3:
                    torch.cuda.synchronize()
                    started = time.perf_counter()
                output = context.attend(0, query, key, value, rule)
                torch.autograd.grad(output, (query, key, value), torch.ones_like(output))
            torch.cuda.synchronize()
            times.append((time.perf_counter() - started) / 10)
        packed_attention.kernel_for = chosen_by_device
        lines.append(
            f"| {batch.name} | " + " | ".join(f"{seconds * 1e3:.2f}" for seconds in times) + " |"
        )
    return "\n".join(lines)


def profiled(step: Callable[[], None]) -> str:
    """Kernels of one step by time, and the share of the step in which the GPU was busy."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        started = time.perf_counter()
        step()
        seconds = time.perf_counter() - started
    averages = profile.key_averages()
    # a range such as "Optimizer.step#AdamW.step" lies over the kernels inside it
    kernels = [
        event
        for event in averages
        if event.device_type != torch.autograd.DeviceType.CPU and "#" not in event.key
    ]
    busy = sum(event.self_device_time_total for event in kernels) / 1e6
    lines = [
        f"GPU busy {busy * 1e3:.1f} of {seconds * 1e3:.1f} ms (with the profiler)",
        "",
        "| ms | calls | kernel |",
    ]
    lines += ["|---|---|---|"]
    for event in sorted(kernels, key=lambda event: -event.self_device_time_total)[:30]:
        lines.append(f"| {event.self_device_time_total / 1e3:.2f} | {event.count} | {event.key[:110]} |")
    lines += ["", "| ms idle | before this kernel |", "|---|---|"]
    lines += [f"| {idle:.2f} | {name[:110]} |" for idle, name in _gaps(profile)[:8]]
    return "\n".join(lines)


def _gaps(profile: Any) -> list[tuple[float, str]]:
    """(milliseconds, kernel) wherever the GPU had nothing to do before a kernel, longest first."""
    spans = sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in profile.events()
        if event.device_type != torch.autograd.DeviceType.CPU and "#" not in event.name
    )
    found: list[tuple[float, str]] = []
    for (_, end, _), (start, _, name) in pairwise(spans):
        found.append(((start - end) / 1e3, name))
    return sorted(found, reverse=True)


def cases(tokens: int, batch: Sample) -> Iterator[Case]:
    yield Case("ludus", tokens)
    yield Case("ludus, recomputed", tokens, recomputes=True)
    if len(set(batch.lengths)) == 1:
        yield Case("ludus, 2 passes", tokens // 2)
        yield Case("ludus, 3 GiB", tokens, memory=3.0)
    yield Case("stock", tokens)
    yield Case("stock, recomputed", tokens, recomputes=True)


def run_shape(
    shape: str, tokens: int, steps: int, wants_profile: bool, device: torch.device
) -> list[Line]:
    lines: list[Line] = []
    model = build(shape, device)
    for batch in (
        even_batch(tokens, model.config.vocab_size),
        ragged_batch(tokens, model.config.vocab_size),
    ):
        for case in cases(tokens, batch):
            line = Line(shape, batch.name, case.name)
            lines.append(line)
            model.zero_grad(set_to_none=True)
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
                own = sum(parameter.nbytes for parameter in model.parameters())
                line.left_gib = (torch.cuda.memory_allocated() - own) / 2**30
            set_activation_checkpointing(model, model.config.num_hidden_layers if case.recomputes else 0)
            step = ludus_step(model, batch, case) if case.is_ours else stock_step(model, batch)
            try:
                measure(line, step, steps, operations(model, batch), tokens)
                if wants_profile and case.name == "ludus":
                    print(f"\n### {shape}, {batch.name}\n\n{profiled(step)}\n", flush=True)
            except torch.OutOfMemoryError as error:
                line.trouble = str(error).splitlines()[0]
            del step
            print(_table_row(line), file=sys.stderr, flush=True)
    return lines


def table(lines: list[Line]) -> str:
    head = "| shape | batch | step | ms | tokens/s | MFU (6N) | MFU (all) | peak GiB |"
    return "\n".join([head, "|---" * 8 + "|", *map(_table_row, lines)])


def _table_row(line: Line) -> str:
    if line.trouble:
        return f"| {line.shape} | {line.batch} | {line.step} | {line.trouble} | | | | |"
    return (
        f"| {line.shape} | {line.batch} | {line.step} | {line.seconds * 1e3:.1f} "
        f"| {line.tokens_per_second:,.0f} | {line.mfu_6n:.1%} | {line.mfu_all:.1%} | {line.peak_gib:.1f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", default=["0.5b", "1.5b"], choices=list(SHAPES))
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--attention", action="store_true")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and options.shapes != ["tiny"]:
        parser.error(
            "there is no GPU here; --shapes tiny --tokens 512 shows on a CPU that everything runs"
        )
    lines: list[Line] = []
    for shape in options.shapes:
        if options.attention:
            print(f"\n### attention, {shape}\n\n{attention_table(shape, options.tokens)}\n", flush=True)
        lines += run_shape(shape, options.tokens, options.steps, options.profile, device)
    print(table(lines))
    if options.out is not None:
        name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
        result = {"device": name, "torch": torch.__version__, "lines": [asdict(line) for line in lines]}
        options.out.write_text(json.dumps(result, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
