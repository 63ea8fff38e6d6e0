"""What stands in a given prompt is read, and only what follows it is learned, as in TRL."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from ragged_episodes import assert_same_gradient, plain, row_logprobs, tiny_learner
from torch import Tensor, nn
from torch.nn.functional import logsigmoid
from transformers import LlamaConfig, LlamaForCausalLM

from ludus.chat import Renderer, load_format
from ludus.cli.check.data import read_examples
from ludus.core import ByteTokenizer, ConfigError, Message, Segment, SegmentKind, StopReason, Task
from ludus.core.trajectory import TokenSequence, Trajectory
from ludus.model import use_ludus_attention
from ludus.observe import write_trajectories
from ludus.rewards.judges.comparisons import AttemptPair, PairVerdict, preference_row
from ludus.training import (
    PreferenceConfig,
    frozen,
    read_conversations,
    read_labelled,
    read_pairs,
    trajectory_of,
)
from ludus.training.data.conversations import Conversation, read_scored_steps
from ludus.training.stages.preference import Labelled, Pair
from ludus.viewer.labels import LabelStore
from played_steps import prefer, sft_step

TOKENIZER = ByteTokenizer()
RENDERER = Renderer(TOKENIZER, load_format("hermes"))
BETA = 0.3
TALK = [
    [("user", "2+3?"), ("assistant", "a long answer, which is 5"), ("user", "2+4?")],
    [("user", "9-1?"), ("assistant", "8"), ("user", "so?"), ("assistant", "eight"), ("user", "9-2?")],
]
ANSWERS = [("6", "seven"), ("7 it is", "8")]


def chat(said: list[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"role": role, "content": text} for role, text in said]


def byte_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=TOKENIZER.vocabulary_size,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        initializer_range=0.25,
    )
    model: nn.Module = LlamaForCausalLM(config)
    use_ludus_attention(model)
    return model


def written(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def pair_rows(*, apart: bool) -> list[dict[str, Any]]:
    """Rows with the prompt in a field of its own, or at the beginning of both sides."""
    rows = []
    for talk, sides in zip(TALK, ANSWERS, strict=True):
        said = [chat([("assistant", side)]) for side in sides]
        if not apart:
            said = [[*chat(talk), *one] for one in said]
        row = dict(zip(("chosen", "rejected"), said, strict=True))
        rows.append({"prompt": chat(talk), **row} if apart else row)
    return rows


def answer_of(model: nn.Module, talk: list[tuple[str, str]], answer: str) -> Tensor:
    """log p of each token of the answer alone, after the prompt as the chat template has it."""
    prompt = RENDERER.prompt([Message(role, text) for role, text in talk])  # type: ignore[arg-type]
    said = RENDERER.action_tokens(answer)
    return row_logprobs(model, [*prompt, *said])[len(prompt) :]


def reference_loss(name: str, policy: nn.Module, reference: nn.Module) -> Tensor:
    """TRL's formulas on the completions."""
    losses = []
    crossed = []
    for number, (talk, sides) in enumerate(zip(TALK, ANSWERS, strict=True)):
        won, lost = (answer_of(policy, talk, side) for side in sides)
        won_0, lost_0 = (answer_of(reference, talk, side).detach() for side in sides)
        if name == "simpo":
            losses.append(-logsigmoid(BETA * (won.mean() - lost.mean()) - 1.0))
        elif name == "ipo":
            gap = (won - won_0).mean() - (lost - lost_0).mean()
            losses.append((gap - 1 / (2 * BETA)) ** 2)
        elif name == "dpo":
            losses.append(-logsigmoid(BETA * ((won - won_0).sum() - (lost - lost_0).sum())))
        else:
            losses += [(won - won_0).sum(), -(lost - lost_0).sum()]
            for side in ANSWERS[1 - number]:
                gap = answer_of(policy, talk, side) - answer_of(reference, talk, side)
                crossed.append(gap.sum().item())
    if name != "kto":
        return torch.stack(losses).mean()
    # good, bad, good, bad: the next answer to another prompt is its neighbour's first, or the other's first
    z0 = max(0.0, (2 * crossed[0] + 2 * crossed[2]) / 4)
    signs = [1, -1, 1, -1]
    shifted = [
        1 - torch.sigmoid(BETA * (one - sign * z0)) for one, sign in zip(losses, signs, strict=True)
    ]
    return torch.stack(shifted).mean()


@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize("name", ["dpo", "ipo", "simpo", "kto"])
def test_a_preference_is_learned_on_the_answers_alone(name: str, apart: bool, tmp_path: Path) -> None:
    source = written(tmp_path / "pairs.jsonl", pair_rows(apart=apart))
    model, reference = byte_model(), frozen(byte_model(seed=1))
    runner, far = plain(model), plain(reference)
    loss = reference_loss(name, runner, far)
    loss.backward()
    given: list[Pair | Labelled] = (
        [Labelled(trajectory_of(one, RENDERER, []), good) for one, good in read_labelled(source)]
        if name == "kto"
        else [Pair(*(trajectory_of(one, RENDERER, []) for one in pair)) for pair in read_pairs(source)]
    )
    config = PreferenceConfig.parse({"loss": {"name": name, "beta": BETA}})
    metrics = prefer(tiny_learner(model, 2000), given, None if name == "simpo" else reference, config)
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert_same_gradient(model, [p.grad for p in runner.parameters() if p.grad is not None])


def test_sft_learns_the_completion_alone(tmp_path: Path) -> None:
    rows = [
        {"prompt": chat(talk), "completion": chat([("assistant", good)])}
        for talk, (good, _) in zip(TALK, ANSWERS, strict=True)
    ]
    shown = read_conversations(written(tmp_path / "shown.jsonl", rows))
    model = byte_model()
    runner = plain(model)
    said = [answer_of(runner, talk, good) for talk, (good, _) in zip(TALK, ANSWERS, strict=True)]
    loss = -torch.cat(said).mean()
    loss.backward()
    metrics = sft_step(tiny_learner(model, 2000), [trajectory_of(one, RENDERER, []) for one in shown])
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert_same_gradient(model, [p.grad for p in runner.parameters() if p.grad is not None])


def texts(conversation: Conversation) -> list[str]:
    return [TOKENIZER.decode(a.tokens) for a in trajectory_of(conversation, RENDERER, []).actions]


def test_which_messages_are_learned(tmp_path: Path) -> None:
    end = TOKENIZER.decode([RENDERER.end_of_turn]) if RENDERER.end_of_turn is not None else ""
    talk = chat(TALK[0])
    first = TALK[0][1][1]
    last = chat([("assistant", "6")])
    more = chat([("assistant", "6"), ("user", "sure?"), ("assistant", "yes")])
    for row, expected in [
        ({"messages": [*talk, *last]}, [first, "6"]),
        ({"prompt": talk, "completion": "6"}, ["6"]),
        ({"prompt": talk, "completion": more}, ["6", "yes"]),
        ({"prompt": talk, "completion": [*talk, *more]}, ["6", "yes"]),
        ({"prompt": talk[:2], "completion": [talk[2], *last]}, ["6"]),
        ({"prompt": talk[:2], "completion": "6"}, ["6"]),
        ({"prompt": "2+3?", "completion": [*talk, *last]}, [first, "6"]),
    ]:
        (shown,) = read_conversations(written(tmp_path / "row.jsonl", [row]))
        assert texts(shown) == [text + end for text in expected], row
    for sides, expected in [
        (([*talk, *last], [*talk, *more]), ["6", "yes"]),  # of which one begins the other
        (([*talk, *more], [*talk, *more]), ["yes"]),
    ]:
        row = {"chosen": sides[0], "rejected": sides[1]}
        ((_, rejected),) = read_pairs(written(tmp_path / "row.jsonl", [row]))
        assert texts(rejected) == [text + end for text in expected], row


def test_an_empty_completion_is_refused_whatever_the_prompt_says(tmp_path: Path) -> None:
    for answer in ("", [{"role": "user", "content": "and?"}]):
        source = written(tmp_path / "row.jsonl", [{"prompt": chat(TALK[0]), "completion": answer}])
        with pytest.raises(ConfigError, match=r"line 1.*(says nothing|at least one message)"):
            read_conversations(source)


def test_scores_are_those_of_the_completion(tmp_path: Path) -> None:
    row = {"prompt": chat(TALK[0]), "completion": "6", "scores": [0.5]}
    (found,) = read_scored_steps(written(tmp_path / "scores.jsonl", [row]))
    assert found.scores == (0.5,) and len(texts(found.messages)) == 1


def few_shot_episode(answer: str) -> Trajectory:
    """An episode of a task that brings an example with an assistant's message."""
    prompt = tuple(Message(role, text) for role, text in TALK[0])  # type: ignore[arg-type]
    said = RENDERER.action_tokens(answer)
    segments = [
        Segment(SegmentKind.PROMPT, RENDERER.prompt(prompt)),
        Segment(SegmentKind.ACTION, said, [0.0] * len(said), reward=1.0),
    ]
    return Trajectory(
        Task("few", prompt),
        [TokenSequence(segments)],
        [*prompt, Message("assistant", answer)],
        answer=answer,
        stop=StopReason.ANSWERED,
        reward=1.0,
    )


def test_what_a_task_lets_the_assistant_say_is_not_imitated(tmp_path: Path) -> None:
    played = few_shot_episode("<answer>6</answer>")
    write_trajectories(tmp_path / "episodes.parquet", [played])
    (shown,) = read_conversations(tmp_path / "episodes.parquet")
    again = trajectory_of(shown, RENDERER, [])
    assert (again.tokens, again.action_mask) == (played.tokens, played.action_mask)
    (steps,) = read_scored_steps(tmp_path / "episodes.parquet")
    assert steps.scores == (1.0,)


def test_labels_and_pairs_have_the_prompt_of_the_task(tmp_path: Path) -> None:
    good, bad = few_shot_episode("6"), few_shot_episode("7")
    place = {"run": "r", "file": "f", "row": 0}
    store = LabelStore(tmp_path)
    store.label(place, good, True)
    store.prefer((place, good), ({**place, "row": 1}, bad))
    ((labelled, _),) = read_labelled(tmp_path / "labels.jsonl")
    (imitated,) = read_conversations(tmp_path / "good.jsonl")
    ((chosen, _),) = read_pairs(tmp_path / "preferences.jsonl")
    row = preference_row(AttemptPair(good, bad), PairVerdict("first", {}, ""))
    assert row is not None
    ((judged, rejected),) = read_pairs(written(tmp_path / "judged.jsonl", [row]))
    for shown in (labelled, imitated, chosen, judged):
        assert trajectory_of(shown, RENDERER, []).action_mask == good.action_mask
    assert trajectory_of(rejected, RENDERER, []).action_mask == bad.action_mask


def test_check_data_reads_the_prompt_as_the_task(tmp_path: Path) -> None:
    row = {"prompt": chat(TALK[0]), "completion": "6"}
    (example,) = read_examples(written(tmp_path / "rows.jsonl", [row]))
    assert [message.content for message in example.task.messages] == [text for _, text in TALK[0]]


def test_prompts_are_rendered_as_a_task_is(tmp_path: Path) -> None:
    """As one prompt: a chat template may show an earlier turn otherwise than one that was just said."""
    row = {"prompt": chat(TALK[1]), "completion": "7"}
    (shown,) = read_conversations(written(tmp_path / "rows.jsonl", [row]))
    kinds = [segment.kind for segment in trajectory_of(shown, RENDERER, []).sequences[0].segments]
    assert kinds == [SegmentKind.PROMPT, SegmentKind.ACTION]
