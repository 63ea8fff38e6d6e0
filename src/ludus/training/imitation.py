"""Conversations that somebody wrote down, as trajectories to imitate.

They are rendered to tokens here, with the tokenizer that will learn from them: stored tokens would be
another tokenizer's.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from ludus.core.failures import ConfigError
from ludus.core.generation import FinishReason
from ludus.core.messages import Message
from ludus.core.task import Task
from ludus.core.tooling import ToolSpec
from ludus.core.trajectory import Segment, SegmentKind, StopReason, TokenSequence, Trajectory
from ludus.observe import read_trajectories
from ludus.rollouts.renderers import Renderer

Conversation = Sequence[Message]


def read_conversations(path: Path) -> list[Conversation]:
    """The conversations of a .jsonl file of {"messages": [...]}, or of a Parquet file of episodes."""
    if path.suffix == ".parquet":
        return [trajectory.messages for trajectory in read_trajectories(path)]
    return list(_read_jsonl(path))


def _read_jsonl(path: Path) -> Iterator[Conversation]:
    for number, line in numbered_lines(path):
        try:
            conversation = [Message.parse(message) for message in json.loads(line)["messages"]]
            check_conversation(conversation)
        except (ValueError, TypeError, KeyError, AttributeError, ConfigError) as error:
            raise ConfigError(f"{path}, line {number}, is not a conversation: {error}") from None
        yield conversation


def numbered_lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines of a .jsonl file that are not empty, counted from 1."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    # not `splitlines`, which also splits at characters that a text in JSON may hold (U+2028, U+0085)
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield number, line


def parse_conversations(given: Iterable[Any]) -> list[Conversation]:
    """Conversations as code has them: lists of messages, or of dictionaries like those of a file."""
    conversations: list[Conversation] = []
    for number, conversation in enumerate(given, start=1):
        try:
            messages = conversation["messages"] if isinstance(conversation, Mapping) else conversation
            conversations.append([Message.parse(message) for message in messages])
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ConfigError(
                f'demonstration {number} is not a list of messages, or {{"messages": [...]}}: '
                f"{type(error).__name__}: {error}"
            ) from None
    return conversations


def check_conversation(conversation: Conversation) -> None:
    """Refuse what cannot be imitated, whatever the model."""
    if not any(message.role == "assistant" for message in conversation):
        raise ConfigError("a conversation to imitate needs at least one message of the assistant's")
    if conversation[0].role == "assistant":
        raise ConfigError("a conversation to imitate must not start with the assistant")


def trajectory_of(
    conversation: Conversation, renderer: Renderer, tools: Sequence[ToolSpec]
) -> Trajectory:
    """The conversation as an episode in which the assistant's messages are the actions."""
    check_conversation(conversation)
    bound = renderer.bound(tools)
    trajectory = Trajectory(Task("", ()), stop=StopReason.ANSWERED)
    for is_action, run in groupby(conversation, key=lambda message: message.role == "assistant"):
        messages = list(run)
        if not is_action:
            _read(trajectory, messages, bound, tools)
            trajectory.messages.extend(messages)
            continue
        for place, message in enumerate(messages):
            if place:  # between two messages in a row the model reads that it may speak again
                _read(trajectory, [], bound, tools)
            _act(trajectory, message, bound)
            trajectory.messages.append(message)
    return trajectory


def _act(trajectory: Trajectory, message: Message, renderer: Renderer) -> None:
    sequence = trajectory.sequences[-1]
    tokens = renderer.action_tokens(renderer.action_text(message))
    nobody = [0.0] * len(tokens)
    sequence.segments.append(Segment(SegmentKind.ACTION, tokens, nobody, finish=FinishReason.STOP_TOKEN))


def _read(
    trajectory: Trajectory, messages: list[Message], renderer: Renderer, tools: Sequence[ToolSpec]
) -> None:
    sequence = trajectory.sequences[-1]
    if not sequence.segments:
        sequence.segments.append(Segment(SegmentKind.PROMPT, renderer.prompt(messages, tools)))
        return
    following = renderer.next_context(sequence, trajectory.messages, messages, tools)
    if following.restart:
        prompt = Segment(SegmentKind.PROMPT, following.tokens)
        trajectory.sequences.append(TokenSequence([prompt]))
    else:
        sequence.segments.append(Segment(SegmentKind.OBSERVATION, following.tokens))
