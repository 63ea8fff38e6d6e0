"""A chat template's text, and its tokens, with content kept from writing special tokens.

The template is rendered twice: once as it is, and once with a placeholder for everything that somebody
else wrote. Putting the content back in the placeholders' stead must give the first text again; then it
is known which characters are content. Text is encoded in one go, as the model's makers did, unless some
content would become a special token: that content alone is encoded by itself, as plain text.

A template that changes content (escapes it, say) has no such places. There, control texts in content
are broken up by a space before they are rendered. Trimming is no such change: placeholders keep the
white space around them.
"""

from __future__ import annotations

import hashlib
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ludus.core.messages import Json
from ludus.core.protocols import Tokenizer
from ludus.core.tooling import ToolSpec
from ludus.rollouts.controls import ControlTexts
from ludus.rollouts.renderers.pieces import Entry, Piece

Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation's text, and which parts of it are content that nobody vouches for."""

    text: str
    content: tuple[Span, ...]

    def after(self, position: int) -> Rendered:
        """What stands from `position` on."""
        spans = ((max(a, position) - position, b - position) for a, b in self.content if b > position)
        return Rendered(self.text[position:], tuple(spans))


class SafeTemplate:
    """Renders and encodes conversations with a tokenizer's chat template."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._controls = ControlTexts(tokenizer.controls)
        self._ids = frozenset(tokenizer.controls.values())

    def text(self, conversation: Sequence[Entry], tools: Sequence[ToolSpec], generation: bool) -> str:
        """The template's text as it is, for comparing and for people."""
        return self._apply(conversation, lambda piece: piece.text, tools, generation)

    def render(
        self, conversation: Sequence[Entry], tools: Sequence[ToolSpec], generation: bool
    ) -> Rendered:
        """The text and where content stands in it; content that is not found again is made harmless."""
        plain = self.text(conversation, tools, generation)
        pieces = [piece for entry in conversation for piece in entry.pieces]
        marks = _Placeholders(pieces, plain)
        marked = self._apply(conversation, marks.write, tools, generation)
        restored = marks.restore(marked)
        if restored.text == plain:
            return restored
        return Rendered(self._apply(conversation, self._harmless, tools, generation), ())

    def encode(self, rendered: Rendered) -> list[int]:
        """Tokens of a rendered text, in which only the template's own special tokens are special."""
        hostile = _touched(rendered.content, self._controls.find(rendered.text))
        tokens = self._encode_apart(rendered.text, hostile)
        if self._special(tokens) != self._own_special(rendered):
            # A normaliser can turn text that looks harmless into a control token.
            return self._encode_apart(rendered.text, rendered.content)
        return tokens

    def encode_pieces(self, pieces: Iterable[Piece]) -> list[int]:
        """Tokens of pieces that stand on their own, such as an expert's action."""
        text, spans = "", []
        for piece in pieces:
            if not piece.trusted:
                spans.append((len(text), len(text) + len(piece.text)))
            text += piece.text
        return self.encode(Rendered(text, tuple(spans)))

    def harmless_tools(self, tools: Sequence[ToolSpec]) -> list[ToolSpec]:
        """The same tools; what their authors wrote holds no control texts."""
        return [
            ToolSpec(
                self._harmless_text(tool.name),
                self._harmless_text(tool.description),
                self._harmless_json(tool.parameters),
            )
            for tool in tools
        ]

    def _apply(
        self,
        conversation: Sequence[Entry],
        write: Callable[[Piece], str],
        tools: Sequence[ToolSpec],
        generation: bool,
    ) -> str:
        chat = [self._chat(entry, write) for entry in conversation]
        functions = [tool.as_openai() for tool in tools] or None
        return self.tokenizer.apply_chat_template(chat, functions, generation)

    def _chat(self, entry: Entry, write: Callable[[Piece], str]) -> Json:
        """The dictionary a template takes. Names come from a model, so they are made harmless too."""
        chat: Json = {"role": entry.role, "content": "".join(write(piece) for piece in entry.pieces)}
        if entry.name is not None:
            chat["name"] = self._harmless_text(entry.name)
        if entry.tool_call_id is not None:
            chat["tool_call_id"] = self._harmless_text(entry.tool_call_id)
        return chat

    def _harmless(self, piece: Piece) -> str:
        return piece.text if piece.trusted else self._harmless_text(piece.text)

    def _harmless_text(self, text: str) -> str:
        """`text` that cannot become special, in the eyes of any normaliser: spaced out if need be."""
        broken = self._controls.broken(text)
        return broken if self._ids.isdisjoint(self.tokenizer.encode(broken)) else " ".join(broken)

    def _harmless_json(self, value: Any) -> Any:
        if isinstance(value, str):
            return self._harmless_text(value)
        if isinstance(value, dict):
            return {self._harmless_json(k): self._harmless_json(v) for k, v in value.items()}
        if isinstance(value, (list, tuple)):
            return [self._harmless_json(item) for item in value]
        return value

    def _encode_apart(self, text: str, apart: Sequence[Span]) -> list[int]:
        tokens: list[int] = []
        position = 0
        for start, stop in apart:
            tokens += self.tokenizer.encode(text[position:start]) if position < start else []
            tokens += self.tokenizer.encode_text(text[start:stop])
            position = stop
        return tokens + (self.tokenizer.encode(text[position:]) if position < len(text) else [])

    def _special(self, tokens: Iterable[int]) -> int:
        return sum(token in self._ids for token in tokens)

    def _own_special(self, rendered: Rendered) -> int:
        edges = [0, *(edge for span in rendered.content for edge in span), len(rendered.text)]
        own = [rendered.text[a:b] for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b]
        return sum(self._special(self.tokenizer.encode(text)) for text in own)


class _Placeholders:
    """Unique words that stand for content while a template is rendered."""

    def __init__(self, pieces: Sequence[Piece], plain: str) -> None:
        self._word = unused_word([plain, *(piece.text for piece in pieces)])
        self._contents: list[str] = []

    def write(self, piece: Piece) -> str:
        """A placeholder between the content's own outer white space; empty content stays empty."""
        core = piece.text.strip()
        if piece.trusted or not core:
            return piece.text
        start = piece.text.index(core)
        self._contents.append(core)
        word = f"{self._word}{len(self._contents) - 1}z"
        return piece.text[:start] + word + piece.text[start + len(core) :]

    def restore(self, marked: str) -> Rendered:
        parts: list[str] = []
        spans: list[Span] = []
        length = 0
        for index, part in enumerate(re.split(f"{self._word}([0-9]+)z", marked)):
            is_content = index % 2 == 1
            text = self._contents[int(part)] if is_content else part
            if is_content:
                spans.append((length, length + len(text)))
            parts.append(text)
            length += len(text)
        return Rendered("".join(parts), tuple(spans))


def unused_word(texts: Iterable[str]) -> str:
    """A word that occurs in none of these texts: nobody can write down his own text's hash."""
    digest = hashlib.sha256()
    for text in texts:
        digest.update(text.encode("utf-8", errors="surrogatepass"))
    return f"zq{digest.hexdigest()[:24]}x"


def _touched(spans: Sequence[Span], occurrences: Sequence[Span]) -> list[Span]:
    """The spans that share a character with an occurrence; both come in order of their starts."""
    touched: list[Span] = []
    starts = [start for start, _ in occurrences]
    longest = max((stop - start for start, stop in occurrences), default=0)
    for start, stop in spans:
        near = occurrences[bisect_right(starts, start - longest) : bisect_left(starts, stop)]
        if any(end > start for _, end in near):
            touched.append((start, stop))
    return touched
