"""An agentic load on the embedded engine: many episodes, several turns, slow tools, growing contexts.

    python benchmarks/gpu_agentic.py [--shape qwen2.5-0.5b] [--episodes 512] [--group 8] [--turns 8]
                                     [--latency 0.5] [--out FILE]

Groups of episodes share a prompt; each turn an episode generates an action of random length, waits for a tool
(lognormal latency) and goes on with what the tool said. All lengths and latencies are drawn
beforehand. The same load is played twice on one engine, which forgets all contexts in between: the first time
graphs are captured as they are needed, the second time they are there, as in every later step of a training
run. It reports

    busy          the share of the wall time in which the GPU worked on a step
    reuse         tokens of contexts that were found in the cache, over those that could have been: all of an
                  episode's past but its last token, and the prompt of all members of a group but the first
    again         tokens computed more than the fewest that suffice, as a share of these
    over bound    wall time over the larger of the GPU's work and the critical path, which is the longest
                  episode by itself: its tools, and its tokens at the pace of a single request

and then what it costs to hand the KV cache's memory to a trainer and to have it again.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpu_common import SHAPES, machine, random_model, say, table, write
from transformers import PreTrainedModel

from ludus.core import Sampling
from ludus.engine import EmbeddedEngine, EngineConfig


@dataclass(frozen=True, slots=True)
class Episode:
    """What will happen, drawn beforehand."""

    number: int
    prompt: list[int]
    actions: list[int]
    """Tokens of each turn's action."""
    observations: list[list[int]]
    latencies: list[float]


def episodes(count: int, group: int, turns: int, latency: float, vocabulary: int) -> list[Episode]:
    random = np.random.default_rng(0)
    sigma = 1.0
    result: list[Episode] = []
    for number in range(count):
        if number % group == 0:
            prompt = random.integers(5, vocabulary, random.integers(200, 600)).tolist()
        played = int(random.integers(max(1, turns // 2), turns + 1))
        sizes = random.integers(30, 200, played)
        result.append(
            Episode(
                number,
                prompt,
                random.integers(24, 128, played).tolist(),
                [random.integers(5, vocabulary, size).tolist() for size in sizes],
                random.lognormal(np.log(latency) - sigma**2 / 2, sigma, played).tolist(),
            )
        )
    return result


@dataclass(slots=True)
class Tally:
    """Tokens of all turns."""

    cached: int = 0
    possible: int = 0
    generated: int = 0


async def play(engine: EmbeddedEngine, episode: Episode, group: int, tally: Tally) -> None:
    context = list(episode.prompt)
    known = 0 if episode.number % group == 0 else len(context) - 1
    session = f"episode-{episode.number}"
    last = len(episode.actions) - 1
    for turn, tokens in enumerate(episode.actions):
        sampling = Sampling(max_tokens=tokens, seed=1000 * episode.number + turn)
        completion = await engine.generate(context, sampling, session=session)
        tally.cached += completion.cached_tokens
        tally.possible += known
        tally.generated += len(completion.tokens)
        if turn == last:
            break
        await asyncio.sleep(episode.latencies[turn])
        known = len(context) + len(completion.tokens) - 1
        context = context + completion.tokens + episode.observations[turn]
    await engine.release(session)


async def pace(engine: EmbeddedEngine, prompt: list[int], tokens: int = 128) -> float:
    """Seconds a token of a request that is alone, at best: the bound should be one."""
    times: list[float] = []
    for _ in range(6):
        started = time.perf_counter()
        await engine.generate(prompt, Sampling(max_tokens=tokens))
        times.append(time.perf_counter() - started)
    return min(times) / tokens


def fewest(todo: list[Episode], group: int) -> int:
    """Tokens that must go through the model if nothing is ever computed twice."""
    total = 0
    for episode in todo:
        last = len(episode.actions) - 1
        own = sum(episode.actions) - 1 + sum(len(o) for o in episode.observations[:last])
        total += own + (len(episode.prompt) if episode.number % group == 0 else 1)
    return total


async def measure(model: PreTrainedModel, given: argparse.Namespace) -> list[dict[str, Any]]:
    todo = episodes(given.episodes, given.group, given.turns, given.latency, model.config.vocab_size)
    engine = EmbeddedEngine(model, config=EngineConfig(max_running=given.episodes))
    alone = await pace(engine, todo[0].prompt)
    await engine.forget()
    path = max(
        sum(episode.latencies[: len(episode.actions) - 1]) + alone * sum(episode.actions)
        for episode in todo
    )
    rows: list[dict[str, Any]] = []
    for turn in ("first", "second"):
        rows.append({"played": f"the {turn} time", **await played(engine, todo, given, path)})
        await engine.forget()
    await engine.close()
    return rows


async def played(
    engine: EmbeddedEngine, todo: list[Episode], given: argparse.Namespace, path: float
) -> dict[str, Any]:
    """What the load took; `path` is its critical path in seconds."""
    before, tally = engine.stats.as_dict(), Tally()
    started = time.perf_counter()
    await asyncio.gather(*(play(engine, episode, given.group, tally) for episode in todo))
    wall = time.perf_counter() - started
    spent = {name: value - before[name] for name, value in engine.stats.as_dict().items()}
    work = spent["gpu_seconds"] or spent["busy_seconds"]
    need = fewest(todo, given.group)
    return {
        "shape": given.shape, "episodes": len(todo), "turns": sum(len(e.actions) for e in todo),
        "generated": tally.generated, "wall s": wall, "tokens/s": tally.generated / wall,
        "busy": work / wall, "reuse": tally.cached / tally.possible,
        "again": spent["computed_tokens"] / need - 1, "gpu work s": work, "critical path s": path,
        "over bound": wall / max(work, path), "wasted tokens": int(spent["wasted_tokens"]),
        "preemptions": int(spent["preemptions"]), "captures": int(spent["graph_captures"]),
        "capture s": spent["capture_seconds"], "steps": int(spent["steps"]),
    }  # fmt: skip


async def handed_over(model: PreTrainedModel) -> dict[str, Any]:
    """A pause that hands the cache's memory back, and the first answer after it, by captured graphs."""
    engine = EmbeddedEngine(model, config=EngineConfig(max_running=8, release_memory="always"))
    prompt, sampling = list(range(5, 69)), Sampling(max_tokens=16)
    for _ in range(6):
        await engine.generate(prompt, sampling)
    answered = time.perf_counter()
    await engine.generate(prompt, sampling)
    answered = time.perf_counter() - answered
    captures, full = engine.stats.graph_captures, torch.cuda.mem_get_info()[0]
    started = time.perf_counter()
    await engine.pause()
    paused, free = time.perf_counter() - started, torch.cuda.mem_get_info()[0]
    await engine.resume()
    started = time.perf_counter()
    await engine.generate(prompt, sampling)
    again = time.perf_counter() - started
    row = {
        "handed back GiB": (free - full) / 2**30, "pause s": paused, "regained s": again - answered,
        "captured anew": engine.stats.graph_captures - captures,
    }  # fmt: skip
    await engine.close()
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="qwen2.5-0.5b", choices=list(SHAPES))
    parser.add_argument("--episodes", type=int, default=512)
    parser.add_argument("--group", type=int, default=8, help="episodes with the same prompt")
    parser.add_argument("--turns", type=int, default=8, help="the most turns of an episode")
    parser.add_argument("--latency", type=float, default=0.5, help="mean seconds of a tool call")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if not torch.cuda.is_available() and given.shape != "tiny":
        parser.error(
            "there is no GPU here; --shape tiny --episodes 16 shows on a CPU that everything runs"
        )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    say(machine(device) + "\n")
    model = random_model(given.shape, device)
    rows = asyncio.run(measure(model, given))
    say(table([{"": name, "first": rows[0][name], "second": rows[1][name]} for name in rows[0]]))
    handed = asyncio.run(handed_over(model)) if device == "cuda" else {}
    if handed:
        say("\n" + table([handed]))
    write(given.out, {"machine": machine(device), "agentic": rows, "handed over": handed})


if __name__ == "__main__":
    main()
