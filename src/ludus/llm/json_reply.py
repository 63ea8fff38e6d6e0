"""Answers as data: find the JSON in what a model said, check it, and ask again where it does not fit.

Models put JSON into fences, write prose around it, think aloud before it and leave commas behind. What is found
is checked by a pydantic type; the last value that fits counts, because thoughts come before verdicts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

from pydantic import TypeAdapter

from ludus.core.generation import ChatModel, ChatOptions, ChatReply
from ludus.core.messages import Message
from ludus.core.strict_json import decode, strict_decoder
from ludus.llm.remote import ChatError

T = TypeVar("T")

_THOUGHTS = re.compile(r"<think(?:ing)?>.*?(?:</think(?:ing)?>|\Z)", re.DOTALL)
_DANGLING_COMMA = re.compile(r",(\s*[}\]])")
_MOST_CHARS = 200_000
_MOST_TRIES = 200
_SHOWN_CHARS = 2_000
_AGAIN = "Answer again, with one JSON value and nothing around it."


class UnusableReply(ChatError):
    """A model was asked several times, and no answer of it was what was asked for."""


@runtime_checkable
class Forgetting(Protocol):
    """A model that keeps answers, and can forget one."""

    async def forget(self, messages: Sequence[Message], options: ChatOptions) -> None: ...


@dataclass(frozen=True, slots=True)
class JsonReply(Generic[T]):
    """A checked answer, and every reply that it took."""

    value: T
    replies: tuple[ChatReply, ...]

    @property
    def asked(self) -> list[ChatReply]:
        """The replies that were paid for; cached ones are free."""
        return [reply for reply in self.replies if not reply.is_cached]


async def ask_json(
    model: ChatModel,
    messages: Sequence[Message],
    kind: type[T] | TypeAdapter[T],
    options: ChatOptions = ChatOptions(),  # noqa: B008 - frozen
    *,
    attempts: int = 3,
    check: Callable[[T], object] | None = None,
) -> JsonReply[T]:
    """The answer as a `kind` (a pydantic model, or whatever a `TypeAdapter` takes).

    Where it does not fit, the model is asked again with what was wrong, `attempts` times in all; then
    `UnusableReply` is raised, and a model that keeps answers forgets these. `check` raises a `ValueError` for
    what a schema cannot say: the model reads its message.
    """
    adapter = kind if isinstance(kind, TypeAdapter) else TypeAdapter(kind)
    options = replace(options, wants_json=True)
    asked, replies, problem = list(messages), [], ""
    questions = []
    for _ in range(attempts):
        questions.append(asked)
        reply = await model.chat(asked, options)
        replies.append(reply)
        try:
            return JsonReply(parse_json(reply.text, adapter, check), tuple(replies))
        except ValueError as error:
            problem = str(error)
        if reply.is_cut:
            problem += f" (it was cut at {options.max_tokens} tokens: be brief)"
        # the last answer alone and what is wrong with it: a row of bad examples would be followed
        said = reply.text[:_SHOWN_CHARS] + (" ..." if len(reply.text) > _SHOWN_CHARS else "")
        wrong = f"That answer cannot be used: {problem}\n{_AGAIN}"
        asked = [*messages, Message("assistant", said), Message("user", wrong)]
    if isinstance(model, Forgetting):
        for question in questions:
            await model.forget(question, options)
    raise UnusableReply(
        f"{model.name} gave no usable answer in {attempts} attempts; the last: {problem}",
        attempts=attempts,
    )


def parse_json(
    text: str, kind: type[T] | TypeAdapter[T], check: Callable[[T], object] | None = None
) -> T:
    """The last JSON value in a text that is a `kind` and passes `check`; a `ValueError` where there is none."""
    adapter = kind if isinstance(kind, TypeAdapter) else TypeAdapter(kind)
    problem = "it has no JSON object"
    for value in reversed(list(json_values(text))):
        try:
            found = decode(adapter, value)
            if check is not None:
                check(found)
            return found
        except ValueError as error:
            if problem == "it has no JSON object":
                problem = str(error)
    raise ValueError(problem)


def json_values(text: str) -> Iterator[Any]:
    """Every outermost JSON object and list in a text, in order; thoughts are left out."""
    text = _THOUGHTS.sub("", text)[-_MOST_CHARS:]
    at, tries = 0, 0
    while tries < _MOST_TRIES:
        starts = [place for place in (text.find("{", at), text.find("[", at)) if place >= 0]
        if not starts:
            return
        at, tries = min(starts), tries + 1
        found = _value_at(text, at)
        if found is None:
            at += 1
        else:
            value, at = found
            yield value


def _value_at(text: str, at: int) -> tuple[Any, int] | None:
    try:
        return _DECODER.raw_decode(text, at)
    except (ValueError, RecursionError):
        pass
    mended = _DANGLING_COMMA.sub(r"\1", text[at:])
    try:
        value, _ = _DECODER.raw_decode(mended)
    except (ValueError, RecursionError):
        return None
    return value, len(text)  # how far it went is not known any more


_DECODER = strict_decoder(control_characters=True)
