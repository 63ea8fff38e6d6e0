"""The message tree: what clients echo finds the exact tokens, and what is something else becomes a branch."""

from __future__ import annotations

import json
from typing import Any

import pytest
import rollout_parts
from hypothesis import given
from hypothesis import strategies as st

from ludus.chat import Renderer, load_format
from ludus.core.failures import ConfigError
from ludus.core.generation import Sampling
from ludus.core.messages import Message, ToolCall, ToolSpec
from ludus.core.task import Task
from ludus.core.tokenizer import ByteTokenizer
from ludus.core.trajectory import SegmentKind, StopReason, Trajectory
from ludus.engine import FakeEngine
from ludus.rollouts.message_tree import MessageTree, message_key
from ludus.rollouts.recorder import Budgets, BudgetUsedUp, Recorder
from ludus.training.data.batch import Batch

ADD = ToolSpec("add", "Add two numbers.", {"type": "object", "properties": {"a": {}, "b": {}}})
CALL = '<tool_call>\n{"name": "add", "arguments": %s}\n</tool_call>'


def make_tree(
    replies: Any, *, turns: int = 64, tokens: int = 100_000, tokenizer: str = "bytes"
) -> tuple[MessageTree, FakeEngine]:
    known = rollout_parts.tokenizer(tokenizer)
    engine = FakeEngine(replies, known)
    renderer = Renderer(known, load_format("hermes"), "keep")
    limits = Budgets(max_turns=turns, max_turn_tokens=2_000, max_tokens=tokens)
    trajectory = Trajectory(Task("t"), seed=7)
    recorder = Recorder(trajectory, engine=engine, budgets=limits, sampling=Sampling(), session="e")
    return MessageTree(recorder, renderer), engine


async def turn(
    tree: MessageTree, messages: list[Message], tools: tuple[ToolSpec, ...] = (ADD,)
) -> Message:
    """Sample and record; the reply as a client would echo it at best."""
    sampled = await tree.sample(messages, tools)
    tree.commit(sampled)
    return Message("assistant", sampled.reply.text, sampled.reply.calls)


def whole(trajectory: Trajectory, index: int) -> list[int]:
    sequence = trajectory.sequences[index]
    before: list[int] = []
    if sequence.parent is not None:
        parent, segment = sequence.parent
        own = trajectory.sequences[parent]
        held = sum(len(one.tokens) for one in own.segments[: segment + 1])
        inherited = len(whole(trajectory, parent)) - len(own)
        before = whole(trajectory, parent)[: inherited + held]
    return before + sequence.tokens


def assert_exact(tree: MessageTree, engine: FakeEngine) -> None:
    """Every request's tokens and completion are in the record, each action once."""
    rows = [whole(tree.trajectory, index) for index in range(len(tree.trajectory.sequences))]
    for call in engine.calls:
        seen = [*call.consumed, *call.completion.tokens]
        assert any(row[: len(seen)] == seen for row in rows)
    actions = [action.tokens for action in tree.trajectory.actions]
    assert sorted(actions) == sorted(list(call.completion.tokens) for call in engine.calls)
    trained = int(Batch.of([tree.trajectory]).action_T.sum())
    assert trained == sum(map(len, actions))


# What clients do to what they were sent: the same value, written in another way.

numbers = st.integers(-5, 5) | st.sampled_from([0.5, 2.0, -1.0, 1e20])
values = st.recursive(
    numbers | st.booleans() | st.none() | st.text('ab é\n"\\', max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text("xyz", max_size=2), inner, max_size=3)
    ),
    max_leaves=6,
)
arguments = st.dictionaries(st.text("kqz", min_size=1, max_size=2), values, max_size=3)


tokenizers = st.sampled_from(["bytes", "lossy", "chatml", "llama3", "forgetful"])


def rewritten(value: Any, draw: Any) -> Any:
    """The same JSON value: keys in another order, whole numbers as 2 or 2.0."""
    if isinstance(value, dict):
        keys = draw(st.permutations(list(value)))
        return {key: rewritten(value[key], draw) for key in keys}
    if isinstance(value, list):
        return [rewritten(one, draw) for one in value]
    if isinstance(value, int) and not isinstance(value, bool) and draw(st.booleans()):
        return float(value)
    return value


def echoed(message: Message, draw: Any) -> Message:
    """A reply as some client writes it."""
    calls = tuple(
        ToolCall(
            call.name,
            json.loads(
                json.dumps(
                    rewritten(call.arguments, draw),
                    ensure_ascii=draw(st.booleans()),
                    separators=draw(st.sampled_from([None, (",", ":")])),
                )
            ),
            call.id,
        )
        for call in message.tool_calls
    )
    pad = draw(st.sampled_from(["", "\n", " "]))
    text = "" if calls and draw(st.booleans()) else pad + message.content + pad
    return Message("assistant", text, calls)


@given(
    st.data(),
    st.lists(st.tuples(arguments, st.sampled_from(["", "Let me see."])), min_size=1, max_size=4),
)
async def test_what_clients_echo_continues_the_exact_tokens(data: Any, said: Any) -> None:
    replies = [text + CALL % json.dumps(given) for given, text in said] + ["done"]
    tree, engine = make_tree(replies, tokenizer=data.draw(tokenizers))
    conversation = [Message("system", "Be brief."), Message("user", "2+3?")]
    for _ in said:
        reply = await turn(tree, conversation)
        assert reply.tool_calls
        results = [Message("tool", "5", tool_call_id=call.id) for call in reply.tool_calls]
        # a client may write its history in another way each time it sends it
        conversation = [*conversation, reply, *results]
        conversation = [echoed(m, data.draw) if m.role == "assistant" else m for m in conversation]
    await turn(tree, conversation)
    assert len(tree.trajectory.sequences) == 1
    assert tree.counts == {"requests": len(replies), "conversations": 1, "branches": 0, "restarts": 0}
    assert_exact(tree, engine)


@given(st.data())
async def test_any_order_of_requests_is_recorded_exactly(data: Any) -> None:
    """Branches, restarts, other tools, the same request again: each action is recorded and trained once."""
    replies = data.draw(
        st.lists(st.sampled_from(["yes", "no", CALL % '{"a": 1}']), min_size=6, max_size=6)
    )
    tree, engine = make_tree(replies, tokenizer=data.draw(tokenizers))
    histories: list[list[Message]] = [[Message("user", "hello")]]
    for _ in replies:
        messages = list(data.draw(st.sampled_from(histories)))
        if data.draw(st.booleans()) and any(m.role == "assistant" for m in messages):
            messages = [
                m if m.role != "assistant" else Message("assistant", "rewritten") for m in messages
            ]
        tools = data.draw(st.sampled_from([(), (ADD,)]))
        reply = await turn(tree, messages, tools)
        histories.append([*messages, reply, Message("user", data.draw(st.sampled_from(["on", "off"])))])
    assert_exact(tree, engine)
    first = tree.trajectory.sequences[0].segments[0]
    assert first.kind is SegmentKind.PROMPT
    assert tree.counts["requests"] == len(replies)


async def test_another_reply_to_the_same_messages_is_a_branch() -> None:
    tree, engine = make_tree(["one", "two"])
    messages = [Message("user", "hello")]
    await turn(tree, messages)
    await turn(tree, messages)
    assert [sequence.parent for sequence in tree.trajectory.sequences] == [None, (0, 0)]
    assert tree.counts["branches"] == 1
    assert engine.calls[0].sampling.seed != engine.calls[1].sampling.seed
    assert_exact(tree, engine)


async def test_a_client_that_goes_on_from_an_earlier_turn_branches_there() -> None:
    tree, engine = make_tree(["one", "two", "three"])
    messages = [Message("user", "hello")]
    reply = await turn(tree, messages)
    await turn(tree, [*messages, reply, Message("user", "a")])
    await turn(tree, [*messages, reply, Message("user", "b")])
    assert [sequence.parent for sequence in tree.trajectory.sequences] == [None, (0, 1)]
    assert tree.counts["branches"] == 1
    assert_exact(tree, engine)


async def test_replies_that_a_client_rewrote_are_a_restart_that_shares_what_agrees() -> None:
    tree, engine = make_tree([CALL % '{"a": 1}', "fine"])
    await turn(tree, [Message("system", "s"), Message("user", "hello")])
    prose = [Message("assistant", "Calling tools: add"), Message("user", "Observation: 5")]
    await turn(tree, [Message("system", "s"), Message("user", "hello"), *prose])
    assert tree.counts["restarts"] == 1
    # the prompt's tokens are the same, and stand there once
    assert tree.trajectory.sequences[1].parent == (0, 0)
    assert_exact(tree, engine)


async def test_edited_arguments_are_not_what_was_sampled() -> None:
    tree, engine = make_tree([CALL % '{"a": 1}', "fine"])
    reply = await turn(tree, [Message("user", "hello")])
    (call,) = reply.tool_calls
    edited = Message("assistant", "", (ToolCall(call.name, {"a": 2}, call.id),))
    await turn(tree, [Message("user", "hello"), edited, Message("tool", "5", tool_call_id=call.id)])
    assert tree.counts["restarts"] == 1
    assert_exact(tree, engine)


async def test_what_is_not_committed_leaves_no_trace() -> None:
    tree, _ = make_tree(["one", "two"])
    await tree.sample([Message("user", "hello")])
    assert not tree.trajectory.actions
    await turn(tree, [Message("user", "hello")], ())
    assert [len(action.tokens) for action in tree.trajectory.actions] == [4]
    assert len(tree.trajectory.sequences) == 1


async def test_a_thought_stays_in_the_tokens_and_out_of_the_reply() -> None:
    tree, engine = make_tree(["<think>two and three</think>five", "six"])
    sampled = await tree.sample([Message("user", "2+3?")])
    tree.commit(sampled)
    assert (sampled.reply.text, sampled.reply.thought) == ("five", "two and three")
    await turn(tree, [Message("user", "2+3?"), Message("assistant", "five"), Message("user", "+1?")], ())
    assert len(tree.trajectory.sequences) == 1
    assert_exact(tree, engine)


async def test_a_call_that_cannot_be_read_is_text_and_a_fault() -> None:
    tree, _ = make_tree(["<tool_call>\n{nonsense\n</tool_call>"])
    reply = await turn(tree, [Message("user", "hello")])
    assert not reply.tool_calls and "nonsense" in reply.content
    assert [fault.value for fault in tree.trajectory.faults] == ["malformed_call"]


async def test_budgets_end_the_episode() -> None:
    tree, _ = make_tree(["one", "two"], turns=1)
    await turn(tree, [Message("user", "hello")])
    with pytest.raises(BudgetUsedUp) as error:
        await tree.sample([Message("user", "hello")])
    assert error.value.stop is StopReason.MAX_TURNS
    tree, _ = make_tree(["one"], tokens=20)
    with pytest.raises(BudgetUsedUp) as error:
        await tree.sample([Message("user", "a long message" * 10)])
    assert error.value.stop is StopReason.MAX_TOKENS


async def test_sessions_of_the_engine_are_released() -> None:
    tree, engine = make_tree(["one", "two", "three"])
    reply = await turn(tree, [Message("user", "hello")])
    await turn(tree, [Message("user", "hello"), reply, Message("user", "a")])
    await turn(tree, [Message("user", "hello"), reply, Message("user", "b")])
    assert len(engine.sessions) == 2
    await tree.close()
    assert not engine.sessions


def test_inline_turns_have_no_chat() -> None:
    tokenizer = ByteTokenizer()
    renderer = Renderer(tokenizer, load_format("hermes"), "keep", "inline")
    with pytest.raises(ConfigError, match="inline"):
        recorder = Recorder(
            Trajectory(Task("t")),
            engine=FakeEngine([]),
            budgets=Budgets(),
            sampling=Sampling(),
            session="e",
        )
        MessageTree(recorder, renderer)


def test_keys_tell_users_words_apart() -> None:
    assert message_key(Message("user", "a")) != message_key(Message("user", "a "))
    assert message_key(Message("assistant", "a")) == message_key(Message("assistant", " a\n"))
