"""A transcript of messages in tokens, for servers that take messages and have a tokenizer of their own.

An engine is given tokens, but `/chat/completions` takes messages. So the transcript is kept in tokens that
only serve to be turned back into messages: special ones mark where messages start and end, all others stand for
up to three bytes of text each, which is about as many tokens as a real tokenizer counts, rather more. Content
cannot forge a mark, because marks are ids.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence

from ludus.core.messages import Json
from ludus.core.tokenizer import SPECIALS, ByteTokenizer

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
