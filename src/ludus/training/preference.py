"""DPO: make the better of two episodes likelier than the worse, measured against a reference.

    margin = (log p(chosen) - log q(chosen)) - (log p(rejected) - log q(rejected))
    loss   = -log sigmoid(beta * margin), the mean over the pairs

log p of an episode is the sum over what was said in it. A pair's two sides may be long, and many pairs make a
step, so they do not share one graph: a first pass without gradient finds every margin, from which the
derivative of the loss by each episode's log p follows,

    d loss / d log p(chosen) = -beta * sigmoid(-beta * margin) / pairs = -d loss / d log p(rejected),

and a second pass weights each token's log-probability by it. The gradient is that of the formula, whatever the
micro-batches.

Rafailov et al., "Direct Preference Optimization: Your Language Model is Secretly a Reward Model", 2023,
arXiv:2305.18290.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from ludus.core.failures import ConfigError
from ludus.core.messages import Message
from ludus.core.tooling import ToolSpec
from ludus.core.trajectory import Group, Trajectory
from ludus.rollouts.renderers import Renderer
from ludus.training.imitation import (
    Conversation,
    check_conversation,
    numbered_lines,
    trajectory_of,
)
from ludus.training.learner import Learner
from ludus.training.logprobs import logprobs_of
from ludus.training.packing import Columns, Pack, packs_of
from ludus.training.rows import Row, flags, owners, rows_of


@dataclass(frozen=True, slots=True)
class Pair:
    """Two episodes at one task, of which the first is preferred."""

    chosen: Trajectory
    rejected: Trajectory


def pairs_of(groups: Sequence[Group], margin: float = 0.0) -> list[Pair]:
    """The best against the worst attempt of each group that differ in reward, by `margin` at least.

    Among equals it is the earlier attempt. One that failed, or never said anything, is in no pair.
    """
    pairs: list[Pair] = []
    for group in groups:
        scored = [
            (trajectory.reward, trajectory)
            for trajectory in group.trainable
            if trajectory.reward is not None and any(action.tokens for action in trajectory.actions)
        ]
        if not scored:
            continue
        best = max(scored, key=lambda pair: pair[0])
        worst = min(scored, key=lambda pair: pair[0])
        if best[0] > worst[0] and best[0] - worst[0] >= margin:
            pairs.append(Pair(best[1], worst[1]))
    return pairs


def read_pairs(path: Path) -> list[tuple[Conversation, Conversation]]:
    """The (chosen, rejected) conversations of a .jsonl file; a `prompt` is what both begin with."""
    pairs: list[tuple[Conversation, Conversation]] = []
    for number, line in numbered_lines(path):
        try:
            given = json.loads(line)
            chosen, rejected = (
                _after(given.get("prompt"), [Message.parse(message) for message in given[side]])
                for side in ("chosen", "rejected")
            )
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ConfigError(
                f'{path}, line {number}, is not a pair {{"chosen": [messages], "rejected": [messages]}}: '
                f"{type(error).__name__}: {error}"
            ) from None
        try:
            _check_pair(chosen, rejected)
        except ConfigError as error:
            raise ConfigError(f"{path}, line {number}: {error}") from None
        pairs.append((chosen, rejected))
    return pairs


def _after(prompt: Any, side: list[Message]) -> list[Message]:
    """A side of a pair with its prompt, which is text or messages, and in many files stands in both places."""
    if isinstance(prompt, str):
        asked = [Message("user", prompt)] if side and side[0].role == "assistant" else []
    else:
        asked = [Message.parse(message) for message in prompt or ()]
    return side if side[: len(asked)] == asked else [*asked, *side]


def _check_pair(chosen: Conversation, rejected: Conversation) -> None:
    check_conversation(chosen)
    check_conversation(rejected)
    if _asked(chosen) != _asked(rejected):
        raise ConfigError(
            "what was chosen answers another question than what was rejected: up to the assistant's first "
            "message both must be the same"
        )


def _asked(conversation: Conversation) -> list[Message]:
    """What stands before the assistant's first message."""
    return list(takewhile(lambda message: message.role != "assistant", conversation))


def pair_of(
    chosen: Conversation, rejected: Conversation, renderer: Renderer, tools: Sequence[ToolSpec] = ()
) -> Pair:
    """A given pair, in which the assistant's messages are what is preferred or not."""
    return Pair(trajectory_of(chosen, renderer, tools), trajectory_of(rejected, renderer, tools))


def says_the_same(pair: Pair) -> bool:
    """Whether there is nothing to prefer: the gradients of the two sides cancel."""
    chosen, rejected = ([row.tokens for row in rows_of([side])] for side in (pair.chosen, pair.rejected))
    return chosen == rejected


def prefer(
    learner: Learner, pairs: Sequence[Pair], reference: nn.Module, beta: float
) -> dict[str, float]:
    """One step on these pairs; without pairs nothing happens, and there is nothing to tell.

    Of the metrics, `accuracy` is the share of pairs that the policy already ranks as wanted, against the
    reference, and `margin` the mean of beta times the margin.
    """
    if not pairs:
        return {}
    rows = rows_of([side for pair in pairs for side in (pair.chosen, pair.rejected)])
    said_T = flags(row.action_mask for row in rows)
    budget, temperature = learner.config.micro_batch_tokens, learner.temperature
    own_T = logprobs_of(learner.model, rows, said_T, temperature, budget)
    reference_T = logprobs_of(reference, rows, said_T, temperature, budget)
    trajectory_T = owners(rows)
    # in float64: sums over long episodes are large, and their small differences are what counts
    distance_T = own_T.double() - reference_T.double()
    distance_N = torch.zeros(2 * len(pairs), dtype=torch.float64).index_add(0, trajectory_T, distance_T)
    margin_P = beta * (distance_N[0::2] - distance_N[1::2])
    push_P = (beta * torch.sigmoid(-margin_P)).float()
    push_N = torch.stack([push_P, -push_P], dim=1).flatten()
    metrics = _push(learner, rows, push_N[trajectory_T], len(pairs))
    return metrics | {
        "loss": float(-logsigmoid(margin_P).mean()),
        "accuracy": float((margin_P > 0).double().mean()),
        "margin": float(margin_P.mean()),
    }


def _push(learner: Learner, rows: Sequence[Row], push_T: Tensor, pairs: int) -> dict[str, float]:
    weights_T = torch.full_like(push_T, 1 / pairs)
    columns = Columns.of(rows, push_T, weights_T)

    def objective(logprobs_A: Tensor, entropy_A: Tensor, pack: Pack) -> tuple[Tensor, dict[str, Tensor]]:
        return -pack.advantages_A * logprobs_A, {}

    budget = learner.tokens_of_a_pass(len(row.tokens) for row in rows)
    return learner.step(packs_of(rows, columns, budget), objective)
