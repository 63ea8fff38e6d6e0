"""Decode speed of the embedded engine on a CPU, next to stock `generate` on the same model.

    python benchmarks/engine_cpu.py [--rows 256] [--prompt 120] [--new 64] [--turns 10] [--threads 2] \
        [--long 8000]

First a batch that starts and ends together, the best case of Hugging Face `generate` with its own cache:
its speed, the engine's, and the floor, which is the model's forward pass over one token per row with an
attention that costs nothing. Then a rollout of several turns, where the engine keeps each session's KV and
`generate` starts over with every turn. The first of these again with a model of which three in four layers keep
a state instead of KV (Qwen3.5's). Then short requests that arrive one after the other while a long prompt
is computed: first come, first served against the scheduler's rule, which lets them pass, each with large and
small steps. Runs alternate; the best of each is reported. Times beside a long prompt are CPU times of this
process, with one thread, so that other jobs on the machine do not count.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from statistics import median

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from ludus.core import Sampling
from ludus.engine import EmbeddedEngine, EngineConfig, Scheduler
from ludus.model import AttentionParams, head_logits, hidden_states

VOCABULARY = 300


class FreeAttention:
    """A context that costs nothing: it hands back the queries."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: AttentionParams
    ) -> Tensor:
        return query.transpose(1, 2)


def tiny_model(hidden: int, layers: int, positions: int = 2048) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=positions,
    )
    return LlamaForCausalLM(config).eval()


def hybrid_model(hidden: int, layers: int) -> PreTrainedModel:
    """Of the tiny model's size, with the gated delta rule in three of four layers."""
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    torch.manual_seed(0)
    config = Qwen3_5TextConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        layer_types=["full_attention" if i % 4 == 3 else "linear_attention" for i in range(layers)],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden // 4,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=hidden // 4,
        linear_value_head_dim=hidden // 4,
    )
    return Qwen3_5ForCausalLM(config).eval()


def prompts(rows: int, length: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(5, VOCABULARY, (rows, length), generator=generator).tolist()


def stock(model: PreTrainedModel, contexts: list[list[int]], new: int) -> list[list[int]]:
    """Sampled continuations by `generate`; contexts are of one length."""
    model.set_attn_implementation("sdpa")
    ids = torch.tensor(contexts)
    with torch.inference_mode():
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            top_k=0,
            min_new_tokens=new,
            max_new_tokens=new,
            pad_token_id=0,
        )
    model.set_attn_implementation("ludus")
    return output[:, ids.shape[1] :].tolist()


async def with_engine(
    engine: EmbeddedEngine, contexts: list[list[int]], new: int, sessions: bool
) -> list[list[int]]:
    sampled = await asyncio.gather(
        *(
            engine.generate(
                context, Sampling(max_tokens=new, seed=row), session=f"{row}" if sessions else None
            )
            for row, context in enumerate(contexts)
        )
    )
    return [completion.tokens for completion in sampled]


def floor_seconds(model: PreTrainedModel, rows: int, steps: int = 40) -> float:
    ids, positions = torch.zeros(rows, dtype=torch.long), torch.arange(rows)
    times = []
    with torch.inference_mode():
        for _ in range(steps):
            started = time.perf_counter()
            logits = head_logits(model, hidden_states(model, ids, positions, FreeAttention()))
            torch.multinomial(torch.softmax(logits, -1), 1)
            times.append(time.perf_counter() - started)
    return min(times)


async def single_turn(
    model: PreTrainedModel, rows: int, prompt: int, new: int, repeats: int, *, floor: bool = True
) -> None:
    contexts = prompts(rows, prompt)
    stock_times, engine_times = [], []
    for _ in range(repeats):
        started = time.perf_counter()
        stock(model, contexts, new)
        stock_times.append(time.perf_counter() - started)
        engine = EmbeddedEngine(model)
        started = time.perf_counter()
        await with_engine(engine, contexts, new, sessions=False)
        engine_times.append(time.perf_counter() - started)
        stats = engine.stats
        await engine.close()
    tokens = rows * new
    theirs, ours = tokens / min(stock_times), tokens / min(engine_times)
    kind = type(model).__name__.removesuffix("ForCausalLM")
    report(f"single turn of {kind}: {rows} rows x {prompt} prompt + {new} new tokens")
    report(f"  stock generate   {theirs:10,.0f} tokens/s")
    report(f"  engine           {ours:10,.0f} tokens/s   {ours / theirs:.2f}x stock")
    step = stats.busy_seconds / stats.steps
    report(f"  engine's step    {step * 1e3:10.1f} ms on average, prompts included")
    if floor:
        least = floor_seconds(model, rows) * 1e3
        report(f"  floor of a step  {least:10.1f} ms for one token per row, without attention")


async def multi_turn(model: PreTrainedModel, rows: int, prompt: int, new: int, turns: int) -> None:
    observation = [7] * 10
    contexts = prompts(rows, prompt)
    started = time.perf_counter()
    for _ in range(turns):
        actions = stock(model, contexts, new)
        contexts = [c + a + observation for c, a in zip(contexts, actions, strict=True)]
    theirs = rows * new * turns / (time.perf_counter() - started)
    engine = EmbeddedEngine(model)
    contexts = prompts(rows, prompt)
    started = time.perf_counter()
    for _ in range(turns):
        actions = await with_engine(engine, contexts, new, sessions=True)
        contexts = [c + a + observation for c, a in zip(contexts, actions, strict=True)]
    ours = rows * new * turns / (time.perf_counter() - started)
    await engine.close()
    report(f"{turns} turns of {new} tokens, {rows} sessions, contexts up to {len(contexts[0])} tokens")
    report(f"  stock generate   {theirs:10,.0f} tokens/s   (each turn starts over)")
    report(f"  engine           {ours:10,.0f} tokens/s   {ours / theirs:.2f}x stock")


async def beside_long_prompt(
    model: PreTrainedModel, long: int, step: int, share: float
) -> tuple[float, float, float]:
    """CPU seconds of a long prompt; of short requests that arrive meanwhile: first token and reply, medians."""
    (context,) = prompts(1, long)
    engine = EmbeddedEngine(model, config=EngineConfig(tokens_per_step=step))
    engine._core.scheduler.long_share = share
    firsts, ends = [], []

    async def ask(number: int) -> None:
        asked, told = time.process_time(), []
        prompt = [5 + (number + i) % 50 for i in range(32)]
        sampling = Sampling(max_tokens=16, seed=number)
        await engine.generate(prompt, sampling, on_tokens=lambda _: told.append(time.process_time()))
        firsts.append(told[0] - asked)
        ends.append(time.process_time() - asked)

    started = time.process_time()
    running = asyncio.create_task(engine.generate(context, Sampling(max_tokens=1)))
    shorts = []
    while not running.done():
        await asyncio.wait([running], timeout=0.005)
        if time.process_time() - started > 0.2 * (1 + len(shorts)):
            shorts.append(asyncio.create_task(ask(len(shorts))))
    took = time.process_time() - started
    await asyncio.gather(*shorts)
    await engine.close()
    return took, median(firsts), median(ends)


async def fairness(model: PreTrainedModel, long: int, repeats: int) -> None:
    kinds = [(step, share) for step in (2048, 512) for share in (1.0, Scheduler.long_share)]
    found = {kind: [await beside_long_prompt(model, long, *kind)] for kind in kinds}
    for _ in range(repeats - 1):
        for kind in kinds:
            found[kind].append(await beside_long_prompt(model, long, *kind))
    best = {kind: [min(column) for column in zip(*rows, strict=True)] for kind, rows in found.items()}
    report(
        f"a prompt of {long:,} tokens; short requests (32 + 16 tokens) that arrive meanwhile; CPU seconds"
    )
    report("  tokens_per_step                        long prompt  first token  whole reply")
    before = best[kinds[0]]
    for (step, share), (took, first, end) in best.items():
        kind = f"{step:5}  " + ("first come, first served" if share == 1 else "short prompts pass")
        ratios = f"   {before[1] / first:.1f}x and {before[2] / end:.1f}x sooner"
        report(f"  {kind:38}{took:12.2f}{first:13.2f}{end:13.2f}{ratios}")


def report(line: str) -> None:
    sys.stdout.write(line + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in {
        "rows": 256, "prompt": 120, "new": 64, "turns": 10, "threads": 2, "hidden": 128, "layers": 3,
        "repeats": 3, "long": 8000,
    }.items():  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    model = tiny_model(given.hidden, given.layers)
    asyncio.run(single_turn(model, given.rows, given.prompt, given.new, given.repeats))
    asyncio.run(multi_turn(model, given.rows, given.prompt // 2, 8, given.turns))
    hybrid = hybrid_model(given.hidden, given.layers + 1)
    asyncio.run(single_turn(hybrid, given.rows, given.prompt, given.new, given.repeats, floor=False))
    torch.set_num_threads(1)
    model = tiny_model(given.hidden, given.layers, positions=given.long + 64)
    asyncio.run(fairness(model, given.long, given.repeats))


if __name__ == "__main__":
    main()
