"""A tiny model, ragged multi-turn episodes for it, and gradients computed the slow and plain way.

The model is run row by row with the library's own attention. What a loss does at a token is found by finite
differences of a plain-Python formula; only the step from a log-probability to the weights is autograd's.
"""

from __future__ import annotations

import copy
import importlib.util
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from ludus.algos import Attempt, TurnTokens
from ludus.core import (
    Branch,
    Group,
    Segment,
    SegmentKind,
    StopReason,
    Task,
    TokenSequence,
    Trajectory,
)
from ludus.model import use_ludus_attention
from ludus.training import Learner, OptimizerConfig, RolloutBatch

VOCABULARY = 40
HEARD = [[1, 2], [3], [4, 5, 6]]
"""What the world can say."""


def references(name: str) -> ModuleType:
    """A module of formulas from the tests of the algorithms."""
    path = Path(__file__).parents[1] / "algos" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"training_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def tiny_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model: nn.Module = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=128,
            initializer_range=0.25,
            tie_word_embeddings=True,
        )
    )
    use_ludus_attention(model)
    return model


def tiny_learner(model: nn.Module, budget: int = 64, learning_rate: float = 1e-30) -> Learner:
    """One whose gradient is not clipped, and which hardly moves unless told to."""
    config = OptimizerConfig(
        learning_rate=learning_rate, micro_batch_tokens=budget, max_gradient_norm=1e9
    )
    return Learner(model, config, total_steps=10)


def episode(task: Task, prompt: list[int], source: random.Random, attempt: int = 0) -> Trajectory:
    segments = [Segment(SegmentKind.PROMPT, list(prompt))]
    turns = source.randint(1, 4)
    for turn in range(turns):
        said = [source.randrange(10, VOCABULARY) for _ in range(source.randint(1, 4))]
        paid = source.choice([None, None, 0.25, -0.5])
        segments.append(Segment(SegmentKind.ACTION, said, logprobs=[0.0] * len(said), reward=paid))
        if turn + 1 < turns or source.random() < 0.5:
            segments.append(Segment(SegmentKind.OBSERVATION, list(source.choice(HEARD))))
    return Trajectory(
        task,
        sequences=[TokenSequence(segments)],
        stop=source.choice([StopReason.ANSWERED, StopReason.MAX_TURNS]),
        reward=source.choice([0.0, 1.0, 1.0, round(source.uniform(-1, 2), 3)]),
        attempt=attempt,
    )


def played(model: nn.Module, seed: int = 0, groups: int = 4, noise: float = 0.15) -> RolloutBatch:
    """Groups whose engine logprobs are the model's own, off by some noise."""
    source = random.Random(seed)
    made: list[Group] = []
    for number in range(groups):
        task, prompt = Task.of("x", id=str(number)), [number, *range(7, 7 + source.randint(1, 3))]
        attempts = [episode(task, prompt, source, i) for i in range(source.randint(2, 4))]
        made.append(Group(task, attempts))
    for trajectory in (t for group in made for t in group.trajectories):
        logprobs = row_logprobs(model, trajectory.tokens).tolist()
        place = 0
        for segment in trajectory.sequences[0].segments:
            if segment.logprobs is not None:
                segment.logprobs[:] = [
                    logprobs[place + i] + source.uniform(-noise, noise)
                    for i in range(len(segment.tokens))
                ]
            place += len(segment.tokens)
    return RolloutBatch(made, frozenset(), [number % 2 for number in range(groups)], {})


def branched(model: nn.Module, seed: int = 0, groups: int = 3, attempts: int = 5) -> RolloutBatch:
    """Groups of random trees: the first attempt begins at the prompt, most others share turns with another."""
    source = random.Random(seed)
    made: list[Group] = []
    for number in range(groups):
        task, prompt = Task.of("x", id=str(number)), [number, 7, 8]
        grown: list[Trajectory] = []
        for attempt in range(attempts):
            one = episode(task, prompt, source, attempt)
            own = one.sequences[0].segments
            parent = source.choice(grown) if grown and source.random() < 0.8 else None
            places = _turn_ends(parent) if parent is not None else []
            if parent is not None and places:
                count = source.choice(places)
                own[:1] = parent.sequences[0].segments[:count]
                one.branch = Branch(parent.attempt, count)
            grown.append(one)
        made.append(Group(task, grown))
    for segment, logprobs in _sampled_under(model, made):
        segment.logprobs = [value + source.uniform(-0.1, 0.1) for value in logprobs]
    return RolloutBatch(made, frozenset(), [0] * groups, {})


def _turn_ends(trajectory: Trajectory) -> list[int]:
    """After how many segments another attempt can go on: after what was heard, before the next action."""
    segments = trajectory.sequences[0].segments
    return [i + 1 for i, one in enumerate(segments) if one.kind is SegmentKind.OBSERVATION]


def _sampled_under(model: nn.Module, groups: Iterable[Group]) -> Iterable[tuple[Segment, list[float]]]:
    for trajectory in (t for group in groups for t in group.trajectories):
        logprobs = row_logprobs(model, trajectory.tokens).tolist()
        place = 0
        for segment in trajectory.sequences[0].segments:
            if segment.kind is SegmentKind.ACTION:
                yield segment, logprobs[place : place + len(segment.tokens)]
            place += len(segment.tokens)


def with_long_prompts(given: RolloutBatch, length: int = 50) -> RolloutBatch:
    """The same with further tokens in front, the same ones for all attempts of a group."""
    for group in given.groups:
        source = random.Random(group.task.id)
        more = [source.randrange(VOCABULARY) for _ in range(length)]
        for trajectory in group.trajectories:
            prompt = trajectory.sequences[0].segments[0]
            prompt.tokens[:] = [*more, *prompt.tokens]
    return given


def scored(given: RolloutBatch) -> list[Trajectory]:
    return [t for group in given.groups for t in group.trainable]


def attempts_of(given: RolloutBatch) -> list[Attempt]:
    """The episodes as plain data, as the formulas read them."""
    attempts: list[Attempt] = []
    for number, group in enumerate(given.groups):
        for trajectory in group.trainable:
            segments = trajectory.sequences[0].segments
            turns: list[TurnTokens] = []
            anchor = 99
            for segment in segments[1:]:
                if segment.kind is SegmentKind.ACTION:
                    turns.append(TurnTokens(len(segment.tokens), 0, segment.reward or 0.0, anchor))
                    anchor = -1
                else:
                    last = turns.pop()
                    turns.append(TurnTokens(last.action, len(segment.tokens), last.reward, last.anchor))
                    anchor = HEARD.index(segment.tokens)
            attempts.append(
                Attempt(
                    reward=trajectory.reward or 0.0,
                    turns=turns,
                    group=number,
                    prompt=len(segments[0].tokens),
                    truncated=trajectory.stop is StopReason.MAX_TURNS,
                    set=given.sets[number],
                )
            )
    return attempts


def plain(model: nn.Module) -> nn.Module:
    """A copy that attends as the library does."""
    copied: Any = copy.deepcopy(model)
    copied.set_attn_implementation("sdpa")
    copied.zero_grad(set_to_none=True)
    plain_model: nn.Module = copied
    return plain_model


def row_logprobs(model: nn.Module, tokens: list[int]) -> torch.Tensor:
    """The log-probability of each token given those before it, from one row alone; 0 for the first."""
    runner = model if model.config._attn_implementation == "sdpa" else plain(model)  # type: ignore[union-attr]
    logits = runner(input_ids=torch.tensor([tokens])).logits[0].log_softmax(-1)
    rest = logits[:-1].gather(1, torch.tensor(tokens[1:])[:, None]).squeeze(1)
    return torch.cat([rest.new_zeros(1), rest])


def slope(formula: Callable[[float], float], at: float, step: float = 1e-6) -> float:
    """The derivative by a central difference."""
    return (formula(at + step) - formula(at - step)) / (2 * step)


def gradient_of(
    model: nn.Module, rows: Iterable[list[int]], slopes: Iterable[list[float]]
) -> list[torch.Tensor]:
    """The gradient of sum over tokens of slope * logprob, row by row."""
    runner = plain(model)
    for tokens, along in zip(rows, slopes, strict=True):
        (row_logprobs(runner, tokens) * torch.tensor(along)).sum().backward()
    return [p.grad if p.grad is not None else torch.zeros_like(p) for p in runner.parameters()]


def assert_same_gradient(model: nn.Module, expected: list[torch.Tensor]) -> None:
    assert max(float(g.abs().max()) for g in expected) > 1e-4, "there is nothing to compare"
    for parameter, wanted in zip(model.parameters(), expected, strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, wanted, atol=2e-5, rtol=1e-3)
