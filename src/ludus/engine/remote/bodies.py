"""What is sent to an OpenAI-compatible server, and how its answers are read. Pure.

A server's answer is somebody else's: every field is checked before it is used, and what does not fit is
a `BadAnswer` that says what was wrong.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ludus.core.generation import FinishReason, Sampling
from ludus.core.messages import Json, Message, ToolCall

MOST_STOPS = 4
"""How many stop strings the OpenAI interface takes."""
_CHARS_PER_TOKEN = 64
_SPARE_CHARS = 4096
_BROKEN_OFF = ("abort", "error")


class BadAnswer(Exception):
    """The server answered, and the answer is not what the interface promises."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a server said. `stop` is the stop string it met, `tells_stop` whether it says so at all."""

    text: str
    finish: FinishReason
    stop: str | None
    tells_stop: bool
    prompt_tokens: int | None
    """How many tokens the server found in the prompt, where it says."""


def sampling_fields(sampling: Sampling, *, stops: bool) -> Json:
    """The fields of a request that say how to draw; those that not every server knows only when used."""
    fields: Json = {
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "seed": sampling.seed & 0x7FFFFFFF,  # some servers take 32 bits only
    }
    if sampling.top_k:
        fields["top_k"] = sampling.top_k
    if sampling.min_p:
        fields["min_p"] = sampling.min_p
    if sampling.repetition_penalty != 1:
        fields["repetition_penalty"] = sampling.repetition_penalty
    if stops:
        fields["stop"] = list(dict.fromkeys(sampling.stop))
    return fields


WriteCalls = Callable[[str, Sequence[ToolCall]], str]
"""(text, calls) -> an action as the run's format writes it."""


def write_hermes(text: str, calls: Sequence[ToolCall]) -> str:
    """Calls as the usual format writes them."""
    bodies = [json.dumps({"name": call.name, "arguments": call.arguments}) for call in calls]
    written = [f"<tool_call>\n{body}\n</tool_call>" for body in bodies]
    return "\n".join([text, *written] if text else written)


def read_answer(
    body: Json, *, chat: bool, sampling: Sampling, write: WriteCalls = write_hermes
) -> Answer:
    """The first choice of a completion; native tool calls become text of the run's format."""
    choices = body.get("choices")
    if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
        raise BadAnswer("the answer has no choices")
    choice: Json = choices[0]
    reason = choice.get("finish_reason")
    if reason in _BROKEN_OFF:
        raise BadAnswer(f"the server broke off: finish_reason is {reason!r}")
    text, is_native = _chat_text(choice, write) if chat else (choice.get("text"), False)
    if not isinstance(text, str):
        raise BadAnswer(f"the answer's text is {type(text).__name__}, not text")
    most = sampling.max_tokens * _CHARS_PER_TOKEN + _SPARE_CHARS
    if len(text) > most:
        raise BadAnswer(f"{len(text)} characters came for {sampling.max_tokens} tokens")
    told = [key for key in ("stop_reason", "matched_stop") if key in choice]
    stop = next((choice[key] for key in told if isinstance(choice[key], str)), None)
    return Answer(
        text=text.encode("utf-8", errors="replace").decode("utf-8"),
        finish=FinishReason.LENGTH if reason == "length" else FinishReason.STOP_TOKEN,
        stop=stop if stop in sampling.stop else None,
        tells_stop=bool(told) or is_native,
        prompt_tokens=_prompt_tokens(body.get("usage")),
    )


def _chat_text(choice: Json, write: WriteCalls) -> tuple[Any, bool]:
    """What was said, and whether native tool calls are part of it."""
    message = choice.get("message")
    if not isinstance(message, dict):
        raise BadAnswer("the answer has no message")
    content, calls = message.get("content"), message.get("tool_calls")
    said = "" if content is None else content  # a model that only thought, or only called a tool
    if not calls:
        return said, False
    if not isinstance(calls, list) or not isinstance(said, str):
        raise BadAnswer(f"the answer's tool_calls are {type(calls).__name__}, not a list beside a text")
    try:
        parsed = Message.parse({"role": "assistant", "content": said, "tool_calls": calls})
    except ValueError:  # the model's fault: a call that cannot be read, which the format will say
        raw = [f"<tool_call>\n{_raw_call(call)}\n</tool_call>" for call in calls]
        return "\n".join([said, *raw] if said else raw), True
    return write(said, parsed.tool_calls), True


def _raw_call(call: Any) -> str:
    function = call.get("function") if isinstance(call, dict) else None
    arguments = function.get("arguments") if isinstance(function, dict) else call
    return arguments if isinstance(arguments, str) else json.dumps(arguments)


def _prompt_tokens(usage: Any) -> int | None:
    count = usage.get("prompt_tokens") if isinstance(usage, dict) else None
    return count if isinstance(count, int) and not isinstance(count, bool) and count > 0 else None


def cut(answer: Answer, stops: Sequence[str], ends: Iterable[str]) -> Answer:
    """The answer up to the first stop string, that included, or up to a text that ends a turn.

    Servers leave out the stop string that they met: it is put back. One that they were not told of is
    found here.
    """
    text = answer.text
    if answer.stop is not None and not text.endswith(answer.stop):
        text += answer.stop
    found = [(text.find(end), end, False) for end in ends if end and end in text]
    found += [(text.find(stop) + len(stop), stop, True) for stop in stops if stop in text]
    if not found:
        return answer
    at, mark, is_stop = min(found)
    finish = FinishReason.STOP_STRING if is_stop else FinishReason.STOP_TOKEN
    return Answer(text[:at], finish, mark if is_stop else None, answer.tells_stop, answer.prompt_tokens)


def model_names(body: Json) -> list[str]:
    """The models that a server says it has."""
    listed = body.get("data")
    if not isinstance(listed, list):
        raise BadAnswer("the list of models has no 'data'")
    return [m["id"] for m in listed if isinstance(m, dict) and isinstance(m.get("id"), str)]
