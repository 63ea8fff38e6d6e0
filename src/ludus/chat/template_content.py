"""Content in a chat template: what is content, words that stand for it, and escaping it.

Placeholders stand for content while a template is rendered, and show afterwards where it stands. Templates that
change content get it escaped by separators; each way of escaping is stronger than the one before.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ludus.chat.tokenizers import ControlTexts
from ludus.core.messages import Role, ToolSpec
from ludus.core.tokenizer import Tokenizer

Escape = Callable[[str], str]
Span = tuple[int, int]

_SHAPE = "zq[0-9a-f]{24}x[0-9]+z"
"""Pattern of the text of `Placeholders`: an `unused_word` and a number."""
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
"""Words that templates look for in a tool's parameters; anything else there is the author's."""

SEPARATORS = (" ", ".", "_")
"""The first disturbs least. A template that removes spaces seldom removes the others."""
_PLAIN_IDENTIFIER = re.compile(r"[A-Za-z0-9_-]+")


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a message. Special tokens are recognised in trusted pieces only."""

    text: str
    trusted: bool = False
    identifier: bool = False
    """The id of a call: it may be replaced by another one, but not by a longer one."""
    is_image: bool = False
    """An image, for a template that is given images as parts of their own and writes their placeholders."""


@dataclass(frozen=True, slots=True)
class ChatEntry:
    """One message of the conversation that a chat template renders."""

    role: Role
    pieces: tuple[Piece, ...]
    name: str | None = None
    tool_call_id: str | None = None

    def all_pieces(self) -> list[Piece]:
        """The template's input for this message: its content, and the names that come with it."""
        named = [] if self.name is None else [Piece(self.name)]
        identified = [] if self.tool_call_id is None else [Piece(self.tool_call_id, identifier=True)]
        return [*self.pieces, *named, *identified]


def split_at_marks(content: str, marks: Sequence[str]) -> tuple[Piece, ...]:
    """`content` cut at its marks, which are trusted."""
    parts = re.split("(" + "|".join(re.escape(mark) for mark in marks) + ")", content)
    return tuple(Piece(part, trusted=index % 2 == 1) for index, part in enumerate(parts) if part)


@dataclass(frozen=True, slots=True)
class Rendered:
    """A text, and which parts of it are untrusted content."""

    text: str
    content: tuple[Span, ...]

    def after(self, position: int) -> Rendered:
        """The rendered text from `position` on."""
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
    """These tools with meaningless words in place of all that their authors wrote."""
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


class Escaper:
    """Writes content so that the tokenizer makes no special token of it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._controls = ControlTexts(tokenizer.controls)
        self._ids = frozenset(tokenizer.controls.values())

    def escapes(self) -> list[Escape]:
        """From the mildest: inside control texts only; after all that could begin one; everywhere."""
        opened = [_with(separator, self._controls.opened) for separator in SEPARATORS]
        spread = [_with(separator, _spread) for separator in SEPARATORS]
        return [self.harmless, *opened, *spread]

    def harmless(self, text: str) -> str:
        """`text` that gives no special token by itself, after any normalisation: spaced out if need be."""
        broken = self._controls.broken(text)
        return broken if self._ids.isdisjoint(self._tokenizer.encode(broken)) else " ".join(broken)

    def piece(self, piece: Piece, escape: Escape) -> str:
        """The template's input for `piece`. An identifier that could do harm gets another name."""
        if piece.trusted:
            return piece.text
        if not piece.identifier:
            return escape(piece.text)
        kept = escape == self.harmless and _PLAIN_IDENTIFIER.fullmatch(piece.text)
        return piece.text if kept else same_length(piece.text, len(piece.text))

    def tool(self, tool: ToolSpec, escape: Escape) -> ToolSpec:
        """This tool, escaped. Its name is kept as far as it can be: the model has to call it by that."""
        return ToolSpec(
            self.harmless(tool.name), escape(tool.description), each_text(tool.parameters, escape)
        )


def _with(separator: str, separate: Callable[[str, str], str]) -> Escape:
    return lambda text: separate(text, separator)


def _spread(text: str, separator: str) -> str:
    """A separator around every character."""
    return f"{separator}{separator.join(text)}{separator}" if text.strip() else text


def each_text(value: Any, escape: Escape) -> Any:
    """Every text of a JSON value, keys included; not the schema's own words, which templates look for."""
    if isinstance(value, str):
        return value if value in SCHEMA_WORDS else escape(value)
    if isinstance(value, dict):
        return {each_text(key, escape): each_text(item, escape) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [each_text(item, escape) for item in value]
    return value
