"""DPO: the textbook's loss and gradient, whatever the micro-batches; which pairs are made, and from what."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from ragged_episodes import (
    assert_same_gradient,
    plain,
    played,
    row_logprobs,
    scored,
    tiny_learner,
    tiny_model,
)
from torch import Tensor, nn
from torch.nn.functional import logsigmoid

from ludus.core.failures import Boundary, ConfigError, Failure
from ludus.core.messages import Message
from ludus.core.tokenizer import ByteTokenizer
from ludus.core.trajectory import Group, SegmentKind, StopReason, TokenSequence, Trajectory
from ludus.rollouts.formats import load_format
from ludus.rollouts.renderers import Renderer
from ludus.training.imitation import read_conversations
from ludus.training.learner import frozen
from ludus.training.preference import Pair, pair_of, pairs_of, prefer, read_pairs

BETA = 0.3


def said_logprob(model: nn.Module, trajectory: Trajectory) -> Tensor:
    """The sum over what was said, row by row with the prefix in front."""
    total = torch.zeros(())
    for index, sequence in enumerate(trajectory.sequences):
        prefix = trajectory.prefix_tokens(index)
        logprobs = row_logprobs(model, prefix + sequence.tokens)[len(prefix) :]
        total = total + logprobs[torch.tensor(sequence.action_mask)].sum()
    return total


def textbook(model: nn.Module, reference: nn.Module, pairs: list[Pair]) -> tuple[Tensor, list[float]]:
    margins = [
        said_logprob(model, pair.chosen)
        - said_logprob(reference, pair.chosen)
        - said_logprob(model, pair.rejected)
        + said_logprob(reference, pair.rejected)
        for pair in pairs
    ]
    loss = torch.stack([-logsigmoid(BETA * margin) for margin in margins]).mean()
    return loss, [margin.item() for margin in margins]


@pytest.mark.parametrize("budget", [1, 40, 1000])
def test_the_gradient_is_the_textbooks(budget: int) -> None:
    model, reference = tiny_model(), frozen(tiny_model(seed=1))
    given = played(model, seed=1)
    pairs = pairs_of(given.groups)
    assert len(pairs) > 1
    side = pairs[0].chosen
    branch = [s for s in side.sequences[0].segments if s.kind is SegmentKind.ACTION][:1]
    side.sequences.append(TokenSequence(branch, parent=(0, 0)))  # an episode of two rows
    runner, far = plain(model), plain(reference)
    loss, margins = textbook(runner, far, pairs)
    loss.backward()
    expected = [p.grad for p in runner.parameters() if p.grad is not None]
    metrics = prefer(tiny_learner(model, budget), pairs, reference, BETA)
    assert_same_gradient(model, expected)
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert metrics["margin"] == pytest.approx(BETA * sum(margins) / len(margins), rel=1e-3, abs=1e-4)
    assert metrics["accuracy"] == sum(m > 0 for m in margins) / len(margins)
    assert all(parameter.grad is None for parameter in reference.parameters())


def test_preferring_widens_the_margin() -> None:
    model = tiny_model()
    reference = frozen(tiny_model())
    pairs = pairs_of(played(model, seed=1).groups)
    learner = tiny_learner(model, learning_rate=5e-3)
    history = [prefer(learner, pairs, reference, 0.1) for _ in range(10)]
    assert history[0]["loss"] == pytest.approx(math.log(2), rel=1e-4)
    assert history[0]["margin"] == pytest.approx(0.0, abs=1e-4)
    assert history[-1]["loss"] < history[0]["loss"]
    assert history[-1]["accuracy"] == 1.0


def test_no_pairs_change_nothing() -> None:
    learner = tiny_learner(tiny_model())
    assert prefer(learner, [], learner.model, 0.1) == {}
    assert learner.steps_done == 0


def group_with(rewards: list[float | None]) -> Group:
    trajectories = scored(played(tiny_model(), seed=1, groups=3))[: len(rewards)]
    for trajectory, reward in zip(trajectories, rewards, strict=True):
        trajectory.reward = reward
    return Group(trajectories[0].task, trajectories)


def test_the_best_is_preferred_to_the_worst() -> None:
    group = group_with([0.5, 1.0, 0.0, 1.0, 0.0])
    (pair,) = pairs_of([group])
    assert pair.chosen is group.trajectories[1], "the earlier of equals"
    assert pair.rejected is group.trajectories[2], "the earlier of equals"


@pytest.mark.parametrize(("margin", "found"), [(0.0, 1), (0.5, 1), (0.6, 0)])
def test_the_margin_is_the_least_difference(margin: float, found: int) -> None:
    assert len(pairs_of([group_with([0.5, 1.0])], margin)) == found


def test_equal_or_failed_attempts_are_no_pair() -> None:
    assert pairs_of([group_with([1.0, 1.0]), group_with([1.0]), group_with([1.0, None])]) == []
    failed = group_with([1.0, 0.0])
    failed.trajectories[1].failure = Failure(Boundary.TOOL, "ConnectionError", "gone")
    failed.trajectories[1].stop = StopReason.FAILED
    assert pairs_of([failed]) == []
    silent = group_with([1.0, 0.0])
    segments = silent.trajectories[1].sequences[0].segments
    silent.trajectories[1].sequences[0].segments = segments[:1]
    assert pairs_of([silent]) == []


def test_given_pairs_become_episodes(tmp_path: Path) -> None:
    question = {"role": "user", "content": "2+3?"}
    given = [
        {
            "chosen": [question, {"role": "assistant", "content": "5"}],
            "rejected": [question, {"role": "assistant", "content": "6"}],
        }
    ]
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n".join(json.dumps(pair) for pair in given) + "\n\n", encoding="utf-8")
    apart = {side: messages[1:] for side, messages in given[0].items()} | {"prompt": [question]}
    (tmp_path / "apart.jsonl").write_text(json.dumps(apart), encoding="utf-8")
    assert read_pairs(path) == read_pairs(tmp_path / "apart.jsonl")
    for prompt in ("2+3?", [question], None):  # many files have it in both places
        path.write_text(json.dumps({**given[0], "prompt": prompt}), encoding="utf-8")
        assert read_pairs(path) == read_pairs(tmp_path / "apart.jsonl")
    (tmp_path / "text.jsonl").write_text(json.dumps({**apart, "prompt": "2+3?"}), encoding="utf-8")
    assert read_pairs(path) == read_pairs(tmp_path / "text.jsonl")
    ((chosen, rejected),) = read_pairs(path)
    assert chosen == [Message("user", "2+3?"), Message("assistant", "5")]
    tokenizer = ByteTokenizer()
    pair = pair_of(chosen, rejected, Renderer(tokenizer, load_format("hermes")))
    texts = [tokenizer.decode(side.actions[0].tokens) for side in (pair.chosen, pair.rejected)]
    assert [text[0] for text in texts] == ["5", "6"]


def test_sides_of_a_pair_answer_the_same_question(tmp_path: Path) -> None:
    brief, asked, other = (
        {"role": role, "content": text}
        for role, text in (("system", "Be brief."), ("user", "2+3?"), ("user", "2+4?"))
    )
    answer = {"role": "assistant", "content": "5"}
    path = tmp_path / "pairs.jsonl"
    for rejected, problem in (
        ([brief, asked, {**answer, "content": "6"}, other, answer], None),
        ([asked, answer], "answers another question"),
        ([brief, other, answer], "answers another question"),
        ([brief, asked, asked, answer], "answers another question"),
        ([brief, asked], "needs at least one message of the assistant's"),
        ([answer, brief, asked], "must not start with the assistant"),
    ):
        path.write_text(json.dumps({"chosen": [brief, asked, answer], "rejected": rejected}))
        if problem is None:
            assert len(read_pairs(path)) == 1
            continue
        with pytest.raises(ConfigError, match=f"line 1: .*{problem}"):
            read_pairs(path)


@pytest.mark.parametrize("start", ["", "\ufeff"])
def test_lines_end_where_json_lines_do(start: str, tmp_path: Path) -> None:
    text = "a\u2028b\u0085c\x0b"
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": text}]
    path = tmp_path / "given.jsonl"
    line = json.dumps(
        {"chosen": messages, "rejected": messages, "messages": messages}, ensure_ascii=False
    )
    path.write_text(f"{start}{line}\r\n\r\n{line}", encoding="utf-8")
    assert [pair[0][-1].content for pair in read_pairs(path)] == [text] * 2
    assert [shown[-1].content for shown in read_conversations(path)] == [text] * 2


@pytest.mark.parametrize(
    "line",
    [
        "nonsense",
        "[]",
        "3",
        '{"chosen": []}',
        '{"chosen": 3, "rejected": []}',
        '{"chosen": [1], "rejected": []}',
        '{"prompt": "2+3?", "chosen": [], "rejected": []}',
        '{"prompt": null, "chosen": [], "rejected": []}',
    ],
)
def test_a_broken_file_of_pairs_says_where(line: str, tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n" + line, encoding="utf-8")
    with pytest.raises(ConfigError, match="line 2"):
        read_pairs(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_pairs(tmp_path / "missing.jsonl")
