"""A chat template's text as tokens, in which no content can forge special tokens.

The template is rendered twice: as it is, and with a placeholder for all content (whatever a user, a tool or
the model wrote, names included). Putting the content back into the placeholders must give the first text
again; then it is known which characters are content. The text is encoded in one go, as in the model's
training, unless some content would become a special token: that content alone is encoded by itself, as
plain text. Trimming does no harm: placeholders keep the white space around them.

A template that changes content (escapes it, deletes words from it) has no such places. There, control texts
in content are escaped by separators before rendering, and the result is taken only if its special tokens
are those of the text with placeholders, one by one and in order: a template may join again what was
separated. If so, more separators are tried; if none helps, the template is refused.

The texts of tools' authors are checked in the same way, once for each list of tools.
"""

from __future__ import annotations

import hashlib
import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ludus.chat.chat_entries import ChatEntry, Piece, Writer, as_chat
from ludus.chat.tokenizers import ControlTexts
from ludus.core.failures import ConfigError
from ludus.core.lru import LruCache
from ludus.core.messages import ToolSpec
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


def short_id(id: str) -> str:
    """The id of a call, nine characters long."""
    return id if len(id) == SHORTEST_IDENTIFIER else _digest(id)[:SHORTEST_IDENTIFIER]


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


MOST_TOOL_LISTS = 256


class SafeTemplate:
    """Renders and encodes conversations with a tokenizer's chat template."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._controls = ControlTexts(tokenizer.controls)
        self._ids = frozenset(tokenizer.controls.values())
        self._escaper = Escaper(tokenizer)
        self._checked: LruCache[list[ToolSpec]] = LruCache(MOST_TOOL_LISTS)

    def text(
        self, conversation: Sequence[ChatEntry], tools: Sequence[ToolSpec], generation: bool
    ) -> str:
        """The template's text as it is, for comparing and for people."""
        return self._apply(conversation, lambda piece: piece.text, tools, generation)

    def tokens(
        self,
        conversation: Sequence[ChatEntry],
        tools: Sequence[ToolSpec],
        generation: bool,
        after: str = "",
        inside: Sequence[str] | None = None,
    ) -> list[int]:
        """Encode the rendered conversation, or its part after `after`; only the template's special tokens.

        Where `after` stands in a call, the part begins with the next control text that is not `inside` one.
        """

        def end(text: str) -> int:
            return self._end(text, after, inside)

        pieces = [piece for entry in conversation for piece in entry.all_pieces()]
        safe = self._safe_tools(conversation, tools, generation)
        plain = self.text(conversation, safe, generation)
        marks = Placeholders([plain, *(piece.text for piece in pieces)])
        marked = self._apply(conversation, marks.write, safe, generation)
        restored = marks.restore(marked)
        if restored.text == plain:
            return self.encode(restored.after(end(plain)))

        def render(write: Writer) -> str:
            text = self._apply(conversation, write, safe, generation)
            return text[end(text) :]

        return self._changed(pieces, marked[end(marked) :], render)

    def _end(self, text: str, word: str, inside: Sequence[str] | None) -> int:
        """Where the first `word` in `text` ends, or the call that it stands in."""
        position = text.find(word)
        if position < 0:
            raise ConfigError(
                "the chat template leaves out the assistant's text, so nothing can be appended to "
                "it; give the tokenizer another chat_template"
            )
        position += len(word)
        if inside is None:
            return position
        found = (
            at
            for at, stop in self._controls.find(text[position:])
            if text[position + at : position + stop] not in inside
        )
        return position + next(found, len(text) - position)

    def without_end(self, text: str) -> str:
        """A rendered conversation without the control text that ends its last turn."""
        rest = text.rstrip()
        ends = [t for t in self.tokenizer.controls if rest.endswith(t)]
        return rest.removesuffix(max(ends, key=len)) if ends else text

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
        """These tools without control texts in what their authors wrote."""
        return [self._escaper.tool(tool, self._escaper.harmless) for tool in tools]

    def is_special(self, text: str) -> bool:
        """Whether a special token comes of `text`."""
        return bool(self._special(self.tokenizer.encode(text)))

    def _changed(
        self, pieces: Sequence[Piece], marked: str, render: Callable[[Writer], str]
    ) -> list[int]:
        """Tokens where the template changes content: `marked` says which special ones are its own."""
        own = [self._special(self.tokenizer.encode(marked))]
        switches = SwitchPlaceholders(pieces)
        if switches.found:
            own.append(self._special(self.tokenizer.encode(render(switches.write))))
        for escape in self._escaper.escapes():
            tokens = self.tokenizer.encode(render(self._writer(escape)))
            if self._special(tokens) in own:
                return tokens
        raise ConfigError(
            "the chat template rewrites content in such a way that special tokens come of it or get "
            "lost, however the content is broken up; give the tokenizer a chat_template that writes "
            "content as it is"
        )

    def _safe_tools(
        self, conversation: Sequence[ChatEntry], tools: Sequence[ToolSpec], generation: bool
    ) -> list[ToolSpec]:
        """The tools as the template may be given them, found out once for a list and a run of roles."""
        if not tools:
            return []
        key = (tuple(entry.role for entry in conversation), tools_key(tools), generation)
        return self._checked.get(key, lambda: self._check_tools(conversation, tools, generation))

    def _check_tools(
        self, conversation: Sequence[ChatEntry], tools: Sequence[ToolSpec], generation: bool
    ) -> list[ToolSpec]:
        pieces = [piece for entry in conversation for piece in entry.all_pieces()]

        def special(shown: Sequence[ToolSpec]) -> list[int]:
            marks = Placeholders(piece.text for piece in pieces)
            text = self._apply(conversation, marks.write, shown, generation)
            return self._special(self.tokenizer.encode(text))

        own = special(anonymous_tools(tools))
        for escape in self._escaper.escapes():
            safe = [self._escaper.tool(tool, escape) for tool in tools]
            if special(safe) == own:
                return safe
        names = ", ".join(repr(tool.name) for tool in tools)
        raise ConfigError(
            f"the chat template makes special tokens of what the tools {names} are called, or of what "
            "their descriptions say; rename the tool whose name stands inside a special token"
        )

    def _apply(
        self,
        conversation: Sequence[ChatEntry],
        write: Writer,
        tools: Sequence[ToolSpec],
        generation: bool,
    ) -> str:
        chat = [as_chat(entry, write) for entry in conversation]
        functions = [tool.as_openai() for tool in tools] or None
        return self.tokenizer.apply_chat_template(chat, functions, generation)

    def _writer(self, escape: Escape) -> Writer:
        return lambda piece: self._escaper.piece(piece, escape)

    def _encode_apart(self, text: str, apart: Sequence[Span]) -> list[int]:
        tokens: list[int] = []
        position = 0
        for start, stop in apart:
            tokens += self.tokenizer.encode(text[position:start]) if position < start else []
            tokens += self.tokenizer.encode_text(text[start:stop])
            position = stop
        return tokens + (self.tokenizer.encode(text[position:]) if position < len(text) else [])

    def _special(self, tokens: Iterable[int]) -> list[int]:
        return [token for token in tokens if token in self._ids]

    def _own_special(self, rendered: Rendered) -> list[int]:
        edges = [0, *(edge for span in rendered.content for edge in span), len(rendered.text)]
        own = [rendered.text[a:b] for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b]
        return [token for text in own for token in self._special(self.tokenizer.encode(text))]


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


_last_key: tuple[object, str] = (None, "")
"""The tools whose key was asked for last, and the key: one turn asks for the same ones several times."""


def tools_key(tools: Sequence[ToolSpec]) -> str:
    """A short key: the same for tools that look the same to a model."""
    global _last_key
    if not tools:
        return ""
    known, key = _last_key
    if known is tools:
        return key
    shown = [(tool.name, tool.description, tool.parameters) for tool in tools]
    key = hashlib.sha256(json.dumps(shown, default=repr).encode()).hexdigest()
    if isinstance(tools, tuple):
        _last_key = tools, key
    return key
