"""A user's instructions for the calls of a path: from a template, or by a language model."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel

from ludus.core.chat import ChatModel, ChatOptions
from ludus.core.messages import ToolSpec
from ludus.synth.asking import ask
from ludus.synth.paths.call_paths import CallPath, FromResult, FromUser, PathCall
from ludus.synth.paths.signature_graph import SignatureGraph

_SENTENCE = re.compile(r"^(.+?)(?:\.\s|\.?$)", re.M)
_WRITER = """You write what a person says to an assistant that has tools. You are given the calls that the
assistant is to make, turn by turn. Write one message of the person for each turn, so that exactly these calls
follow from it. Say every value under "said" literally, in the turn that first needs it. What is under "found"
the assistant finds out itself: refer to it in words, and never invent a value for it. Do not name tools. Plain,
natural sentences. Answer with JSON: {"turns": ["...", ...]}"""


class UserTurns(BaseModel):
    """Answer of a language model."""

    turns: list[str]


def template_turns(path: CallPath, graph: SignatureGraph) -> list[str]:
    """A plain instruction for each turn."""
    texts = []
    for numbers in path.by_turn():
        parts = [_sentence(path, number, graph.specs[path.calls[number].tool]) for number in numbers]
        texts.append(" Then ".join([parts[0], *(part[0].lower() + part[1:] for part in parts[1:])]))
    return texts


def _sentence(path: CallPath, number: int, spec: ToolSpec) -> str:
    call = path.calls[number]
    found = _SENTENCE.match(spec.description.strip())
    what = found.group(1).strip() if found else spec.name.replace("_", " ").capitalize()
    said = [
        f"{name} {_shown(one.value)}"
        for name, one in call.arguments.items()
        if isinstance(one, FromUser)
    ]
    got = [
        f"the {name.replace('_', ' ')} from that"
        if one.call == number - 1
        else f"the {name.replace('_', ' ')} from step {one.call + 1}"
        for name, one in call.arguments.items()
        if isinstance(one, FromResult)
    ]
    using = ", ".join([*said, *got])
    return f"{what} ({using})." if using else f"{what}."


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


async def written_turns(
    path: CallPath, graph: SignatureGraph, model: ChatModel, options: ChatOptions
) -> list[str]:
    """An instruction for each turn by a language model; `ChatError` where no answer says every value."""
    plan = [
        [_described(path.calls[number], graph.specs[path.calls[number].tool]) for number in numbers]
        for numbers in path.by_turn()
    ]

    def check(reply: UserTurns) -> None:
        if problem := unsaid(path, reply.turns):
            raise ValueError(problem)

    return (await ask(model, _WRITER, {"turns": plan}, UserTurns, options, check=check)).turns


def _described(call: PathCall, spec: ToolSpec) -> dict[str, Any]:
    said = {name: one.value for name, one in call.arguments.items() if isinstance(one, FromUser)}
    found = [name for name, one in call.arguments.items() if isinstance(one, FromResult)]
    return {"does": spec.description, "tool": call.tool, "said": said, "found": found}


def unsaid(path: CallPath, turns: Sequence[str]) -> str:
    """The missing part of the instructions: a turn, or a value that could not be known; empty if nothing is."""
    numbers = list(path.by_turn())
    if len(turns) != len(numbers):
        return f"there are {len(turns)} turns and there should be {len(numbers)}"
    for place, turn in enumerate(numbers):
        heard = " ".join(turns[: place + 1]).lower()
        for number in turn:
            for name, source in path.calls[number].arguments.items():
                if isinstance(source, FromUser) and not _is_said(source.value, heard):
                    return f"turn {place + 1} does not say {name} = {_shown(source.value)}"
    return ""


def _is_said(value: Any, heard: str) -> bool:
    if isinstance(value, bool) or value is None:
        return True  # yes and no have many words
    if isinstance(value, list | tuple):
        return all(_is_said(one, heard) for one in value)
    if isinstance(value, dict):
        return all(_is_said(one, heard) for one in value.values())
    return _shown(value).lower() in heard
