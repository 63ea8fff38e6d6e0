"""Requests to an OpenAI-compatible server, and parsing of its answers. Pure.

A server's answer is not trusted: every field is checked before it is used, and what does not fit is a
`BadResponse` that says what was wrong.

`TranscriptTokenizer`: an engine is given tokens, but `/chat/completions` takes messages, and the server has a
tokenizer and a chat template of its own. So the transcript is kept in tokens that only serve to be turned back
into messages: special ones mark where messages start and end, all others stand for up to three bytes of text
each, which is about as many tokens as a real tokenizer counts, rather more. Content cannot forge a mark,
because marks are ids.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ludus.core.generation import FinishReason, Sampling, first_stop
from ludus.core.messages import Json, Message, ToolCall
from ludus.core.tokenizer import SPECIALS, ByteTokenizer
from ludus.llm.http import checked_text, first_choice, token_count
from ludus.remote.client import BadResponse

MOST_STOPS = 4
"""How many stop strings the OpenAI interface takes."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A parsed answer. `stop` is the stop string it met, `tells_stop` whether it says so at all."""

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
    choice = first_choice(body)
    text, is_native = _chat_text(choice, write) if chat else (choice.get("text"), False)
    is_cut = choice.get("finish_reason") == "length"
    told = [key for key in ("stop_reason", "matched_stop") if key in choice]
    stop = next((choice[key] for key in told if isinstance(choice[key], str)), None)
    return Answer(
        text=checked_text(text, sampling.max_tokens),
        finish=FinishReason.LENGTH if is_cut else FinishReason.STOP_TOKEN,
        stop=stop if stop in sampling.stop else None,
        tells_stop=bool(told) or is_native,
        prompt_tokens=token_count(body, "prompt_tokens"),
    )


def _chat_text(choice: Json, write: WriteCalls) -> tuple[Any, bool]:
    """The reply's text, and whether native tool calls are part of it."""
    message = choice.get("message")
    if not isinstance(message, dict):
        raise BadResponse("the answer has no message")
    content, calls = message.get("content"), message.get("tool_calls")
    said = "" if content is None else content  # a model that only thought, or only called a tool
    if not calls:
        return said, False
    if not isinstance(calls, list) or not isinstance(said, str):
        raise BadResponse(
            f"the answer's tool_calls are {type(calls).__name__}, not a list beside a text"
        )
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


def cut(answer: Answer, stops: Sequence[str], ends: Iterable[str]) -> Answer:
    """The answer up to the first stop string, that included, or up to a text that ends a turn.

    Servers leave out the stop string that they met: it is put back. One that they were not told of is
    found here.
    """
    text = answer.text
    if answer.stop is not None and not text.endswith(answer.stop):
        text += answer.stop
    at = min((text.find(end) for end in ends if end and end in text), default=None)
    said = text if at is None else text[:at]
    if (found := first_stop(said, stops)) is not None:
        start, stop = found
        return replace(
            answer, text=said[: start + len(stop)], finish=FinishReason.STOP_STRING, stop=stop
        )
    return (
        answer if at is None else replace(answer, text=said, finish=FinishReason.STOP_TOKEN, stop=None)
    )


_START, _END = "<|im_start|>", "<|im_end|>"
_BYTES_PER_TOKEN = 3
_FIRST = (0, 256, 256 + 256**2)
"""The first id of tokens of one, two and three bytes."""
_FIRST_SPECIAL = 256 + 256**2 + 256**3
_ROLES = ("system", "user", "assistant", "tool")
_TOOLS = (
    "# Tools\n\nYou may call one or more functions. You are given their signatures within "
    "<tools></tools>:\n<tools>\n{listed}\n</tools>\n\nFor each call, write a JSON object within "
    '<tool_call></tool_call>:\n<tool_call>\n{{"name": <function-name>, "arguments": '
    "<arguments-object>}}\n</tool_call>"
)

_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


class TranscriptTokenizer(ByteTokenizer):
    """A `Tokenizer` without files or state: what it encodes means the same in every process.

    The byte tokenizer with several bytes in a token; its special tokens follow all of those.
    """

    def __init__(self) -> None:
        super().__init__()
        self._specials = {text: _FIRST_SPECIAL + i for i, text in enumerate(SPECIALS)}
        self._texts = {number: text for text, number in self._specials.items()}

    @property
    def vocabulary_size(self) -> int:
        return _FIRST_SPECIAL + len(self._specials)

    def encode_text(self, text: str) -> list[int]:
        data = text.encode("utf-8", errors="surrogatepass")
        pieces = (data[at : at + _BYTES_PER_TOKEN] for at in range(0, len(data), _BYTES_PER_TOKEN))
        return [_FIRST[len(piece) - 1] + int.from_bytes(piece, "big") for piece in pieces]

    def decode(self, tokens: Sequence[int]) -> str:
        texts: list[str] = []
        pending = bytearray()
        for token in tokens:
            if 0 <= token < _FIRST_SPECIAL:
                size = 3 if token >= _FIRST[2] else 2 if token >= _FIRST[1] else 1
                pending += (token - _FIRST[size - 1]).to_bytes(size, "big")
            else:
                texts.append(pending.decode("utf-8", errors="replace"))
                pending.clear()
                texts.append(self._texts.get(token, f"<|{token}|>"))
        return "".join([*texts, pending.decode("utf-8", errors="replace")])

    def apply_chat_template(
        self, messages: Sequence[Json], tools: Sequence[Json] | None, add_generation_prompt: bool
    ) -> str:
        given = list(messages)
        if tools:
            listed = _TOOLS.format(listed="\n".join(json.dumps(tool) for tool in tools))
            system = given.pop(0)["content"] + "\n\n" if given and given[0]["role"] == "system" else ""
            given.insert(0, {"role": "system", "content": system + listed})
        return super().apply_chat_template(given, None, add_generation_prompt)

    def messages(self, tokens: Sequence[int]) -> list[Json]:
        """The conversation that these tokens are the transcript of, as a chat server takes it.

        Results of tools become messages of the user, in the way of Hermes: the server has not seen the
        calls that they answer. Messages of one role in a row are joined, because many templates insist.
        """
        found: list[Json] = []
        for role, content in self._said(tokens):
            _append(found, role, content)
        return found

    def native(self, tokens: Sequence[int]) -> tuple[list[Json], list[Json]]:
        """(messages, tools) with calls and results as the OpenAI interface has them.

        Calls have the numbers of their places as ids, and the results that follow answer them in order. A
        message with a call that is no JSON stays text, and so do its results.
        """
        found: list[Json] = []
        tools: list[Json] = []
        asked: list[str] = []
        for role, content in self._said(tokens):
            if role == "system" and not found:
                content, tools = _without_tools(content)
                if content:
                    found.append({"role": role, "content": content})
            elif role == "assistant":
                text, calls = _calls(content, f"call_{len(found)}")
                found.append({"role": role, "content": text} | ({"tool_calls": calls} if calls else {}))
                asked = [call["id"] for call in calls]
            elif role == "tool" and asked:
                found.append({"role": role, "tool_call_id": asked.pop(0), "content": content})
            else:
                _append(found, role, content)
        return found, tools

    def _said(self, tokens: Sequence[int]) -> Iterator[tuple[str, str]]:
        start, end = self._specials[_START], self._specials[_END]
        opened: list[int] | None = None
        for token in tokens:
            if token == start:
                opened = []
            elif opened is not None and token == end:
                role, _, content = self.decode(opened).partition("\n")
                if role not in _ROLES:
                    raise ValueError(f"a transcript has no role {role!r:.40}")
                yield role, content
                opened = None
            elif opened is not None:
                opened.append(token)


def _without_tools(system: str) -> tuple[str, list[Json]]:
    """A system message, and the tools that `apply_chat_template` listed at its end."""
    before, after = _TOOLS.split("{listed}")
    head, start, rest = system.rpartition(before.format())
    if not start or not rest.endswith(after.format()):
        return system, []
    listed = rest.removesuffix(after.format())
    return head.removesuffix("\n\n"), [json.loads(line) for line in listed.split("\n")]


def _calls(said: str, name: str) -> tuple[str, list[Json]]:
    """The assistant's text and its calls; all of it is text where a call cannot be read."""
    calls: list[Json] = []
    for body in _CALL.findall(said):
        try:
            read = json.loads(body)
        except ValueError:
            return said, []
        if not isinstance(read, dict) or not isinstance(read.get("name"), str):
            return said, []
        function = {"name": read["name"], "arguments": json.dumps(read.get("arguments") or {})}
        calls.append({"id": f"{name}_{len(calls)}", "type": "function", "function": function})
    return (_CALL.sub("", said).strip() if calls else said), calls


def _append(found: list[Json], role: str, content: str) -> None:
    if role == "tool":
        role, content = "user", f"<tool_response>\n{content}\n</tool_response>"
    if found and found[-1]["role"] == role:
        found[-1]["content"] += "\n" + content
    else:
        found.append({"role": role, "content": content})
