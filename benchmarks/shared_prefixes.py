"""Training steps in which shared prefixes are computed once, next to the same steps with all of them.

    python benchmarks/shared_prefixes.py [--rounds 3] [--layers 4] [--width 256] [--case NAME]

A small Llama (from scratch, float32) makes optimizer steps on made-up episodes, one thread, with
`optimizer.share_prefixes` on and off in turns, so that other users of the machine disturb both alike. Printed
are the medians of a step's processor seconds, their ratio, and the floor: computed tokens over all tokens. The
ratio is not the floor: attention of an answer to its prompt and the head, which sees trained tokens only, are
not saved; attention of a prompt to itself is, and of long prompts that is more than their share.

- **group**: 2 tasks x 8 attempts that share a prompt of 256 or 1,024 tokens, answers of 64 to 256 tokens.
- **tree**: 2 tasks, 4 attempts from a prompt of 256 tokens and 8 branches off them (`rl.tree`), up to 8 turns
  of 16 to 48 sampled tokens and as many observed.
- **dpo**: 4 pairs with a prompt of 256 or 1,024 tokens, a step of DPO with its reference: three passes.
- **apart**: rows that share nothing: what looking for prefixes costs.
"""

from __future__ import annotations

import argparse
import copy
import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

os.environ["OMP_NUM_THREADS"] = "1"

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from ludus.core import Branch, Group, Segment, SegmentKind, StopReason, Task, TokenSequence, Trajectory
from ludus.model import use_ludus_attention
from ludus.observe import ReportTable
from ludus.training import (
    Batch,
    Learner,
    OptimizerConfig,
    RLConfig,
    RolloutBatch,
    micro_batches,
    policy_update,
)
from ludus.training.config.stages import PreferenceConfig
from ludus.training.optim.learner import frozen
from ludus.training.optim.policy_update import policy_rows
from ludus.training.stages.preference import Pair, prefer, preference_rows

VOCABULARY = 4096
BUDGET = 16384
Step = Callable[[Learner], object]


def tokens(draw: random.Random, count: int) -> list[int]:
    return [draw.randrange(VOCABULARY) for _ in range(count)]


def action(draw: random.Random, count: int) -> Segment:
    return Segment(SegmentKind.ACTION, tokens(draw, count), [-8.0] * count)


def answered(draw: random.Random, task: Task, prompt: Sequence[int], attempt: int) -> Trajectory:
    """A prompt and an answer of 64 to 256 tokens."""
    segments = [Segment(SegmentKind.PROMPT, list(prompt)), action(draw, draw.randint(64, 256))]
    return Trajectory(
        task, [TokenSequence(segments)], stop=StopReason.ANSWERED, attempt=attempt, reward=draw.random()
    )


def flat_groups(draw: random.Random, prompt: int, tasks: int = 2, attempts: int = 8) -> list[Group]:
    groups = []
    for number in range(tasks):
        task, asked = Task.of("x", id=str(number)), tokens(draw, prompt)
        groups.append(Group(task, [answered(draw, task, asked, i) for i in range(attempts)]))
    return groups


def trees(draw: random.Random, tasks: int = 2, roots: int = 4, leaves: int = 12) -> list[Group]:
    """Attempts of up to 8 turns; branches go on from any turn but the first of an earlier attempt."""
    groups = []
    for number in range(tasks):
        task, asked = Task.of("x", id=str(number)), tokens(draw, 256)
        made: list[Trajectory] = []
        for attempt in range(leaves):
            one = Trajectory(task, attempt=attempt, stop=StopReason.ANSWERED, reward=draw.random())
            segments = [Segment(SegmentKind.PROMPT, asked)]
            if attempt >= roots:
                parent = draw.choice(made)
                count = draw.choice(range(3, len(parent.sequences[0].segments), 2))
                segments = parent.sequences[0].segments[:count]
                one.branch = Branch(parent.attempt, count)
            for _ in range(draw.randint(4, 8) - len(segments) // 2):
                segments.append(action(draw, draw.randint(16, 48)))
                segments.append(Segment(SegmentKind.OBSERVATION, tokens(draw, draw.randint(16, 48))))
            one.sequences = [TokenSequence(segments)]
            made.append(one)
        groups.append(Group(task, made))
    return groups


def grpo(groups: Sequence[Group]) -> tuple[Step, list[Trajectory]]:
    algorithm = "tree_grpo" if any(t.branch for g in groups for t in g.trajectories) else "grpo"
    config = RLConfig(steps=1, tasks=len(groups), algorithm=algorithm)
    played = RolloutBatch(list(groups), frozenset(), [0] * len(groups), {})
    rows = policy_rows(played, config)
    step = partial(policy_update, rows=rows, config=config, reference=None, critic=None)
    return step, [t for group in groups for t in group.trajectories]


def dpo(groups: Sequence[Group], reference: nn.Module) -> tuple[Step, list[Trajectory]]:
    config = PreferenceConfig(loss="dpo")
    rows = preference_rows([Pair(*group.trajectories[:2]) for group in groups], config, None)
    step = partial(prefer, rows=rows, reference=reference, config=config)
    return step, [t for group in groups for t in group.trajectories[:2]]


def learner_of(model: nn.Module, share: bool) -> Learner:
    settings = OptimizerConfig(learning_rate=1e-9, micro_batch_tokens=BUDGET, share_prefixes=share)
    return Learner(model, settings, total_steps=1000)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--case", default="", help="cases whose name contains this")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    shape = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=options.width,
        intermediate_size=options.width * 11 // 4,
        num_hidden_layers=options.layers,
        num_attention_heads=options.width // 64,
        num_key_value_heads=max(1, options.width // 128),
        max_position_embeddings=4096,
    )
    model: nn.Module = LlamaForCausalLM(shape)
    use_ludus_attention(model)
    draw = random.Random(0)
    reference = frozen(copy.deepcopy(model))
    cases = {
        "group, prompts of 256": grpo(flat_groups(draw, 256)),
        "group, prompts of 1,024": grpo(flat_groups(draw, 1024)),
        "tree": grpo(trees(draw)),
        "dpo, prompts of 256": dpo(flat_groups(draw, 256, 4, 2), reference),
        "dpo, prompts of 1,024": dpo(flat_groups(draw, 1024, 4, 2), reference),
        "apart": grpo(
            [Group(Task.of("x"), [answered(draw, Task.of("x"), tokens(draw, 256), i) for i in range(8)])]
        ),
    }
    table = []
    for name, (step, episodes) in cases.items():
        if options.case not in name:
            continue
        packed = list(micro_batches(Batch.of(episodes), BUDGET, share=True))
        everything = sum(sum(one.lengths) for one in packed)
        computed = sum(one.computed for one in packed)
        learners = {share: learner_of(model, share) for share in (True, False)}
        seconds: dict[bool, list[float]] = {True: [], False: []}
        for number in range(options.rounds + 1):  # the first of each is not counted
            for share in (True, False) if number % 2 else (False, True):
                started = time.process_time()
                step(learners[share])
                if number:
                    seconds[share].append(time.process_time() - started)
        on, off = (statistics.median(seconds[share]) for share in (True, False))
        table.append(
            [name, everything, computed]
            + [f"{one:.2f}" for one in (off, on, on / off, computed / everything)]
            + [f"{off / on:.1f}"]
        )
        print(table[-1], flush=True)
    columns = ["step", "tokens", "computed", "s without", "s with", "ratio", "floor", "times as fast"]
    print(ReportTable(columns, table).markdown())


if __name__ == "__main__":
    main()
