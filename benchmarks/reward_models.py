"""A step model against a judge of the same size: cost an episode; and what a noisy teacher costs.

    python benchmarks/reward_models.py [--episodes 64] [--seeds 0 1 2]

**Cost.** A step model (4 layers, width 256, from scratch) reads an episode of six turns once, without a head of
words, and has all its steps' scores. Beside it judges that read instructions and episode and write a verdict of
64 tokens: one of the same size, asked once an episode; the same, asked after each step; and one of about ten
times the weights. The engine computes what questions have in common once, and batches. One thread. Nobody has
learned anything: only cost is compared.

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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import torch

from ludus.core import Message
from ludus.core.generation import Sampling
from ludus.engine import EmbeddedEngine, EngineConfig
from ludus.observe import ReportTable
from ludus.training.config.run import ModelConfig
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
    """Tokens, FLOPs and seconds an episode: a step model, judges of its size, and one ten times larger."""
    draw = random.Random(0)
    played = [episode(draw) for _ in range(count)]
    scored = [ScoredSteps(messages, tuple(truth)) for messages, truth in played]
    result = fit_reward_model(scored, folder / "cost", config(0, layers=4, width=256, steps=2))
    model = load_reward_model(result.folder, "cpu")
    conversations = [messages for messages, _ in played]
    small, tokenizer = load_model(ModelConfig(name=str(result.folder), device="cpu"), 0)
    fitted = fit_reward_model(scored, folder / "large", config(0, layers=10, width=512, steps=1))
    large, same = load_model(ModelConfig(name=str(fitted.folder), device="cpu"), 0)
    assert same.encode(INSTRUCTIONS) == tokenizer.encode(INSTRUCTIONS), "both read the same tokens"

    # judges read the same rendered episodes, behind their instructions
    instructions = tokenizer.encode(INSTRUCTIONS)
    batch, _, _ = model.rows(conversations)
    read = list(zip(batch.split(batch.tokens_T), batch.split(batch.trained_T), strict=True))
    whole = [[*instructions, *row.tolist()] for row, _ in read]
    steps = [
        [*instructions, *row[: end + 1].tolist()]
        for row, ends in read
        for end in ends.nonzero().flatten()
    ]
    model.score(conversations[:4])
    seconds = dict.fromkeys(("step model", "judge", "judge, each step", "judge, ten times larger"), 1e9)
    for _ in range(3):  # the best of three, interleaved: other programs only add to it
        began = time.perf_counter()
        model.score(conversations)
        taken = [time.perf_counter() - began]
        taken += [_judged(small, tokenizer, whole), _judged(small, tokenizer, steps)]
        taken += [_judged(large, tokenizer, whole)]
        seconds = {
            name: min(best, now / count)
            for (name, best), now in zip(seconds.items(), taken, strict=True)
        }
    shared = len(instructions)  # computed once for all, by the engine
    read = statistics.fmean(map(len, whole)) - shared
    weights = [_weights(one) for one in (model.model, small, small, large)]
    tokens = [read, read + VERDICT_TOKENS, read + TURNS * VERDICT_TOKENS, read + VERDICT_TOKENS]
    flops = [2 * w * t for w, t in zip(weights, tokens, strict=True)]
    flops[0] -= 2 * read * _head(model.model)  # it has no head of words
    rows = [
        [name, f"{w / 1e6:.1f}M", f"{t:.0f}", f"{f / 1e9:.2f}", f"{1e3 * s:.1f}", f"1/{f / flops[0]:.1f}",
         f"1/{s / seconds['step model']:.1f}"]
        for (name, s), w, t, f in zip(seconds.items(), weights, tokens, flops, strict=True)
    ]  # fmt: skip
    names = ("", "weights", "tokens", "GFLOP", "ms", "step model's share: FLOPs", "time")
    print(
        f"an episode of {TURNS} turns; a judge's instructions ({shared} tokens) are computed once for all\n"
    )
    print(ReportTable(names, rows).markdown(), flush=True)


def _judged(model: torch.nn.Module, tokenizer: Any, prompts: Sequence[list[int]]) -> float:
    """Seconds of all questions at once: the engine keeps what begins alike, and batches."""

    async def ask() -> float:
        engine = EmbeddedEngine(model, tokenizer, EngineConfig(max_running=64, cache_tokens=1 << 17))
        sampling = [Sampling(max_tokens=VERDICT_TOKENS, seed=i) for i in range(len(prompts))]
        await engine.generate(prompts[0][:8], sampling[0])
        began = time.perf_counter()
        await asyncio.gather(*(engine.generate(p, s) for p, s in zip(prompts, sampling, strict=True)))
        taken = time.perf_counter() - began
        await engine.close()
        return taken

    return asyncio.run(ask())


def _weights(model: Any) -> int:
    """Weights that a token is multiplied with: all but the embedding, which is looked up."""
    lookup = model.get_input_embeddings().weight
    inner = sum(one.numel() for one in model.parameters() if one is not lookup)
    return inner + (_head(model) if model.get_output_embeddings().weight is lookup else 0)


def _head(model: Any) -> int:
    return int(model.get_output_embeddings().weight.numel())


def truth(seeds: list[int], folder: Path) -> None:
    rows = []
    for noise in (0.0, 0.1, 0.3):
        measured = [_against_truth(noise, seed, folder / f"{noise}-{seed}") for seed in seeds]
        shown = [f"{statistics.fmean(v):.3f} ± {_sd(v):.3f}" for v in zip(*measured, strict=True)]
        rows.append([f"{noise:.0%}", *shown])
        print(" | ".join(rows[-1]), flush=True)
    print(
        ReportTable(
            ("wrong labels", "pairs right (truth)", "step scores: correlation (truth)"), rows
        ).markdown()
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
        if options.seeds:
            truth(options.seeds, Path(folder))


if __name__ == "__main__":
    main()
