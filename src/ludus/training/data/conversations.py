"""Conversations from files and datasets: to imitate, in pairs and with labels to prefer by, with scores.

A row is read in the forms that people have: `messages` (or ShareGPT's `conversations`), `prompt` and
`completion`, `prompt` with `chosen` and `rejected`, and `label` beside a conversation. Answers are texts or
messages. They are rendered to tokens here, with the tokenizer that will learn from them: stored tokens would be
another tokenizer's.

What the assistant says is learned, but not in a `prompt` that a row gives or a recorded task brings, nor where
both sides of a pair begin alike: there it is read (`PromptedConversation`), as TRL has it. The `tools` of a row
are those of its prompt, whatever the run's are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, takewhile
from pathlib import Path
from typing import Any, TypeVar

from ludus.chat.api_fields import ApiError, parse_tools
from ludus.chat.formats.base import THINK
from ludus.chat.renderer import Renderer
from ludus.core.failures import ConfigError
from ludus.core.generation import FinishReason
from ludus.core.images import ImageError
from ludus.core.messages import Message, ToolSpec, parse_messages
from ludus.core.task import Task
from ludus.core.trajectory import Segment, SegmentKind, StopReason, TokenSequence, Trajectory
from ludus.observe import holds_trajectories, read_trajectories, with_images
from ludus.rollouts.tasksets import Columns, read_rows, undecodable_images

Conversation = Sequence[Message]
PROMPT_TOOLS = "prompt_tools"
"""The metadata of an episode's task with the tools of its prompt, where these are not the run's."""
T = TypeVar("T")


class PromptedConversation(list[Message]):
    """A conversation whose prompt is context only: its messages, of any role, are not trained on."""

    def __init__(
        self,
        messages: Iterable[Message],
        prompt: int = 0,
        shared: int = 0,
        tools: Sequence[ToolSpec] | None = None,
    ) -> None:
        super().__init__(messages)
        self.prompt = prompt
        """So many messages are a prompt: rendered at once, as that of a task is."""
        self.shared = shared
        """So many messages are the other side's as well: rendered turn by turn, as they were said."""
        self.tools = tools
        """The tools that its prompt describes; None: those of the run."""


_VERDICTS = {"chosen": 1.0, "rejected": 0.0, "tie": 0.5}


@dataclass(frozen=True, slots=True)
class Preference:
    """Two conversations that answer the same, of which the first is preferred."""

    chosen: Conversation
    rejected: Conversation
    dimensions: Mapping[str, float] = field(default_factory=dict)
    """Which of the two is better in some respect: 1 the chosen one, 0 the other, 0.5 neither."""

    @property
    def conversations(self) -> tuple[Conversation, ...]:
        return self.chosen, self.rejected


@dataclass(frozen=True, slots=True)
class ScoredSteps:
    """A conversation, and a score for each of the assistant's messages; None where there is none."""

    messages: Conversation
    scores: tuple[float | None, ...]

    @property
    def conversations(self) -> tuple[Conversation, ...]:
        return (self.messages,)


def read_conversations(source: str | Path, columns: Columns | None = None) -> list[Conversation]:
    """The conversations of a file or dataset of rows, or of a Parquet file of episodes as Ludus writes them."""
    found: list[Conversation]
    if str(source).endswith(".parquet") and holds_trajectories(source):
        read = with_images(read_trajectories(source), Path(source))
        found = [episode_conversation(trajectory) for trajectory in read]
    else:
        what = 'a conversation {"messages": [...]} or {"prompt": ..., "completion": ...}'
        found = list(_parsed_rows(source, columns, what, _checked_conversation))
    if not found:
        raise ConfigError(f"{source} is empty: it holds no conversations to imitate")
    return found


def read_pairs(
    source: str | Path, columns: Columns | None = None
) -> list[tuple[Conversation, Conversation]]:
    """The (chosen, rejected) conversations of a file or dataset; a `prompt` is what both begin with."""
    what = 'a pair {"prompt": ..., "chosen": ..., "rejected": ...}'
    return list(_parsed_rows(source, columns, what, _pair))


def read_preferences(source: str | Path, columns: Columns | None = None) -> list[Preference]:
    """Pairs with verdicts by respect: `dimensions` = {"accuracy": "chosen", "style": "tie"}."""
    what = 'a pair {"prompt": ..., "chosen": ..., "rejected": ..., "dimensions": {...}}'
    return list(_parsed_rows(source, columns, what, _preference))


def read_scored_steps(source: str | Path) -> list[ScoredSteps]:
    """Conversations with `scores`, or the episodes of a Parquet file whose turns have rewards."""
    if str(source).endswith(".parquet") and holds_trajectories(source):
        read = with_images(read_trajectories(source), Path(source))
        played = [one for one in read if one.turns]
        found = [
            ScoredSteps(episode_conversation(one), tuple(a.reward for a in one.actions))
            for one in played
        ]
        return [one for one in found if len(answers(one.messages)) == len(one.scores)]
    what = 'a conversation {"messages": [...], "scores": [...]}'
    return list(_parsed_rows(source, None, what, _scored_steps))


def read_labelled(source: str | Path, columns: Columns | None = None) -> list[tuple[Conversation, bool]]:
    """Conversations and whether they are good: by their `label`, or as the two sides of a pair."""
    what = 'an answer {"prompt": ..., "completion": ..., "label": true or false}, nor a pair'
    return [one for found in _parsed_rows(source, columns, what, _labelled) for one in found]


def parse_conversations(given: Iterable[Any]) -> list[Conversation]:
    """Conversations as code has them: lists of messages, or rows like those of a file."""
    conversations: list[Conversation] = []
    for number, conversation in enumerate(given, start=1):
        try:
            row = conversation if isinstance(conversation, Mapping) else {"messages": conversation}
            conversations.append(_said(_conversation(row)))
        except (ValueError, ApiError) as error:
            raise ConfigError(
                f'demonstration {number} is not a list of messages, or {{"messages": [...]}}: {error}'
            ) from None
    return conversations


def _parsed_rows(
    source: str | Path, columns: Columns | None, what: str, parse: Callable[[Any], T]
) -> Iterator[T]:
    for where, row in read_rows(str(source), columns):
        try:
            if not isinstance(row, Mapping):
                raise ValueError(f"a row is a table of fields, not {row!r:.80}")
            yield parse(row)
        except (ConfigError, ApiError) as error:
            raise ConfigError(f"{where}: {error}") from None
        except ValueError as error:
            raise ConfigError(f"{where}, is not {what}: {error}") from None


def _checked_conversation(row: Any) -> Conversation:
    conversation = _conversation(row)
    check_conversation(conversation)
    return _said(conversation)


def episode_conversation(trajectory: Trajectory) -> PromptedConversation:
    """An episode's conversation; the messages before the first action are the prompt."""
    given = trajectory.task.metadata.get(PROMPT_TOOLS)
    tools = None if given is None else parse_tools(given)
    return PromptedConversation(trajectory.messages, prompt=len(trajectory.asked), tools=tools)


def _said(conversation: Conversation) -> Conversation:
    """Refuse an answer that is empty: to imitate it is to learn to say nothing."""
    said = answers(conversation)
    if said and not any(one.content.strip() or one.tool_calls or one.media for one in said):
        raise ValueError("the assistant says nothing in it: the answer is empty; leave the row out")
    return conversation


def answers(conversation: Conversation) -> list[Message]:
    """The assistant's messages after the prompt."""
    return [one for one in conversation[len(asked(conversation)) :] if one.role == "assistant"]


def tools_of(conversation: Conversation) -> Sequence[ToolSpec] | None:
    """The tools that a conversation brings; None where it leaves them to the run."""
    return conversation.tools if isinstance(conversation, PromptedConversation) else None


def unknown_calls(conversation: Conversation, tools: Sequence[ToolSpec]) -> set[str]:
    """The names that are called in it, and are not in its prompt; `tools` are those of the run."""
    own = tools_of(conversation)
    known = {tool.name for tool in (tools if own is None else own)}
    return {call.name for message in conversation for call in message.tool_calls} - known


def _row_tools(row: Mapping[str, Any]) -> Sequence[ToolSpec] | None:
    """The tools of a row, by OpenAI's names for the field."""
    given = next((row[name] for name in ("tools", "functions") if row.get(name) is not None), None)
    return None if given is None else parse_tools(given)


def _conversation(row: Mapping[str, Any]) -> Conversation:
    said, tools = _row_messages(row), _row_tools(row)
    if tools is None:
        return said
    return PromptedConversation(
        said, said.prompt if isinstance(said, PromptedConversation) else 0, tools=tools
    )


def _row_messages(row: Mapping[str, Any]) -> list[Message]:
    whole = next((name for name in ("messages", "conversations") if row.get(name) is not None), None)
    if "prompt" in row and whole is None:
        return _after(row["prompt"], _field(row, "completion"))
    if "prompt" in row and row.get("completion") is not None:
        raise ValueError(
            f"it has {whole!r}, and 'prompt' with 'completion': leave out one of the two (columns = {{ ... }})"
        )
    messages = _messages(row["conversations"] if "conversations" in row else _field(row, "messages"))
    system = row.get("system")  # some files of ShareGPT's kind have it in a column of its own
    has_own = isinstance(system, str) and system and messages[:1] and messages[0].role != "system"
    return [Message("system", str(system)), *messages] if has_own else messages


def _field(row: Mapping[str, Any], name: str) -> Any:
    if name not in row:
        there = ", ".join(map(str, row)) or "nothing"
        raise ValueError(f"there is no {name!r}; it has: {there} (columns = {{ ... }} renames them)")
    return row[name]


def _messages(given: Any) -> list[Message]:
    """An answer's messages: a text is one of the assistant's."""
    if isinstance(given, str):
        return [Message("assistant", given)]
    return parse_messages([given] if isinstance(given, Mapping) else given)


def _after(prompt: Any, answer: Any) -> PromptedConversation:
    """An answer with its prompt, which is text or messages, and in many files stands in both places."""
    said = _messages(answer)
    if isinstance(prompt, str):
        given = [Message("user", prompt)] if said and said[0].role == "assistant" else []
    else:
        given = parse_messages(prompt or ())
    whole = said if said[: len(given)] == given else [*given, *said]
    return PromptedConversation(whole, prompt=len(given))


def _pair(row: Mapping[str, Any]) -> tuple[Conversation, Conversation]:
    chosen, rejected = (_after(row.get("prompt"), _field(row, side)) for side in ("chosen", "rejected"))
    chosen.tools = rejected.tools = _row_tools(row)
    check_conversation(chosen)
    check_conversation(rejected)
    if asked(chosen) != asked(rejected):
        raise ConfigError(
            "what was chosen answers another question than what was rejected: up to the assistant's first "
            "message both must be the same"
        )
    if not chosen.prompt:
        chosen.shared = rejected.shared = _common(chosen, rejected)
    return chosen, rejected


def _common(chosen: Conversation, rejected: Conversation) -> int:
    """With how many messages both begin, so that something of each is left to learn."""
    alike = takewhile(lambda pair: pair[0] == pair[1], zip(chosen, rejected, strict=False))
    ends = (max(i for i, one in enumerate(c) if one.role == "assistant") for c in (chosen, rejected))
    return min(sum(1 for _ in alike), *ends)


def _preference(row: Mapping[str, Any]) -> Preference:
    chosen, rejected = _pair(row)
    given = row.get("dimensions") or {}
    if not isinstance(given, Mapping):
        raise ValueError(f'dimensions are {{"accuracy": "chosen", ...}}, not {given!r:.80}')
    for name, verdict in given.items():
        if verdict is not None and verdict not in _VERDICTS:
            raise ValueError(f"dimensions.{name} is chosen, rejected or tie, not {verdict!r:.40}")
    verdicts = {str(name): _VERDICTS[one] for name, one in given.items() if one is not None}
    return Preference(chosen, rejected, verdicts)


def _scored_steps(row: Mapping[str, Any]) -> ScoredSteps:
    conversation, scores = _conversation(row), _field(row, "scores")
    check_conversation(conversation)
    if not isinstance(scores, list) or not all(
        one is None or (isinstance(one, int | float) and math.isfinite(one)) for one in scores
    ):
        raise ValueError(f"scores are a list of numbers or null, not {scores!r:.80}")
    if len(scores) != len(answers(conversation)):
        raise ValueError(
            f"there are {len(scores)} scores for {len(answers(conversation))} messages of the assistant's"
        )
    return ScoredSteps(conversation, tuple(None if one is None else float(one) for one in scores))


def _labelled(row: Mapping[str, Any]) -> list[tuple[Conversation, bool]]:
    if "label" not in row:
        chosen, rejected = _pair(row)
        return [(chosen, True), (rejected, False)]
    if row["label"] not in (True, False):
        raise ValueError(f"a label is true or false, not {row['label']!r:.40}")
    if row["label"]:
        return [(_checked_conversation(row), True)]
    bad = _conversation(row)  # which may be to say nothing
    check_conversation(bad)
    return [(bad, False)]


def asked(conversation: Conversation) -> list[Message]:
    """The messages before the assistant's first message after the prompt."""
    given = conversation.prompt if isinstance(conversation, PromptedConversation) else 0
    more = takewhile(lambda message: message.role != "assistant", conversation[given:])
    return [*conversation[:given], *more]


def check_conversation(conversation: Conversation) -> None:
    """Refuse what cannot be imitated, whatever the model."""
    if not answers(conversation):
        raise ConfigError("a conversation to imitate needs at least one message of the assistant's")
    if conversation[0].role == "assistant":
        raise ConfigError("a conversation to imitate must not start with the assistant")


def trajectory_of(
    conversation: Conversation, renderer: Renderer, tools: Sequence[ToolSpec]
) -> Trajectory:
    """The conversation as an episode in which the assistant's messages after the prompt are the actions.

    `tools` are those of a conversation that brings none.
    """
    check_conversation(conversation)
    own = tools_of(conversation)
    tools = tools if own is None else own
    try:
        rendered = _rendered(conversation, renderer, tools)
        shared = conversation.shared if isinstance(conversation, PromptedConversation) else 0
        return _only_read(rendered, shared)
    except ImageError as error:
        broken = undecodable_images(conversation)  # the error has the bytes' problem, not their origin
        raise ConfigError(next(broken, str(error))) from error


def _rendered(conversation: Conversation, renderer: Renderer, tools: Sequence[ToolSpec]) -> Trajectory:
    bound = renderer.bound(tools)
    trajectory = Trajectory(Task("", ()), stop=StopReason.ANSWERED)
    trajectory.messages.extend(asked(conversation))
    _observe(trajectory, trajectory.messages, bound, tools)
    rest = conversation[len(trajectory.messages) :]
    turn = ""  # what was said in a turn that results do not close
    for is_action, run in groupby(rest, key=lambda message: message.role == "assistant"):
        messages = list(run)
        if not is_action:
            turn = turn if _observe(trajectory, messages, bound, tools) else ""
            trajectory.messages.extend(messages)
            continue
        for place, message in enumerate(messages):
            if place:  # between two messages in a row the model reads that it may speak again
                turn = turn if _observe(trajectory, [], bound, tools) else ""
            turn += _act(trajectory, message, bound, turn)
            trajectory.messages.append(message)
    return trajectory


def _only_read(trajectory: Trajectory, shared: int) -> Trajectory:
    """Make the actions of the first `shared` messages observations, which are not trained on."""
    for action in trajectory.actions[: len(answers(trajectory.messages[:shared]))]:
        action.kind, action.logprobs, action.finish = SegmentKind.OBSERVATION, None, None
    trajectory.sequences = [one for one in trajectory.sequences if one.actions]
    return trajectory


def _act(trajectory: Trajectory, message: Message, renderer: Renderer, turn: str) -> str:
    """Append the message as an action, and return what it says, with the thought that a prompt opens."""
    sequence = trajectory.sequences[-1]
    text = renderer.action_text(message)
    tokens = renderer.action_tokens(text, turn)
    unknown = [0.0] * len(tokens)
    sequence.segments.append(
        Segment(SegmentKind.ACTION, tokens, unknown, finish=FinishReason.STOP_TOKEN)
    )
    opened = "" if turn or text.startswith(THINK[0]) else renderer.features.opens_thinking
    return opened + text


def _observe(
    trajectory: Trajectory, messages: list[Message], renderer: Renderer, tools: Sequence[ToolSpec]
) -> bool:
    """Append what the model reads, and say whether it goes on in the same turn afterwards."""
    sequence = trajectory.sequences[-1]
    if not sequence.segments:
        opening = renderer.opening(messages, tools)
        sequence.segments.append(Segment(SegmentKind.PROMPT, opening.tokens, media=opening.media))
        return False
    following = renderer.next_context(sequence, trajectory.messages, messages, tools)
    if following.restart:
        prompt = Segment(SegmentKind.PROMPT, following.tokens, media=following.media)
        trajectory.sequences.append(TokenSequence([prompt]))
    else:
        observed = Segment(SegmentKind.OBSERVATION, following.tokens, media=following.media)
        sequence.segments.append(observed)
    return following.continues_turn
