"""Sampled text as a client of a chat API reads it: whole (`read_completion`), and while it is sampled.

Tokens are the truth, and a stream is a view of them. What a view shows is a prefix of the finished reply
(`read_completion`), whatever is sampled next. So these are held back: a character of which some bytes are
missing, white space that may be stripped, the beginning of a tag or of a stop string, and all that might still
become a call.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ludus.chat.formats.base import before_any
from ludus.chat.renderer import Renderer
from ludus.core.failures import EngineError
from ludus.core.generation import Completion
from ludus.core.messages import Message, ToolCall
from ludus.core.tokenizer import ByteFallback, Tokenizer

UNKNOWN = "\N{REPLACEMENT CHARACTER}"
_PATIENCE = 16


@dataclass(frozen=True, slots=True)
class Reply:
    """A completion, as a client of a chat API reads it."""

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
    thought, body, closed = renderer.format.split_thinking(shown)
    parsed = renderer.format.parse(shown)
    found = tuple(
        ToolCall(one.name, one.arguments, f"call_{id}_{place}", one.fault, one.problem)
        for place, one in enumerate(parsed.calls if parses_calls else ())
    )
    calls = tuple(call for call in found if call.fault is None)
    text = (parsed.text if calls else body).strip() if closed else ""
    if completion.stop in stop and text and not calls:  # a client's stop string ends white space, too
        text += shown[len(shown.rstrip()) :]
    answer = parsed.answer if parsed.answer is not None else whole
    return Reply(id, text, thought, calls, Message("assistant", whole, found), answer)


class Detokenizer:
    """Text for tokens that arrive a few at a time: together exactly what `decode` gives for all of them.

    Text is given out up to the last token that ends with a whole character. Decoding starts a few tokens
    earlier, because some tokenizers write the first token of a text without its space. Tokens that stand for
    one byte where a tokenizer has no other (`<0xE4>`) are decoded as a run: one wrong byte changes all of it.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._decode = tokenizer.decode
        self._bytes: frozenset[int] = frozenset()
        if isinstance(tokenizer, ByteFallback):
            self._bytes = tokenizer.fallback_bytes
        self._before: list[int] = []
        """Tokens whose text was given out: what the next ones are decoded after."""
        self._pending: list[int] = []
        self._enough = 0
        """How many tokens must be pending before decoding is tried again."""

    def push(self, tokens: Sequence[int]) -> str:
        """The text that these tokens make certain."""
        self._pending += tokens
        if len(self._pending) < self._enough or not self._pending or self._pending[-1] in self._bytes:
            return ""
        before = self._decode(self._before)
        text = self._decode([*self._before, *self._pending])
        if len(text) <= len(before) or text.endswith(UNKNOWN) or not text.startswith(before):
            # the longer nothing is certain, the less often it is tried: garbage costs no quadratic time
            self._enough = len(self._pending) + 1 + len(self._pending) // _PATIENCE
            return ""
        self._before, self._pending, self._enough = self._pending, [], 0
        return text[len(before) :]


@dataclass(slots=True)
class ReplyView:
    """The thought and the text of a reply, as far as they are certain."""

    renderer: Renderer
    stop: Sequence[str]
    """The client's stop strings: they end the text, and are not part of it."""
    parses_calls: bool
    _raw: str = ""
    _thought: str = ""
    _text: str = ""
    _detokenizer: Detokenizer = field(init=False)

    def __post_init__(self) -> None:
        self._detokenizer = Detokenizer(self.renderer.tokenizer)

    def push(self, tokens: Sequence[int]) -> tuple[str, str]:
        """How thought and text go on."""
        new = self._detokenizer.push(tokens)
        if not new:
            return "", ""
        self._raw += new
        return self._advance(*self._certain())

    def finish(self, thought: str, text: str) -> tuple[str, str]:
        """The rest, given all of it."""
        if not (thought.startswith(self._thought) and text.startswith(self._text)):
            raise EngineError("the finished reply differs from what was streamed of it: ask again")
        return self._advance(thought, text)

    def _advance(self, thought: str, text: str) -> tuple[str, str]:
        new = thought[len(self._thought) :], text[len(self._text) :]
        self._thought, self._text = max(self._thought, thought, key=len), max(self._text, text, key=len)
        return new

    def _certain(self) -> tuple[str, str]:
        features = self.renderer.features
        said = self._raw[: before_any(self._raw, self.stop)]
        if len(said) < len(features.lead) and features.lead.startswith(said):
            return "", ""
        shown = features.opens_thinking + said.removeprefix(features.lead)
        thought, body = self.renderer.format.certain_reply(shown, self.parses_calls)
        return thought, body.rstrip()


class TokenFeed:
    """The tokens of one reply as they are sampled. Any number may read it, each at its own pace."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.id = ""
        """The reply's; empty until the engine is asked."""
        self.prompt_tokens = 0
        self.created = int(time.time())
        self.view: Callable[[], ReplyView] | None = None
        """Makes a view of the tokens, for one reader."""
        self.readers: set[asyncio.Event] = set()
        """Set whenever there is something new."""

    def open(self, id: str, prompt_tokens: int, view: Callable[[], ReplyView]) -> None:
        """The engine is being asked."""
        self.id, self.prompt_tokens, self.view = id, prompt_tokens, view

    def push(self, tokens: Sequence[int]) -> None:
        self.tokens += tokens
        for reader in self.readers:
            reader.set()
