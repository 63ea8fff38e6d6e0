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
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence

from ludus.chat.template_content import (
    ChatEntry,
    Escape,
    Escaper,
    Piece,
    Placeholders,
    Rendered,
    Span,
    SwitchPlaceholders,
    anonymous_tools,
)
from ludus.chat.tokenizers import ControlTexts
from ludus.core.failures import ConfigError
from ludus.core.lru import LruCache
from ludus.core.messages import Json, ToolSpec
from ludus.core.tokenizer import Tokenizer

Writer = Callable[[Piece], str]

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
    ) -> list[int]:
        """Encode the rendered conversation, or its part after `after`; only the template's special tokens."""
        pieces = [piece for entry in conversation for piece in entry.all_pieces()]
        safe = self._safe_tools(conversation, tools, generation)
        plain = self.text(conversation, safe, generation)
        marks = Placeholders([plain, *(piece.text for piece in pieces)])
        marked = self._apply(conversation, marks.write, safe, generation)
        restored = marks.restore(marked)
        if restored.text == plain:
            return self.encode(restored.after(_end(plain, after)))

        def render(write: Writer) -> str:
            text = self._apply(conversation, write, safe, generation)
            return text[_end(text, after) :]

        return self._changed(pieces, marked[_end(marked, after) :], render)

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
        chat = [_chat(entry, write) for entry in conversation]
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


def _chat(entry: ChatEntry, write: Writer) -> Json:
    """The dictionary a template takes. Names may come from a model or a server: they are content too."""
    written = [write(piece) for piece in entry.all_pieces()]
    count = len(entry.pieces)
    chat: Json = {"role": entry.role, "content": _content(entry.pieces, written[:count])}
    keys = [key for key in ("name", "tool_call_id") if getattr(entry, key) is not None]
    return chat | dict(zip(keys, written[count:], strict=True))


def _content(pieces: Sequence[Piece], written: Sequence[str]) -> str | list[Json]:
    """A text; with images in it, a list of parts."""
    if not any(piece.is_image for piece in pieces):
        return "".join(written)
    parts: list[Json] = []
    for piece, text in zip(pieces, written, strict=True):
        if piece.is_image:
            parts.append({"type": "image"})
        elif parts and parts[-1]["type"] == "text":
            parts[-1]["text"] += text
        elif text:
            parts.append({"type": "text", "text": text})
    return parts


def _end(text: str, word: str) -> int:
    """Where the first `word` in `text` ends."""
    position = text.find(word)
    if position < 0:
        raise ConfigError(
            "the chat template leaves out the assistant's text, so nothing can be appended to "
            "it; give the tokenizer another chat_template"
        )
    return position + len(word)


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
