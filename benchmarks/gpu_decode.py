"""Decode speed of the embedded engine on a GPU, beside stock `generate`, continuous batching and the floor.

    python benchmarks/gpu_decode.py [--shapes qwen2.5-0.5b qwen2.5-1.5b] [--cases 1x512 64x512 256x512 ...]
                                    [--new 192] [--quick] [--peers | --no-peers] [--check] [--profile]
                                    [--limit 400] [--out FILE]

Random weights in bf16, a vocabulary of 151,936 tokens, temperature 1, log-probabilities of every token. A case
is batch x context: so many requests, each with a prompt of its own, go through `Engine.generate` at once.
*steady* is the rate between 30% and 80% of all tokens, when all prompts are read and no request has ended;
prompts are so long that contexts have the case's length on average in that window. *overall* counts from the
first request to the last answer, prompts included. The floor is the time to read all weights and all keys and
values once at the bandwidth of a large copy. Stock `generate` and the continuous batching of transformers run
the same model and contexts with few tokens, because they are slow.

`--check` measures what the numbers are worth: log-probabilities of the engine against the trainer's and against
a float32 reference, greedy tokens against stock `generate` in float32, and requests alone against the same ones
among 160. `--profile` lists the kernels of a decode step.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from pathlib import Path
from typing import Any

import torch
from gpu_common import (
    SHAPES,
    copy_bandwidth,
    kv_bytes,
    machine,
    random_model,
    say,
    synchronize,
    table,
    weight_bytes,
    write,
)
from transformers import GenerationConfig, PreTrainedModel

from ludus.core import Completion, Sampling
from ludus.engine import EmbeddedEngine, EngineConfig

CASES = ((1, 512), (64, 512), (256, 512), (512, 1024), (64, 8192))
WINDOW = (0.3, 0.8)


def prompts(model: PreTrainedModel, batch: int, context: int, seed: int = 1) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    size = (batch, context)
    return torch.randint(5, model.config.vocab_size, size, generator=generator).tolist()


def engine_for(model: PreTrainedModel, batch: int, tokens: int, **settings: Any) -> EmbeddedEngine:
    config = EngineConfig(max_running=batch, cache_tokens=batch * (tokens + 64), **settings)
    return EmbeddedEngine(model, config=config)


async def generate(
    engine: EmbeddedEngine, contexts: list[list[int]], new: int, temperature: float = 1.0
) -> list[Completion]:
    return await asyncio.gather(
        *(
            engine.generate(context, Sampling(max_tokens=new, seed=i, temperature=temperature))
            for i, context in enumerate(contexts)
        )
    )


async def watch(engine: EmbeddedEngine, seen: list[tuple[float, int, int, float]]) -> None:
    """Note the counters every few milliseconds."""
    while True:
        stats = engine.stats
        seen.append((time.perf_counter(), stats.generated_tokens, stats.steps, stats.gpu_seconds))
        await asyncio.sleep(0.002)


async def measure(model: PreTrainedModel, batch: int, context: int, new: int) -> dict[str, float]:
    """Steady and overall rates of one case, after a short run that captures what it needs."""
    engine = engine_for(model, batch, context + new)
    try:
        contexts = prompts(model, batch, context - round(sum(WINDOW) / 2 * new))
        long, short = (
            prompts(model, 1, context, seed=2),
            prompts(model, batch, 16, seed=3),
        )
        await generate(engine, [*long, *short[1:]], 48)
        capture = engine.stats.capture_seconds
        seen: list[tuple[float, int, int, float]] = []
        watcher = asyncio.create_task(watch(engine, seen))
        before, started = engine.stats.generated_tokens, time.perf_counter()
        completions = await generate(engine, contexts, new)
        seconds = time.perf_counter() - started
        watcher.cancel()
        total = sum(len(completion.tokens) for completion in completions)
        inside = [moment for moment in seen if WINDOW[0] <= (moment[1] - before) / total <= WINDOW[1]]
        # So few tokens that the window was missed: the whole run stands in for it.
        inside = inside if len(inside) > 1 else [seen[0], seen[-1]]
        (t0, g0, s0, u0), (t1, g1, s1, u1) = inside[0], inside[-1]
        return {
            "steady": (g1 - g0) / (t1 - t0),
            "overall": total / seconds,
            "step_ms": 1e3 * (t1 - t0) / max(1, s1 - s0),
            "gpu_ms": 1e3 * (u1 - u0) / max(1, s1 - s0),
            "capture_s": engine.stats.capture_seconds,
            "capture_in_run_s": engine.stats.capture_seconds - capture,
            "captures": engine.stats.graph_captures,
            "replays": engine.stats.graph_replays,
            "prompts_s": next(m[0] for m in seen if m[1] - before >= batch) - started,
        }
    finally:
        await engine.close()


def stock_rate(model: PreTrainedModel, contexts: list[list[int]], device: str, new: int = 10) -> float:
    """Tokens a second of stock `generate` after its prompts: the difference of two lengths."""
    ids = torch.tensor(contexts, device=device)

    def run(count: int) -> float:
        synchronize(device)
        started = time.perf_counter()
        with torch.inference_mode():
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=True,
                top_k=0,
                min_new_tokens=count,
                max_new_tokens=count,
                pad_token_id=0,
            )
        synchronize(device)
        return time.perf_counter() - started

    run(2)
    short, long = run(2), run(2 + new)
    return len(contexts) * new / (long - short)


def batching_rate(
    model: PreTrainedModel, contexts: list[list[int]], device: str, new: int = 10
) -> float:
    """Tokens per second of transformers' continuous batching."""

    def run(inputs: list[list[int]], count: int) -> tuple[float, int]:
        config = GenerationConfig(
            max_new_tokens=count, do_sample=True, top_k=0, eos_token_id=2, pad_token_id=0
        )
        synchronize(device)
        started = time.perf_counter()
        outputs = model.generate_batch(inputs=inputs, generation_config=config)
        tokens = sum(len(output.generated_tokens) for output in outputs.values())
        return time.perf_counter() - started, tokens

    run([context[:8] for context in contexts[:2]], 2)
    (short, few), (long, many) = run(contexts, 2), run(contexts, 2 + new)
    return (many - few) / (long - short)


def attempt(what: str, function: Any, *arguments: Any) -> float | str:
    """A peer's number, or why there is none."""
    try:
        return float(function(*arguments))
    except Exception as error:  # noqa: BLE001 - a peer that fails is a result
        torch.cuda.empty_cache()
        say(f"  {what} failed: {type(error).__name__}: {str(error)[:200]}")
        return "failed"


def case(
    name: str, model: PreTrainedModel, batch: int, context: int, given: argparse.Namespace
) -> dict[str, Any]:
    new = min(context // 2, max(64, given.new // 2) if given.quick else given.new)
    ours = asyncio.run(measure(model, batch, context, new))
    floor = (weight_bytes(model) + batch * context * kv_bytes(model)) / given.bandwidth
    return {
        "shape": name, "batch": batch, "context": context, "steady tokens/s": ours["steady"],
        "overall tokens/s": ours["overall"], "ms a step": ours["step_ms"],
        "ms on the GPU": ours["gpu_ms"], "floor ms": 1e3 * floor,
        "share of the floor": ours["steady"] * floor / batch,
        "prompts s": ours["prompts_s"], "capture s": ours["capture_s"], "details": ours,
    }  # fmt: skip


def peers(rows: list[dict[str, Any]], given: argparse.Namespace) -> None:
    """What others make of the same cases, the usual batch first; left out when time is up."""
    for name in given.shapes:
        own = [row for row in rows if row["shape"] == name]
        if not own or time.perf_counter() > given.until:
            continue
        model = random_model(name, given.device)
        for row in sorted(own, key=lambda row: (row["context"], -row["batch"])):
            if time.perf_counter() > given.until:
                say(f"  out of time: peers of {name} {row['batch']}x{row['context']} left out")
                continue
            contexts = prompts(model, row["batch"], row["context"])
            row["stock generate"] = attempt("generate", stock_rate, model, contexts, given.device)
            row["continuous batching"] = attempt(
                "batching", batching_rate, model, contexts, given.device
            )
            say(f"  peers: {shown([row]).splitlines()[-1]}")
        del model


def profile(model: PreTrainedModel, batch: int, context: int, device: str) -> None:
    """The kernels of decode steps by their share of GPU time."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)

    async def run() -> Any:
        engine = engine_for(model, batch, context + 160)
        contexts = prompts(model, batch, context)
        sampling = Sampling(max_tokens=160)
        warm = [asyncio.create_task(engine.generate(c, sampling)) for c in contexts]
        while engine.stats.generated_tokens < batch * 64:  # noqa: ASYNC110 - another thread counts
            await asyncio.sleep(0.001)
        with torch.profiler.profile(activities=activities) as found:
            first = engine.stats.steps
            while engine.stats.steps < first + 20:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        await asyncio.gather(*warm)
        await engine.close()
        return found

    kernels = [
        event
        for event in asyncio.run(run()).key_averages()
        if device == "cpu" or event.device_type != torch.autograd.DeviceType.CPU
    ]
    total = sum(event.self_device_time_total for event in kernels)
    say(f"\nKernels of about 20 steps at {batch} x {context}: {total / 1e3:.1f} ms on the GPU")
    kernels.sort(key=lambda event: -event.self_device_time_total)
    largest = [
        {"ms": event.self_device_time_total / 1e3, "calls": event.count, "kernel": event.key[:100]}
        for event in kernels[:24]
    ]
    say(table(largest))


def batch_and_context(text: str) -> tuple[int, int]:
    """A case as it is written on the command line."""
    batch, _, context = text.partition("x")
    if not (batch.isdigit() and context.isdigit() and int(batch) > 0 and int(context) > 1):
        raise argparse.ArgumentTypeError(f"{text!r} is not BATCHxCONTEXT, such as 256x512")
    return int(batch), int(context)


def shown(rows: list[dict[str, Any]]) -> str:
    return table([{name: value for name, value in row.items() if name != "details"} for row in rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--shapes", nargs="+", default=["qwen2.5-0.5b", "qwen2.5-1.5b"], choices=list(SHAPES)
    )
    parser.add_argument(
        "--cases", nargs="+", default=list(CASES), type=batch_and_context, metavar="BATCHxCONTEXT"
    )
    parser.add_argument("--new", type=int, default=192, help="tokens a request")
    parser.add_argument("--quick", action="store_true", help="fewer tokens, no peers")
    parser.add_argument("--peers", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--check", action="store_true", help="measure correctness as well")
    parser.add_argument("--profile", action="store_true", help="list the kernels of a decode step")
    parser.add_argument(
        "--limit", type=float, default=400, help="seconds after which nothing new begins"
    )
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if not torch.cuda.is_available() and given.shapes != ["tiny"]:
        parser.error("there is no GPU here; --shapes tiny --quick shows on a CPU that everything runs")
    started = time.perf_counter()
    given.until = started + given.limit
    given.device = "cuda" if torch.cuda.is_available() else "cpu"
    given.bandwidth = copy_bandwidth(given.device)
    say(f"{machine(given.device)}; a copy moves {given.bandwidth / 1e12:.2f} TB/s\n")
    rows: list[dict[str, Any]] = []
    checks: list[dict[str, Any]] = []
    for name in given.shapes:
        model = random_model(name, given.device)
        for size in given.cases:
            if time.perf_counter() > given.until:
                say(f"  out of time: {name} {size} left out")
                continue
            rows.append(case(name, model, *size, given))
            say(shown(rows[-1:]).splitlines()[-1])
        if given.profile:
            profile(model, 256 if given.device == "cuda" else 4, 512, given.device)
        if given.check:
            from gpu_checks import check

            checks += asyncio.run(check(name, model, given.device))
        del model
        torch.cuda.empty_cache()
    if given.peers and not given.quick:
        peers(rows, given)
    say("\n" + shown(rows))
    if checks:
        say("\n" + table(checks))
    say(f"\n{time.perf_counter() - started:.0f} s in all")
    result = {"machine": machine(given.device), "bandwidth": given.bandwidth, "decode": rows}
    write(given.out, {**result, "checks": checks})


if __name__ == "__main__":
    main()
