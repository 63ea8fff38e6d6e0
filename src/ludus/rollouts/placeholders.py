"""Words that stand for content while a chat template is rendered, and show afterwards where it stands."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ludus.core.messages import ToolSpec
from ludus.rollouts.chat_entries import Piece

Escape = Callable[[str], str]
Span = tuple[int, int]

_SHAPE = "zq[0-9a-f]{24}x[0-9]+z"
"""What `Placeholders` writes: an `unused_word` and a number."""
_WORDS = re.compile(f"({_SHAPE})")

SHORTEST_IDENTIFIER = 9
_SWITCH = re.compile(r"/(?:no_think|nothink|think|system_override)")
"""Words by which users select a template's thinking mode; a closed list."""
SCHEMA_WORDS = frozenset(
    {
        *("type", "object", "array", "string", "number", "integer", "boolean", "null", "nullable"),
        *("properties", "additionalProperties", "required", "items", "description", "title", "format"),
        *("enum", "const", "default", "anyOf", "oneOf", "allOf"),
    }
)
"""What templates look for in a tool's parameters; anything else there is the author's."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """A text, and which parts of it are untrusted content."""

    text: str
    content: tuple[Span, ...]

    def after(self, position: int) -> Rendered:
        """What stands from `position` on."""
        spans = ((max(a, position) - position, b - position) for a, b in self.content if b > position)
        return Rendered(self.text[position:], tuple(spans))


class Placeholders:
    """Unique words for content; afterwards they show where the content stands."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._word = unused_word(texts)
        self._contents: dict[str, str] = {}
        self._identifiers: list[str] = []

    def write(self, piece: Piece) -> str:
        """A placeholder between the content's own outer white space; empty content stays empty."""
        core = piece.text.strip()
        if piece.trusted or not core:
            return piece.text
        word = f"{self._word}{len(self._contents)}z"
        if piece.identifier:
            word, core = same_length(word, len(piece.text)), piece.text
            self._identifiers.append(word)
        self._contents[word] = core
        return _within_space(piece.text, core, word)

    def restore(self, marked: str) -> Rendered:
        """The text with the content in its places."""
        parts: list[str] = []
        spans: list[Span] = []
        length = 0
        for part in self._pattern().split(marked):
            text = self._contents.get(part, part)
            if part in self._contents:
                spans.append((length, length + len(text)))
            parts.append(text)
            length += len(text)
        return Rendered("".join(parts), tuple(spans))

    def _pattern(self) -> re.Pattern[str]:
        """Finds our words, and perhaps others of their kind; compiling one for each text would be slow."""
        if not self._identifiers:
            return _WORDS
        return re.compile(f"({'|'.join([_SHAPE, *self._identifiers])})")


class SwitchPlaceholders:
    """Placeholders that keep words such as `/no_think`, by which content selects a thinking mode."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self._word = unused_word(piece.text for piece in pieces)
        self.found = any(self._of(piece) for piece in pieces)

    def write(self, piece: Piece) -> str:
        core = piece.text.strip()
        if piece.trusted or not core:
            return piece.text
        if piece.identifier:
            return same_length(self._word + piece.text, len(piece.text))
        # Between two placeholders: no template that merely writes around content can complete them.
        return _within_space(piece.text, core, " ".join([self._word, *self._of(piece), self._word]))

    @staticmethod
    def _of(piece: Piece) -> list[str]:
        return [] if piece.trusted or piece.identifier else _SWITCH.findall(piece.text)


def anonymous_tools(tools: Sequence[ToolSpec]) -> list[ToolSpec]:
    """The same tools with meaningless words in place of all that their authors wrote."""
    words: dict[str, str] = {}

    def word(text: str) -> str:
        return words.setdefault(text, f"zqtool{len(words)}z") if text.strip() else text

    return [
        replace(
            tool,
            name=word(tool.name),
            description=word(tool.description),
            parameters=each_text(tool.parameters, word),
        )
        for tool in tools
    ]


def unused_word(texts: Iterable[str]) -> str:
    """A word that occurs in none of these texts: no text can contain its own hash."""
    return f"zq{_digest(*texts)[:24]}x"


def same_length(text: str, length: int) -> str:
    """A meaningless word as long as an identifier: some templates insist on nine letters and digits."""
    digits = _digest(text) * (length // 64 + 1)
    return f"zq{digits}"[: max(length, SHORTEST_IDENTIFIER)]


def _digest(*texts: str) -> str:
    digest = hashlib.sha256()
    for text in texts:
        digest.update(text.encode("utf-8", errors="surrogatepass"))
    return digest.hexdigest()


def _within_space(text: str, core: str, word: str) -> str:
    start = text.index(core)
    return text[:start] + word + text[start + len(core) :]


def each_text(value: Any, escape: Escape) -> Any:
    """Every text of a JSON value, keys included; not the schema's own words, which templates look for."""
    if isinstance(value, str):
        return value if value in SCHEMA_WORDS else escape(value)
    if isinstance(value, dict):
        return {each_text(key, escape): each_text(item, escape) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [each_text(item, escape) for item in value]
    return value
