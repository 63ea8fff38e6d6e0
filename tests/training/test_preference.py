"""DPO: the textbook's loss and gradient, whatever the micro-batches; which pairs are made, and from what."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
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

from ludus.chat import Renderer, load_format
from ludus.core import (
    Boundary,
    ByteTokenizer,
    ConfigError,
    Failure,
    Group,
    Message,
    SegmentKind,
    StopReason,
    TokenSequence,
    ToolCall,
    Trajectory,
)
from ludus.training import (
    PreferenceConfig,
    frozen,
    read_conversations,
    read_labelled,
    read_pairs,
    trajectory_of,
)
from ludus.training.data.conversations import parse_conversations
from ludus.training.stages.preference import Pair, labelled_of, pairs_of, read_preferences
from played_steps import prefer

BETA = 0.3


def said_logprob(model: nn.Module, trajectory: Trajectory) -> Tensor:
    """The sum over what was said, row by row with the prefix in front."""
    total = torch.zeros(())
    for index, sequence in enumerate(trajectory.sequences):
        prefix = _prefix(trajectory, index)
        logprobs = row_logprobs(model, prefix + sequence.tokens)[len(prefix) :]
        total = total + logprobs[torch.tensor(sequence.action_mask)].sum()
    return total


def _prefix(trajectory: Trajectory, index: int) -> list[int]:
    """The tokens that a sequence shares with its ancestors, in reading order."""
    parent = trajectory.sequences[index].parent
    if parent is None:
        return []
    shared = trajectory.sequences[parent[0]].segments[: parent[1] + 1]
    return _prefix(trajectory, parent[0]) + [token for segment in shared for token in segment.tokens]


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
    metrics = prefer(
        tiny_learner(model, budget), pairs, reference, PreferenceConfig(loss={"beta": BETA})
    )
    assert_same_gradient(model, expected)
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert metrics["margin"] == pytest.approx(BETA * sum(margins) / len(margins), rel=1e-3, abs=1e-4)
    assert metrics["accuracy"] == sum(m > 0 for m in margins) / len(margins)
    assert all(parameter.grad is None for parameter in reference.parameters())


def tokens_said(trajectory: Trajectory) -> int:
    return sum(len(action.tokens) for action in trajectory.actions)


def with_answer_of(asked: Trajectory, answered: Trajectory) -> tuple[list[int], int]:
    """The tokens of one prompt and the other answer, and where the answer begins."""
    prompt = asked.tokens[: asked.action_mask.index(True)]
    return [*prompt, *answered.tokens[answered.action_mask.index(True) :]], len(prompt)


def paper_loss(
    name: str, model: nn.Module, reference: nn.Module, pairs: list[Pair], config: PreferenceConfig
) -> Tensor:
    """The papers' formulas as TRL has them, through one graph."""
    beta = config.loss.beta or 0.0
    if name == "kto":
        chosen = [(pair.chosen, True) for pair in pairs]
        episodes = [*chosen, *((pair.rejected, False) for pair in pairs)]
        ratios = [said_logprob(model, t) - said_logprob(reference, t) for t, _ in episodes]
        crossed = []
        for place, (asked, _) in enumerate(episodes):
            answered = episodes[(place + 1) % len(episodes)][0]
            tokens, start = with_answer_of(asked, answered)
            mask = answered.action_mask[answered.action_mask.index(True) :]
            gap = row_logprobs(model, tokens) - row_logprobs(reference, tokens)
            crossed.append(gap[start:][torch.tensor(mask)].sum().item())
        z0 = max(0.0, sum(crossed) / len(crossed))
        losses = [
            config.loss.desirable_weight * (1 - torch.sigmoid(beta * (ratio - z0)))
            if good
            else config.loss.undesirable_weight * (1 - torch.sigmoid(beta * (z0 - ratio)))
            for ratio, (_, good) in zip(ratios, episodes, strict=True)
        ]
        return torch.stack(losses).mean()
    losses = []
    for pair in pairs:
        long, short = tokens_said(pair.chosen), tokens_said(pair.rejected)
        won, lost = said_logprob(model, pair.chosen) / long, said_logprob(model, pair.rejected) / short
        if name == "simpo":
            losses.append(-logsigmoid(beta * (won - lost - config.loss.gamma / beta)))
            continue
        won = won - said_logprob(reference, pair.chosen) / long
        lost = lost - said_logprob(reference, pair.rejected) / short
        losses.append((won - lost - 1 / (2 * beta)) ** 2)
    return torch.stack(losses).mean()


@pytest.mark.parametrize("budget", [40, 1000])
@pytest.mark.parametrize("name", ["ipo", "simpo", "kto"])
def test_the_gradients_of_the_other_losses_are_their_papers(name: str, budget: int) -> None:
    own = {"simpo": {"gamma": 0.7}, "kto": {"desirable_weight": 1.5, "undesirable_weight": 0.5}}
    config = PreferenceConfig.parse({"loss": {"name": name, "beta": BETA, **own.get(name, {})}})
    model, reference = tiny_model(), frozen(tiny_model(seed=1))
    pairs = pairs_of(played(model, seed=1).groups)
    runner, far = plain(model), plain(reference)
    loss = paper_loss(name, runner, far, pairs, config)
    loss.backward()
    expected = [p.grad for p in runner.parameters() if p.grad is not None]
    given = labelled_of(pairs) if name == "kto" else pairs
    needed = None if name == "simpo" else reference
    metrics = prefer(tiny_learner(model, budget), given, needed, config)
    assert_same_gradient(model, expected)
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert (metrics.get("reference_point", 0.0) > 0) == (name == "kto")


def test_kto_has_no_reference_point_from_one_task_alone() -> None:
    """z0 pairs prompts with answers to others; of a single pair there are none."""
    model, reference = tiny_model(), frozen(tiny_model(seed=1))
    config = PreferenceConfig.parse({"loss": "kto"})
    for pair in pairs_of(played(model, seed=1).groups):
        metrics = prefer(tiny_learner(model), labelled_of([pair]), reference, config)
        assert metrics["reference_point"] == 0.0


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"loss": {"gamma": 0.5}}, 'a setting of the loss "simpo"'),
        ({"loss": {"name": "simpo", "desirable_weight": 2.0}}, 'a setting of the loss "kto"'),
        ({"loss": "kto", "pairs": "x.jsonl", "batch": 1}, "at least 2"),
        ({"columns": {"chosen": "x"}}, "pairs names none"),
        ({"loss": "orpo"}, "must be 'dpo', 'ipo', 'simpo' or 'kto'"),
    ],
)
def test_settings_of_another_loss_are_refused(given: dict[str, object], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        PreferenceConfig.parse(given)


@pytest.mark.parametrize("label", [True, False])
def test_labels_of_one_kind_alone_are_refused(tmp_path: Path, label: bool) -> None:
    rows = [{"prompt": "go", "completion": text, "label": label} for text in ("a", "b")]
    (tmp_path / "answers.jsonl").write_text("\n".join(map(json.dumps, rows)))
    config = PreferenceConfig.parse({"loss": "kto", "pairs": str(tmp_path / "answers.jsonl")})
    with pytest.raises(ConfigError, match=f"all 2 answers have the label {str(label).lower()}"):
        read_preferences(config)
    rows.append({"prompt": "go", "completion": "c", "label": not label})
    (tmp_path / "answers.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert len(read_preferences(config)) == 3


def test_preferring_widens_the_margin() -> None:
    model = tiny_model()
    reference = frozen(tiny_model())
    pairs = pairs_of(played(model, seed=1).groups)
    learner = tiny_learner(model, learning_rate=5e-3)
    history = [prefer(learner, pairs, reference, PreferenceConfig()) for _ in range(10)]
    assert history[0]["loss"] == pytest.approx(math.log(2), rel=1e-4)
    assert history[0]["margin"] == pytest.approx(0.0, abs=1e-4)
    assert history[-1]["loss"] < history[0]["loss"]
    assert history[-1]["accuracy"] == 1.0


def test_no_pairs_change_nothing() -> None:
    learner = tiny_learner(tiny_model())
    assert prefer(learner, [], learner.model, PreferenceConfig()) == {}
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
    renderer = Renderer(tokenizer, load_format("hermes"))
    pair = Pair(*(trajectory_of(side, renderer, []) for side in (chosen, rejected)))
    texts = [tokenizer.decode(side.actions[0].tokens) for side in (pair.chosen, pair.rejected)]
    assert [text[0] for text in texts] == ["5", "6"]


SHARED = [Message("user", "2+3?")]
GOOD, BAD = [*SHARED, Message("assistant", "5")], [*SHARED, Message("assistant", "6")]
SAID = {
    "chosen": {"role": "assistant", "content": "5"},
    "rejected": {"role": "assistant", "content": "6"},
}


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "2+3?", "chosen": "5", "rejected": "6"},
        {"prompt": "2+3?", **SAID},
        {"prompt": [{"from": "human", "value": "2+3?"}], "chosen": "5", "rejected": "6"},
        {
            "chosen": [{"from": "human", "value": "2+3?"}, {"from": "gpt", "value": "5"}],
            "rejected": [{"from": "human", "value": "2+3?"}, {"from": "gpt", "value": "6"}],
        },
    ],
)
@pytest.mark.parametrize("suffix", ["jsonl", "json", "parquet"])
def test_pairs_in_the_forms_that_people_have(
    row: dict[str, object], suffix: str, tmp_path: Path
) -> None:
    source = tmp_path / f"pairs.{suffix}"
    if suffix == "parquet":
        pq.write_table(pa.Table.from_pylist([row]), source)
    else:
        source.write_text(json.dumps([row] if suffix == "json" else row), encoding="utf-8")
    assert read_pairs(source) == [(GOOD, BAD)]
    assert read_labelled(source) == [(GOOD, True), (BAD, False)]


CALL = {"name": "add", "arguments": {"a": 2, "b": 3}}


@pytest.mark.parametrize(
    ("row", "roles"),
    [
        ({"messages": [{"role": "user", "content": "2+3?"}, SAID["chosen"]]}, "ua"),
        ({"prompt": "2+3?", "completion": "5"}, "ua"),
        ({"prompt": [{"role": "user", "content": "2+3?"}], "completion": [SAID["chosen"]]}, "ua"),
        (
            {
                "system": "Add.",
                "conversations": [
                    {"from": "human", "value": "2+3?", "weight": None},
                    {"from": "function_call", "value": json.dumps(CALL)},
                    {"from": "observation", "value": "5"},
                    {"from": "gpt", "value": "5"},
                ],
            },
            "suata",
        ),
        (
            {"conversations": [{"from": "user", "value": "2+3?"}, {"from": "assistant", "value": "5"}]},
            "ua",
        ),
    ],
)
def test_conversations_in_the_forms_that_people_have(
    row: dict[str, object], roles: str, tmp_path: Path
) -> None:
    (tmp_path / "shown.json").write_text(json.dumps([row]))
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "shown.parquet")
    for name in ("shown.json", "shown.parquet"):
        (shown,) = read_conversations(tmp_path / name)
        assert "".join(message.role[0] for message in shown) == roles
        assert shown[-1] == Message("assistant", "5")
        calls = [call for message in shown for call in message.tool_calls]
        assert calls == ([ToolCall("add", {"a": 2, "b": 3})] if len(roles) == 5 else [])
    assert parse_conversations([row]) == [shown]


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"text": "2+3?"}, "there is no 'messages'; it has: text"),
        ({"prompt": "2+3?"}, "there is no 'completion'; it has: prompt"),
        (
            {"prompt": "?", "completion": "5", "messages": [SAID["rejected"]]},
            "it has 'messages', and 'prompt'",
        ),
        (
            {"conversations": [{"from": "robot", "value": "?"}]},
            "shown.jsonl, line 1, .*role must be .*tool .*human, gpt, .*not 'robot'",
        ),
        ({"messages": [{"role": "robot", "content": "?"}]}, "line 1, .*assistant or tool, not 'robot'"),
        ({"conversations": [{"from": "function_call", "value": "add"}]}, "function_call is not JSON"),
        ({"prompt": "2+3?", "completion": 5}, "line 1, is not a conversation"),
        ({"prompt": "2+3?", "completion": ""}, "line 1, is not a conversation .* the answer is empty"),
        ({"prompt": "2+3?", "completion": [{"role": "assistant", "content": " "}]}, "line 1.* is empty"),
    ],
)
def test_a_row_that_is_no_conversation_is_named(
    row: dict[str, object], problem: str, tmp_path: Path
) -> None:
    (tmp_path / "shown.jsonl").write_text(json.dumps(row))
    with pytest.raises(ConfigError, match=problem):
        read_conversations(tmp_path / "shown.jsonl")


def test_answers_with_a_label(tmp_path: Path) -> None:
    source = tmp_path / "labels.jsonl"
    rows = [
        {"prompt": "2+3?", "completion": "5", "label": True},
        {"messages": [{"role": "user", "content": "2+3?"}, SAID["rejected"]], "label": False},
    ]
    source.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    assert read_labelled(source) == [(GOOD, True), (BAD, False)]
    source.write_text(json.dumps({**rows[0], "label": "good"}), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"line 1, is not an answer .* true or false, not 'good'"):
        read_labelled(source)
    source.write_text(json.dumps({**rows[0], "completion": "", "label": False}), encoding="utf-8")
    assert read_labelled(source)[0][0][-1].content == "", "to say nothing may be the bad answer"
    source.write_text(json.dumps({**rows[0], "completion": ""}), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"line 1, is not an answer .* the answer is empty"):
        read_labelled(source)


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
    with pytest.raises(ConfigError, match="there is no file"):
        read_pairs(tmp_path / "missing.jsonl")


@pytest.mark.parametrize("row", ["3", "null", "[1]", '"x"', '{"messages": ["x"]}', '{"messages": null}'])
@pytest.mark.parametrize("read", [read_conversations, read_pairs])
def test_rows_that_are_none_are_told_without_the_words_of_the_interpreter(
    row: str, read: Callable[[Path], Any], tmp_path: Path
) -> None:
    (tmp_path / "rows.jsonl").write_text(row + "\n")
    with pytest.raises(ConfigError) as caught:
        read(tmp_path / "rows.jsonl")
    said = str(caught.value)
    assert "rows.jsonl, line 1" in said
    assert not re.search(r"Error|object|subscript|indices|iterable|attribute", said), said
