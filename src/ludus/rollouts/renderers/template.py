"""A chat template's text as tokens, with content kept from writing special tokens.

The template is rendered twice: once as it is, and once with a placeholder for everything that somebody
else wrote, names included. Putting the content back in the placeholders' stead must give the first text
again; then it is known which characters are content. Text is encoded in one go, as the model's makers
did, unless some content would become a special token: that content alone is encoded by itself, as plain
text. Trimming does no harm to this: placeholders keep the white space around them.

A template that changes content (escapes it, deletes words from it) has no such places. There, control
texts in content are broken up before they are rendered, and the result is taken only if its special
tokens are those of the text with placeholders, one by one and in order: a template may join again what
was broken up. If so, content is broken up harder; if nothing helps, the template is refused.

What the authors of tools wrote is checked in the same way, once for each list of tools.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence

from ludus.core.failures import ConfigError
from ludus.core.messages import Json, ToolSpec
from ludus.core.tokenizer import Tokenizer
from ludus.rollouts.controls import ControlTexts
from ludus.rollouts.renderers.breaking import Breaker, Way
from ludus.rollouts.renderers.cache import Recent, tools_key
from ludus.rollouts.renderers.pieces import Entry, Piece
from ludus.rollouts.renderers.placeholders import Placeholders, Rendered, Span, Switches, anonymous

Writer = Callable[[Piece], str]

MOST_TOOL_LISTS = 256


class SafeTemplate:
    """Renders and encodes conversations with a tokenizer's chat template."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._controls = ControlTexts(tokenizer.controls)
        self._ids = frozenset(tokenizer.controls.values())
        self._breaker = Breaker(tokenizer)
        self._checked: Recent[list[ToolSpec]] = Recent(MOST_TOOL_LISTS)

    def text(self, conversation: Sequence[Entry], tools: Sequence[ToolSpec], generation: bool) -> str:
        """The template's text as it is, for comparing and for people."""
        return self._apply(conversation, lambda piece: piece.text, tools, generation)

    def tokens(
        self,
        conversation: Sequence[Entry],
        tools: Sequence[ToolSpec],
        generation: bool,
        after: str = "",
    ) -> list[int]:
        """The conversation, or what stands in it after a word of ours, with none but our special tokens."""
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
        """The same tools; what their authors wrote holds no control texts."""
        return [self._breaker.tool(tool, self._breaker.harmless) for tool in tools]

    def is_special(self, text: str) -> bool:
        """Whether a special token comes of `text`."""
        return bool(self._special(self.tokenizer.encode(text)))

    def _changed(
        self, pieces: Sequence[Piece], marked: str, render: Callable[[Writer], str]
    ) -> list[int]:
        """Tokens where the template changes content: `marked` says which special ones are its own."""
        own = [self._special(self.tokenizer.encode(marked))]
        switches = Switches(pieces)
        if switches.found:
            own.append(self._special(self.tokenizer.encode(render(switches.write))))
        for way in self._breaker.ways():
            tokens = self.tokenizer.encode(render(self._writer(way)))
            if self._special(tokens) in own:
                return tokens
        raise ConfigError(
            "the chat template rewrites content in such a way that special tokens come of it or get "
            "lost, however the content is broken up; give the tokenizer a chat_template that writes "
            "content as it is"
        )

    def _safe_tools(
        self, conversation: Sequence[Entry], tools: Sequence[ToolSpec], generation: bool
    ) -> list[ToolSpec]:
        """The tools as the template may be given them, found out once for a list and a run of roles."""
        if not tools:
            return []
        key = (tuple(entry.role for entry in conversation), tools_key(tools), generation)
        return self._checked.get(key, lambda: self._check_tools(conversation, tools, generation))

    def _check_tools(
        self, conversation: Sequence[Entry], tools: Sequence[ToolSpec], generation: bool
    ) -> list[ToolSpec]:
        pieces = [piece for entry in conversation for piece in entry.all_pieces()]

        def special(shown: Sequence[ToolSpec]) -> list[int]:
            marks = Placeholders(piece.text for piece in pieces)
            text = self._apply(conversation, marks.write, shown, generation)
            return self._special(self.tokenizer.encode(text))

        own = special(anonymous(tools))
        for way in self._breaker.ways():
            safe = [self._breaker.tool(tool, way) for tool in tools]
            if special(safe) == own:
                return safe
        names = ", ".join(repr(tool.name) for tool in tools)
        raise ConfigError(
            f"the chat template makes special tokens of what the tools {names} are called, or of what "
            "their descriptions say; rename the tool whose name stands inside a special token"
        )

    def _apply(
        self,
        conversation: Sequence[Entry],
        write: Writer,
        tools: Sequence[ToolSpec],
        generation: bool,
    ) -> str:
        chat = [_chat(entry, write) for entry in conversation]
        functions = [tool.as_openai() for tool in tools] or None
        return self.tokenizer.apply_chat_template(chat, functions, generation)

    def _writer(self, way: Way) -> Writer:
        return lambda piece: self._breaker.piece(piece, way)

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


def _chat(entry: Entry, write: Writer) -> Json:
    """The dictionary a template takes. Names may come from a model or a server: they are content too."""
    written = [write(piece) for piece in entry.all_pieces()]
    count = len(entry.pieces)
    chat: Json = {"role": entry.role, "content": "".join(written[:count])}
    keys = [key for key in ("name", "tool_call_id") if getattr(entry, key) is not None]
    return chat | dict(zip(keys, written[count:], strict=True))


def _end(text: str, word: str) -> int:
    """Where the first `word` in `text` ends."""
    position = text.find(word)
    if position < 0:
        raise ConfigError(
            "the chat template leaves out what the assistant said, so nothing can be appended to "
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
