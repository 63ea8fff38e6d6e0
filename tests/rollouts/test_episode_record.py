"""Property tests: whatever is said and answered, the record is exact, and the budgets hold."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_parts import assert_exact, called, fake, play_one, renderer, rollout

from ludus.core import (
    Fault,
    FinishReason,
    Message,
    Segment,
    SegmentKind,
    StopReason,
    Task,
    ToolCall,
    ToolContext,
    ToolResult,
    ToolSpec,
    Trajectory,
)
from ludus.rollouts import Rollout

FORMATS = ("hermes", "llama3", "tags", "fenced", "react", "plain")
ONE_CALL_FORMATS = ("react", "plain")
SPEC = ToolSpec(
    "echo",
    "Say it again.",
    {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
)

fragments = st.sampled_from(
    [
        "<|im_end|>",
        "<|eot_id|>",
        "<tool_call>",
        "</tool_call>",
        "</result>",
        "\n",
        "\n```\n",
        "é",
        "🦊",
        "a  B",
    ]
)
texts = st.lists(st.one_of(fragments, st.text(max_size=8)), max_size=5).map("".join)
words = st.text("abcvxz 019", min_size=1, max_size=12).filter(str.strip)
results = st.builds(
    ToolResult,
    content=st.one_of(texts, st.just("long " * 200)),
    reward=st.none() | st.integers(-2, 2).map(float),
    terminated=st.sampled_from([False] * 11 + [True]),
    fault=st.sampled_from([None, None, Fault.TOOL_RAISED, Fault.BAD_ARGUMENTS]),
)


class ScriptedTools:
    """Answers each call of `echo` with the next result, and remembers which call got which."""

    def __init__(self, answers: Sequence[ToolResult]) -> None:
        self.answers = list(answers)
        self.given: dict[str, ToolResult] = {}

    async def open(self, context: ToolContext) -> None:
        pass

    async def list(self, context: ToolContext) -> Sequence[ToolSpec]:
        return [SPEC]

    async def call(self, call: ToolCall, context: ToolContext) -> ToolResult:
        assert call.id not in self.given, "two calls have one id"
        self.given[call.id] = self.answers[len(self.given) % len(self.answers)]
        return self.given[call.id]

    async def close(self, context: ToolContext) -> None:
        pass


@st.composite
def replies(draw: st.DrawFn, tokenizer_name: str, format: str) -> str | list[int]:
    """What a model may say: calls, broken calls, answers, noise; with or without an end of turn."""
    by = renderer(tokenizer_name, format)
    bound = by.bound([SPEC]).format
    most = 1 if format in ONE_CALL_FORMATS else 4
    names = st.sampled_from(["echo"] * 5 + ["nothing"])
    made = st.lists(
        st.builds(ToolCall, names, st.fixed_dictionaries({"text": words})), min_size=1, max_size=most
    )
    match draw(st.sampled_from(["calls"] * 8 + ["broken", "broken", "answer", "noise", "tokens"])):
        case "calls":
            said = bound.render_action(draw(st.just("") | words), draw(made))
        case "broken":
            whole = bound.render_action("", draw(made))
            said = whole[: draw(st.integers(0, len(whole)))]
        case "answer":
            said = bound.render_action(draw(words))
        case "noise":
            said = draw(texts)
        case _:
            size = by.tokenizer.vocabulary_size
            return draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=30))
    return by.tokenizer.encode(said) or [0] if draw(st.sampled_from([False] * 5 + [True])) else said


@st.composite
def conversations(draw: st.DrawFn) -> Task:
    system = [Message("system", draw(texts))] if draw(st.booleans()) else []
    earlier = [
        message
        for _ in range(draw(st.integers(0, 2)))
        for message in (Message("user", draw(texts)), Message("assistant", draw(words)))
    ]
    return Task.of([*system, *earlier, Message("user", draw(texts))], id="t")


@st.composite
def episodes(draw: st.DrawFn) -> tuple[Rollout, ScriptedTools, Task]:
    name, format = (
        draw(st.sampled_from(["bytes", "lossy", "chatml", "llama3"])),
        draw(st.sampled_from(FORMATS)),
    )
    said = draw(st.lists(replies(name, format), min_size=3, max_size=7))
    answers = ScriptedTools(draw(st.lists(results, min_size=1, max_size=6)))
    budgets = {
        "max_turns": draw(st.sampled_from([6, 5, 4, 2, 1])),
        "max_turn_tokens": draw(st.sampled_from([400, 400, 400, 60, 3])),
        "max_observation_tokens": draw(st.sampled_from([16, 60, 2000])),
        "max_tokens": draw(st.sampled_from([20_000, 20_000, 1500, 600])),
        "max_calls": draw(st.integers(1, 4)),
        "remind": draw(st.booleans()),
    }
    by = renderer(name, format)
    endless = said * budgets["max_turns"]
    playing = rollout(endless, tools=answers, budgets=budgets, rendered_by=by)
    return playing, answers, draw(conversations())


@settings(max_examples=2 * settings.default.max_examples)
@given(episodes())
def test_the_record_is_exact_and_the_budgets_hold(drawn: tuple[Rollout, ScriptedTools, Task]) -> None:
    playing, tools, task = drawn
    budgets = playing.budgets
    trajectory = asyncio.run(play_one(playing, task))

    assert trajectory.failure is None and trajectory.is_trainable
    assert_exact(trajectory, fake(playing))
    assert trajectory.turns == len(fake(playing).calls) <= budgets.max_turns
    assert all(len(action.tokens) <= budgets.max_turn_tokens for action in trajectory.actions)
    assert all(len(sequence) <= budgets.max_tokens for sequence in trajectory.sequences)
    assert trajectory.sequences[0].segments[-1:] == trajectory.actions[-1:], "nobody read the end"

    for action in trajectory.actions:
        expected = expected_results(action, tools, budgets.max_calls)
        assert action.faults == tuple(r.fault for r in expected if r.fault is not None)
        paid = [r.reward for r in expected if r.reward is not None]
        assert action.reward == (sum(paid) if paid else None)
    check_ending(trajectory, tools, budgets.max_turns)
    if budgets.remind:
        check_reminders(trajectory, budgets.max_turns)


def expected_results(action: Segment, tools: ScriptedTools, most: int) -> list[ToolResult]:
    """What an action's calls must have led to, in order."""
    if action.finish is FinishReason.LENGTH and all(call.fault for call in action.calls):
        return []  # it was cut before it said anything complete
    found: list[ToolResult] = []
    for index, call in enumerate(action.calls):
        if index >= most:
            found.append(ToolResult("", fault=Fault.LIMIT))
        elif call.fault is not None or call.name != SPEC.name:
            found.append(ToolResult("", fault=call.fault or Fault.UNKNOWN_TOOL))
        else:
            found.append(tools.given[call.id])
    return found


def check_ending(trajectory: Trajectory, tools: ScriptedTools, max_turns: int) -> None:
    last = trajectory.actions[-1] if trajectory.actions else None
    ended = [tools.given[c.id].terminated for c in last.calls if c.id in tools.given] if last else []
    match trajectory.stop:
        case StopReason.TERMINATED:
            assert any(ended)
        case StopReason.ANSWERED:
            assert last is not None and not last.calls and trajectory.answer is not None
            assert last.finish is not FinishReason.LENGTH
        case StopReason.MAX_TURNS:
            assert trajectory.turns == max_turns and not any(ended)
        case StopReason.MAX_TOKENS:
            assert not any(ended)
        case other:
            raise AssertionError(f"an episode cannot end by {other}")
    earlier = [c.id for action in trajectory.actions[:-1] for c in action.calls]
    assert not any(tools.given[i].terminated for i in earlier if i in tools.given), "it went on"


def check_reminders(trajectory: Trajectory, max_turns: int) -> None:
    """Each action that follows something new follows a reminder of the turns that were left then."""
    turn = 0
    for before, message in pairwise(trajectory.messages[len(trajectory.task.messages) - 1 :]):
        if message.role == "assistant":
            left = max_turns - turn
            if before.role != "assistant":
                assert before.content.endswith(f"[{left} turn{'' if left == 1 else 's'} left]")
            turn += 1
    assert turn == trajectory.turns


@given(st.data(), st.sampled_from(["keep", "split"]))
def test_a_template_that_forgets_thoughts(data: st.DataObject, history: Any) -> None:
    """Splitting gives one row for each rewritten history; keeping gives one row, as it was generated."""
    thoughts = data.draw(st.lists(st.just("") | words, min_size=1, max_size=4))
    said = [
        (f"<think>{thought}</think>" if thought else "") + called("echo", text="hi")
        for thought in thoughts
    ]
    by = renderer("forgetful", "hermes", history)
    tools = ScriptedTools([ToolResult("heard")])
    playing = rollout([*said, "done"], tools=tools, rendered_by=by)
    trajectory = asyncio.run(play_one(playing))
    assert trajectory.stop is StopReason.ANSWERED
    assert_exact(trajectory, fake(playing))
    rewritten = sum(map(bool, thoughts))
    assert len(trajectory.sequences) == (1 + rewritten if history == "split" else 1)
    for sequence in trajectory.sequences:
        kinds = [segment.kind for segment in sequence.segments]
        assert kinds[0] is SegmentKind.PROMPT
        assert SegmentKind.PROMPT not in kinds[1:]
    shown = [by.tokenizer.decode(s.segments[0].tokens) for s in trajectory.sequences]
    assert not any("<think>" in prompt for prompt in shown)


@pytest.mark.parametrize("name", ["bytes", "lossy", "chatml", "llama3"])
def test_tokens_that_nobody_would_encode_stay(name: str) -> None:
    """A spelling that no tokenizer would choose, and bytes that are no text, stay as they were sampled."""
    by = renderer(name)
    end = by.tokenizer.stop_tokens[-1]
    opening, closing = (by.tokenizer.controls[t] for t in ("<tool_call>", "</tool_call>"))
    pieces = ["x v", '{"name": "echo", "argu', 'ments": {"te', 'xt": "t', 'ext"', "}", "}"]
    spelled = [by.tokenizer.encode(piece) for piece in pieces]
    odd = [200, 201, *spelled[0], opening, *(t for piece in spelled[1:] for t in piece), closing, end]
    playing = rollout([odd, "done"], tools=ScriptedTools([ToolResult("\nheard")]), rendered_by=by)
    trajectory = asyncio.run(play_one(playing))
    assert trajectory.actions[0].tokens == odd
    assert [call.name for call in trajectory.calls] == ["echo"]
    assert_exact(trajectory, fake(playing))
    decoded = by.tokenizer.decode(odd)
    assert by.tokenizer.encode(decoded) != odd, "the case is only a case where the round trip is lossy"


def test_an_end_of_turn_that_we_add_is_no_action() -> None:
    """After a stop string the model has not ended its turn: we do, and that token is observation."""
    by = renderer("bytes", "tags")
    tools = ScriptedTools([ToolResult("heard")])
    playing = rollout(["<echo>hi</echo> and more", "<answer>ok</answer>"], tools=tools, rendered_by=by)
    trajectory = asyncio.run(play_one(playing))
    end = by.tokenizer.stop_tokens[0]
    first, observation = trajectory.sequences[0].segments[1:3]
    assert first.finish is FinishReason.STOP_STRING and first.tokens[-1] != end
    assert by.tokenizer.decode(first.tokens) == "<echo>hi</echo>"
    assert observation.kind is SegmentKind.OBSERVATION and observation.tokens[0] == end
    assert trajectory.answer == "ok"
    assert_exact(trajectory, fake(playing))
