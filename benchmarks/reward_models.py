"""A step model against a judge of the same size: cost an episode; and what a noisy teacher costs.

    python benchmarks/reward_models.py [--episodes 64] [--seeds 0 1 2]

**Cost.** The same small model (4 layers, width 256, from scratch) reads the same episodes of six turns: once as
a step model (one pass over the episode), once as a judge that reads instructions and episode and writes its
verdict (64 tokens; the instructions are the same for all, so the engine computes them once), both batched, one
thread. Neither has learned anything: only time is compared. A judge is usually the larger model by far, and
its cost grows with its size.

**Truth.** In each episode an agent takes coloured keys; taking the key that the task names is right. A reward
model learns from pairs that a teacher labels who is wrong in a share of them, and a step model from such
scores; both are measured against the truth on 200 other episodes.
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

COLOURS = ["red", "blue", "green", "black", "white", "brown"]
TURNS, VERDICT_TOKENS = 6, 64
INSTRUCTIONS = (
    "You follow the progress of an AI agent. You are given its task, a checklist, and its actions. For each "
    "action, list the numbers of the checklist's items that this action completed, by evidence, not by claims. "
    "Most actions complete none. Answer with one JSON object. "
) * 2


def episode(draw: random.Random, skill: float = 0.5) -> tuple[list[Message], list[float]]:
    """An episode of six turns, and the truth about each action."""
    wanted = draw.choice(COLOURS)
    messages, truth = [Message("user", f"take every {wanted} key")], []
    for _ in range(TURNS):
        colour = wanted if draw.random() < skill else draw.choice(COLOURS)
        truth.append(float(colour == wanted))
        messages += [Message("assistant", f"take the {colour} key"), Message("user", "taken, next door")]
    return messages[:-1], truth


def config(seed: int, layers: int = 2, width: int = 96, steps: int = 120) -> RewardModelConfig:
    scratch = {"layers": layers, "width": width, "heads": 4, "vocabulary": 500, "context": 1024}
    return RewardModelConfig.parse({
        "model": {"scratch": scratch, "device": "cpu"}, "steps": steps, "batch": 16, "seed": seed,
        "optimizer": {"learning_rate": 3e-3},
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
        accuracies, correlations = [], []
        for seed in seeds:
            draw = random.Random(seed)
            pairs, steps = [], []
            for _ in range(300):
                good, bad = (episode(draw, skill) for skill in (0.8, 0.2))
                bad = ([good[0][0], *bad[0][1:]], bad[1])
                wanted = good[0][0].content.split()[2]
                is_right = [f"the {wanted} key" in m.content for m in bad[0] if m.role == "assistant"]
                first, second = (good[0], bad[0]) if sum(good[1]) > sum(is_right) else (bad[0], good[0])
                if draw.random() < noise:
                    first, second = second, first
                pairs.append(Preference(first, second))
                noisy = tuple(1 - one if draw.random() < noise else one for one in good[1])
                steps.append(ScoredSteps(good[0], noisy))
            at = folder / f"{noise}-{seed}"
            model = load_reward_model(fit_reward_model(pairs, at / "pairs", config(seed)).folder, "cpu")
            small = load_reward_model(fit_reward_model(steps, at / "steps", config(seed)).folder, "cpu")
            test = random.Random(1000 + seed)
            right, found, given = 0, [], []
            for _ in range(200):
                one, marks = episode(test, 0.5)
                other, others = episode(test, 0.5)
                other = [one[0], *other[1:]]
                wanted = one[0].content.split()[2]
                others = [
                    float(f"the {wanted} key" in m.content) for m in other if m.role == "assistant"
                ]
                scores = model.score([one, other])
                better = float(scores[0][-1, 0]) > float(scores[1][-1, 0])
                right += 1 if sum(marks) == sum(others) else better == (sum(marks) > sum(others))
                found += small.score([one])[0][:, 0].tolist()
                given += marks
            accuracies.append(right / 200)
            correlations.append(float(torch.corrcoef(torch.tensor([found, given]))[0, 1]))
        rows.append(
            [
                f"{noise:.0%}",
                *(f"{statistics.fmean(v):.3f} ± {_sd(v):.3f}" for v in (accuracies, correlations)),
            ]
        )
    print(
        table_markdown(("wrong labels", "pairs right (truth)", "step scores: correlation (truth)"), rows)
    )


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
