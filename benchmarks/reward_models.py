"""A step model against a judge of the same size: cost an episode; and what a noisy teacher costs.

    python benchmarks/reward_models.py [--episodes 64] [--seeds 0 1 2]

**Cost.** The same small model (4 layers, width 256, from scratch) reads the same episodes of six turns: once as
a step model (one pass over the episode), once as a judge that reads instructions and episode and writes its
verdict (64 tokens; the instructions are the same for all, so the engine computes them once), both batched, one
thread. Neither has learned anything: only time is compared. A judge is usually the larger model by far, and
its cost grows with its size.

**Truth.** In each episode an agent takes coloured keys; three of six colours are right. A reward model learns
from pairs that a teacher labels who is wrong in a share of them, and a step model from such scores; both are
measured against the truth on 200 other episodes.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import tempfile
import time
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

import torch

from ludus.core import Message
from ludus.core.generation import Sampling
from ludus.engine import EmbeddedEngine, EngineConfig
from ludus.observe import table_markdown
from ludus.training.config.recipe import ModelConfig
from ludus.training.data.conversations import Preference, ScoredSteps
from ludus.training.models.loading import load_model
from ludus.training.reward_models import RewardModelConfig, fit_reward_model, load_reward_model

RIGHT, WRONG = ["red", "blue", "green"], ["black", "white", "brown"]
TURNS, VERDICT_TOKENS = 6, 64
INSTRUCTIONS = (
    "You follow the progress of an AI agent. You are given its task, a checklist, and its actions. For each "
    "action, list the numbers of the checklist's items that this action completed, by evidence, not by claims. "
    "Most actions complete none. Answer with one JSON object. "
) * 2


def episode(draw: random.Random) -> tuple[list[Message], list[float]]:
    """An episode of six turns, and the truth about each action."""
    messages, truth = [Message("user", "take the right keys")], []
    skill = draw.random()
    for _ in range(TURNS):
        colour = draw.choice(RIGHT if draw.random() < skill else WRONG)
        truth.append(float(colour in RIGHT))
        messages += [Message("assistant", f"take the {colour} key"), Message("user", "taken, next door")]
    return messages[:-1], truth


def config(seed: int, layers: int = 1, width: int = 64, steps: int = 60) -> RewardModelConfig:
    scratch = {"layers": layers, "width": width, "heads": 4, "vocabulary": 500, "context": 1024}
    return RewardModelConfig.parse({
        "model": {"scratch": scratch, "device": "cpu"}, "steps": steps, "batch": 8, "seed": seed,
        "optimizer": {"learning_rate": 1e-2},
    })  # fmt: skip


def cost(count: int, folder: Path) -> None:
    draw = random.Random(0)
    played = [episode(draw) for _ in range(count)]
    scored = [ScoredSteps(messages, tuple(truth)) for messages, truth in played]
    result = fit_reward_model(scored, folder / "cost", config(0, layers=4, width=256, steps=2))
    model = load_reward_model(result.folder, "cpu")
    conversations = [messages for messages, _ in played]
    model.score(conversations[:4])
    started = time.perf_counter()
    model.score(conversations)
    alone = (time.perf_counter() - started) / count
    judge, tokenizer = load_model(ModelConfig(name=str(result.folder), device="cpu"), 0)
    prompts = [
        tokenizer.encode(INSTRUCTIONS + "\n".join(m.content for m in messages))
        for messages in conversations
    ]

    async def judged() -> float:
        engine = EmbeddedEngine(judge, tokenizer, EngineConfig(max_running=64, cache_tokens=1 << 16))
        sampling = [Sampling(max_tokens=VERDICT_TOKENS, seed=i) for i in range(count)]
        await engine.generate(prompts[0], sampling[0])
        began = time.perf_counter()
        await asyncio.gather(*(engine.generate(p, s) for p, s in zip(prompts, sampling, strict=True)))
        taken = time.perf_counter() - began
        await engine.close()
        return taken / count

    dear = asyncio.run(judged())
    tokens = statistics.fmean(len(row.row.tokens) for c in conversations for row in model.rows(c))
    print(f"step model: {alone * 1e3:.2f} ms an episode ({tokens:.0f} tokens read)")
    read = statistics.fmean(map(len, prompts))
    print(
        f"judge of the same size: {dear * 1e3:.2f} ms an episode ({read:.0f} tokens read, most of them the "
        f"instructions, {VERDICT_TOKENS} written)"
    )
    print(f"the step model costs 1/{dear / alone:.1f} of the judge\n")


def truth(seeds: list[int], folder: Path) -> None:
    rows = []
    for noise in (0.0, 0.1, 0.3):
        measured = [_against_truth(noise, seed, folder / f"{noise}-{seed}") for seed in seeds]
        shown = [f"{statistics.fmean(v):.3f} ± {_sd(v):.3f}" for v in zip(*measured, strict=True)]
        rows.append([f"{noise:.0%}", *shown])
        print(" | ".join(rows[-1]), flush=True)
    print(
        table_markdown(("wrong labels", "pairs right (truth)", "step scores: correlation (truth)"), rows)
    )


def _against_truth(noise: float, seed: int, folder: Path) -> tuple[float, float]:
    draw = random.Random(seed)
    pairs, steps = [], []
    while len(pairs) < 160:
        (one, marks), (other, others) = episode(draw), episode(draw)
        if sum(marks) == sum(others):
            continue
        is_better = (sum(marks) > sum(others)) != (draw.random() < noise)
        pairs.append(Preference(one, other) if is_better else Preference(other, one))
        noisy = tuple(1 - mark if draw.random() < noise else mark for mark in marks)
        steps.append(ScoredSteps(one, noisy))
    model = load_reward_model(fit_reward_model(pairs, folder / "pairs", config(seed)).folder, "cpu")
    small = load_reward_model(fit_reward_model(steps, folder / "steps", config(seed)).folder, "cpu")
    test = random.Random(1000 + seed)
    played = [episode(test) for _ in range(200)]
    totals = [float(scores[-1, 0]) for scores in model.score([one for one, _ in played])]
    decided = [
        (totals[i] > totals[i + 1]) == (sum(played[i][1]) > sum(played[i + 1][1]))
        for i in range(0, 200, 2)
        if sum(played[i][1]) != sum(played[i + 1][1])
    ]
    found = [
        score for scores in small.score([one for one, _ in played]) for score in scores[:, 0].tolist()
    ]
    given = [mark for _, marks in played for mark in marks]
    correlation = float(torch.corrcoef(torch.tensor([found, given]))[0, 1])
    return statistics.fmean(decided), correlation


def _sd(values: list[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--episodes", type=int, default=64)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        cost(options.episodes, Path(folder))
        truth(options.seeds, Path(folder))


if __name__ == "__main__":
    main()
