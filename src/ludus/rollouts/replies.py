"""What was sampled, as a client of a chat API reads it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ludus.chat.formats.base import split_thinking
from ludus.chat.renderer import Renderer
from ludus.core.generation import Completion
from ludus.core.messages import Message, ToolCall


@dataclass(frozen=True, slots=True)
class Reply:
    """What was sampled, as a client of a chat API reads it."""

    id: str
    text: str
    """The text outside calls and thinking."""
    thought: str
    calls: tuple[ToolCall, ...]
    """The calls that could be read."""
    message: Message
    """All that was sampled, calls that could not be read included."""
    answer: str


def read_completion(
    renderer: Renderer, completion: Completion, id: str, stop: Sequence[str], parses_calls: bool
) -> Reply:
    """A completion as a reply, which a client's own `stop` ends and is no part of.

    A call that cannot be read stays text, as does any call without tools.
    """
    whole, shown = renderer.text_of(completion), renderer.text_of(completion, before=stop)
    thought, body, closed = split_thinking(shown)
    parsed = renderer.format.parse(shown)
    found = tuple(
        ToolCall(one.name, one.arguments, f"call_{id}_{place}", one.fault, one.problem)
        for place, one in enumerate(parsed.calls if parses_calls else ())
    )
    calls = tuple(call for call in found if call.fault is None)
    text = (parsed.text if calls else body).strip() if closed else ""
    answer = parsed.answer if parsed.answer is not None else whole
    return Reply(id, text, thought, calls, Message("assistant", whole, found), answer)
