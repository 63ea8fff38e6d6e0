"""Do demonstrations begin as episodes do? Their first prompts beside an episode's, token by token."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import takewhile

from ludus.core.failures import ConfigError
from ludus.core.messages import Message, ToolSpec
from ludus.core.trajectory import SegmentKind, Trajectory
from ludus.rollouts.rollout import Rollout
from ludus.training.data.conversations import Conversation, asked, tools_of, trajectory_of

_SHOWN = 90
"""Characters of each side that are shown, and as many of what both have before."""


def prompt_findings(
    rollout: Rollout, shown: Sequence[Conversation], specs: Sequence[ToolSpec], played: Trajectory
) -> list[tuple[str, str]]:
    """Where the first prompts of demonstrations and of an episode part, and why; tasks may say other things."""
    first = [one.segments[0] for one in played.sequences if one.segments]
    prompts = [one.tokens for one in first if one.kind is SegmentKind.PROMPT]
    if played.failure is not None or not prompts:
        return []  # which the check of an episode tells
    decode = rollout.renderer.tokenizer.decode
    parted: dict[str, list[str]] = defaultdict(list)
    for number, conversation in enumerate(shown, start=1):
        own = tools_of(conversation)
        tools = specs if own is None else own
        renderer = rollout.renderer.bound(tools)
        try:
            trajectory_of(conversation, rollout.renderer, specs)
        except ConfigError as error:
            return [("error", f"demonstration {number}: {error}")]
        tokens = renderer.prompt(_with_words_of(asked(conversation), played.asked), tools)
        if tokens in prompts:
            continue
        at, nearest = max((_alike(prompt, tokens), prompt) for prompt in prompts)
        causes = [*_other_messages(asked(conversation), played.asked)]
        if renderer.prompt(played.asked, tools) not in prompts:
            has_none = rollout.renderer.bound(()).prompt(played.asked) in prompts
            causes.append(_other_tools(tools, specs, has_none))
        why = " and ".join(causes)
        rests = [decode(side[at:]) for side in (tokens, nearest)]
        also = _alike(*rests)  # of a token that is a whole phrase, the end may be another
        before = (decode(tokens[:at]) + rests[0][:also])[-_SHOWN:]
        sides = [f"{rest[also:][:_SHOWN]!r}" for rest in rests]
        parted[why].append(
            f"demonstration {number} parts at token {at}, after {before!r}:\n"
            f"  demonstration: {sides[0]}\n  episode:       {sides[1]}"
        )
    count = len(shown)
    if not parted:
        told = f"the first {count} demonstrations have the prompt of an episode, token by token"
        return [("info", f"{told} (with its task in them)")]
    learned = "what is learned after one prompt may not be said after another"
    return [
        (
            "warning",
            f"{len(places)} of the first {count} demonstrations have {why}: {learned}. {places[0]}",
        )
        for why, places in parted.items()
    ]


def _alike(left: Sequence[object], right: Sequence[object]) -> int:
    """With how many tokens or characters both begin."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(left, right, strict=False)))


def _with_words_of(messages: Sequence[Message], others: Sequence[Message]) -> list[Message]:
    """The messages with what users say in the others, where as many of them speak."""
    said = [message for message in others if message.role == "user"]
    if len(said) != sum(message.role == "user" for message in messages):
        return list(messages)
    left = iter(said)
    return [
        replace(message, content=(other := next(left)).content, media=other.media)
        if message.role == "user"
        else message
        for message in messages
    ]


def _other_messages(shown: Sequence[Message], played: Sequence[Message]) -> Iterator[str]:
    """What differs between the messages of a demonstration and of an episode."""
    systems = [[one.content for one in side if one.role == "system"] for side in (shown, played)]
    roles = [[one.role for one in side] for side in (shown, played)]
    if systems[0] and not systems[1]:
        yield "a system prompt, which episodes do not have"
    elif systems[1] and not systems[0]:
        yield "no system prompt, which episodes have"
    elif systems[0] != systems[1]:
        yield "another system prompt than episodes"
    elif roles[0] != roles[1]:
        yield f"messages by {', '.join(roles[0])}, where episodes have {', '.join(roles[1])}"


def _other_tools(tools: Sequence[ToolSpec], own: Sequence[ToolSpec], episodes_have_none: bool) -> str:
    """`own`: the recipe's, which rows without the field `tools` are given."""
    names = [tool.name for tool in tools]
    named = ", ".join(names)
    if episodes_have_none:
        return f"tools ({named:.200}), which episodes do not have"
    if tools and sorted(names) == sorted(tool.name for tool in own):
        return (
            f"the tools of episodes ({named:.200}) in other words or schemas (rows without the field tools "
            "get the recipe's as they are)"
        )
    return f"other tools than episodes ({named:.200})" if tools else "no tools, which episodes have"
