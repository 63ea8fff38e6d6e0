"""From messages to tokens, and on from the tokens that were sampled."""

from __future__ import annotations

import copy
import logging
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import takewhile
from typing import Literal, Self

from ludus.chat.chat_entries import ChatEntry, Piece, split_at_marks
from ludus.chat.chat_template import SafeTemplate, tools_key, unused_word
from ludus.chat.formats.base import THINK, ActionFormat, is_thinking
from ludus.chat.template_features import (
    TOOL,
    action_text,
    chat_entries,
    content_pieces,
    is_rewritten,
    probe,
    shown_images,
    stub_entries,
    with_description,
)
from ludus.core.failures import ConfigError
from ludus.core.generation import Completion, FinishReason, first_stop
from ludus.core.lru import LruCache
from ludus.core.messages import MediaSpan, Message, ToolSpec
from ludus.core.tokenizer import Tokenizer, images_of
from ludus.core.trajectory import SegmentKind, TokenSequence

log = logging.getLogger(__name__)

MOST_BYTES = 1 << 24
MOST_CHARACTERS = 2000
"""Longer conversations are not cached: they hardly occur twice."""
_OVERHEAD = 512

History = Literal["strict", "keep", "split"]
Turns = Literal["chat", "inline"]

MOST_BOUND = 16
"""How many lists of tools have their own renderer, each with its cache."""


@dataclass(frozen=True, slots=True)
class NextContext:
    """The model's next context: tokens to append, or a whole context that starts a new sequence."""

    tokens: list[int]
    restart: bool = False
    continues_turn: bool = False
    """The assistant's turn was not closed: the next action continues it."""
    media: tuple[MediaSpan, ...] = ()
    """Which of the tokens stand for images."""


class Renderer:
    """Renders conversations for one tokenizer, its chat template, and one action format.

    Tokens that were sampled are never decoded and encoded again. What is new since then is rendered and
    encoded on its own, and appended.

    `history` says what to do with a template that rewrites earlier turns (many drop old thinking):
    "strict" refuses it, "keep" appends to the history as it was generated, "split" starts a new sequence
    with the rewritten conversation as its prompt whenever the template rewrites something.

    `turns` says where results go: "chat" closes the assistant's turn and renders them as messages; "inline"
    appends them to it as raw text in the format's frame, and the model goes on in the same turn, and in the
    same thought, as in Search-R1, ReTool and VerlTool.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        format: ActionFormat,
        history: History = "strict",
        turns: Turns = "chat",
    ) -> None:
        if history not in ("strict", "keep", "split"):
            raise ConfigError(f"history must be 'strict', 'keep' or 'split', not {history!r}")
        if turns not in ("chat", "inline"):
            raise ConfigError(f"turns must be 'chat' or 'inline', not {turns!r}")
        if turns == "inline" and history == "split":
            raise ConfigError(
                "history='split' renders earlier turns anew, and with turns='inline' they hold results: "
                "choose history='keep'"
            )
        if turns == "inline" and not format.inline:
            format = format.inlined()
        self.tokenizer = tokenizer
        self.format = format
        self.history = history
        self.turns = turns
        self.images = images_of(tokenizer)
        """How images are shown; None for a model that reads text only."""
        self._template = SafeTemplate(tokenizer)
        self._cache: LruCache[array[int]] = LruCache(MOST_BYTES, _bytes)
        """Short conversations: many episodes share tools and prompt, and read the same short results."""
        self._bound: LruCache[Self | None] = LruCache(MOST_BOUND)
        marks = {tokenizer.controls.get(mark) for mark in format.marks}
        self._ends: list[int] = []
        """The tokens that end an action with calls, and one without, where no one token ends every turn."""
        self.stop_tokens = tuple(token for token in tokenizer.stop_tokens if token not in marks)
        """Tokens that end an action. What the format takes for a mark inside an action is none."""
        self.features = probe(self._template, format)
        self.end_of_turn = self._find_end_of_turn()
        ends = [tokenizer.controls.get(text) for text in format.turn_ends or ()]
        if self.end_of_turn is None and None not in ends:
            self._ends = [token for token in ends if token is not None]
            self.stop_tokens = tuple(dict.fromkeys((*self.stop_tokens, *self._ends)))
        if history == "strict" and self.features.rewrites:
            raise ConfigError(
                "this chat template rewrites earlier turns (seen with: "
                f"{'; '.join(self.features.rewrites)}), so what the model is shown later is not what "
                "it read and sampled before. Choose history='keep' (the history stays as it was generated) "
                "or history='split' (a rewritten history starts a new training row)"
            )

    def bound(self, tools: Sequence[ToolSpec]) -> Self:
        """A renderer whose format is fitted to these tools: for formats with a tag for each tool.

        Episodes with equal tools share one renderer and its cache.
        """
        return self._bound.get(tools_key(tools), lambda: self._bind(tools)) or self

    def _bind(self, tools: Sequence[ToolSpec]) -> Self | None:
        """None where the format has nothing to fit."""
        format = self.format.bind(tools)
        _refuse_unreachable(format, tools)
        if format is self.format:
            return None
        self._refuse_special_tags(format)
        made = copy.copy(self)
        made.format = format
        made._cache, made._bound = LruCache(MOST_BYTES, _bytes), LruCache(MOST_BOUND)
        return made

    @property
    def preserves_prefixes(self) -> bool:
        """Whether the template leaves earlier turns as they were."""
        return not self.features.rewrites

    def describe(self, tools: Sequence[ToolSpec]) -> str | None:
        """The system prompt's text about the tools; None where the chat template writes it."""
        if self.features.native_tools:
            return None
        return self.format.describe(self._template.harmless_tools(tools))

    def fewest_tokens(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> int:
        """A lower bound on the tokens of these messages and tools, without encoding them."""
        told = sum(len("".join(tool.description.split())) for tool in tools)  # formats fold white space
        said = sum(len(message.content) for message in messages)
        return (told + said) // self.tokenizer.longest_token

    def prompt(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> list[int]:
        """The tokens of a whole conversation, up to where the model goes on."""
        return self.opening(messages, tools).tokens

    def opening(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> NextContext:
        """A whole conversation as tokens, and where its images stand. `ImageError`: one cannot be read."""
        return self._with_images(NextContext(self._prompt(messages, tools), restart=True), messages)

    def _with_images(self, context: NextContext, messages: Sequence[Message]) -> NextContext:
        """Expand each image's one placeholder to all tokens of the image."""
        if not any(message.media for message in messages):
            return context
        if self.images is None:
            warn_of_unseen()
            return context
        images = [one for message in messages for one in shown_images(message)]
        if context.tokens.count(self.images.token) != len(images):
            raise ConfigError(
                f"the chat template writes {context.tokens.count(self.images.token)} image tokens for "
                f"{len(images)} images; give the tokenizer another chat_template"
            )
        tokens: list[int] = []
        spans: list[MediaSpan] = []
        left = iter(images)
        for token in context.tokens:
            if token != self.images.token:
                tokens.append(token)
                continue
            image = next(left)
            start = len(tokens)
            tokens += self.images.tokens(image)
            spans.append(MediaSpan(image.sha256, start, len(tokens), image.data))
        return replace(context, tokens=tokens, media=tuple(spans))

    def _prompt(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[int]:
        made = chat_entries(messages, self.format, self.features)

        def render() -> list[int]:
            conversation, native = self._conversation(messages, tools)
            return self._template.tokens(conversation, native, True)

        return self._cached("prompt", made, tools, render)

    def _cached(
        self,
        kind: str,
        entries: Sequence[ChatEntry],
        tools: Sequence[ToolSpec],
        render: Callable[[], list[int]],
    ) -> list[int]:
        if sum(len(piece.text) for entry in entries for piece in entry.all_pieces()) > MOST_CHARACTERS:
            return render()
        key = (kind, tuple(entries), tools_key(tools))
        return list(self._cache.get(key, lambda: array("i", render())))

    def observation(
        self,
        action: Sequence[int],
        messages: Sequence[Message],
        tools: Sequence[ToolSpec] = (),
    ) -> list[int]:
        """Tokens to append after a sampled action: the rest of its turn, `messages`, the next opening.

        An end-of-turn token that the model sampled is not repeated; one that it did not sample (a stop
        string, a length cut) is added here, and belongs to the observation. With inline turns, results come
        first, as raw text in the turn itself, unless the model has closed it.
        """
        return self._with_images(
            NextContext(self._observation(action, messages, tools)), messages
        ).tokens

    def _observation(
        self, action: Sequence[int], messages: Sequence[Message], tools: Sequence[ToolSpec]
    ) -> list[int]:
        results = self._inline_results(action, messages)
        if results:
            raw = self._template.encode_pieces(
                piece for result in results for piece in self._raw(result)
            )
            following = messages[len(results) :]
            return [*raw, *self._observation([], following, tools)] if following else raw
        new = chat_entries(messages, self.format, self.features)
        # Tools stand at the front, which is cut off here: any tool will do, and a small one is quick.
        native = [TOOL] if tools and self.features.native_tools else []
        rest = self._cached("rest", new, native, lambda: self._rest_of_turn(new, native))
        return self._without_sampled_end(action, rest)

    def _inline_results(self, action: Sequence[int], messages: Sequence[Message]) -> Sequence[Message]:
        """The results that go into the turn of `action` itself."""
        if self.turns != "inline" or not action or self._is_stop(action[-1]):
            return []
        return list(takewhile(lambda message: message.role == "tool", messages))

    def _raw(self, result: Message) -> list[Piece]:
        """A result in its frame, on lines of its own. The frame is trusted, the result is not."""
        opening, closing = self.format.result_frame
        # the template writes nothing here, so the placeholder of an image stands in the text
        pieces = content_pieces(result, replace(self.features, image_roles=frozenset()), "tool")
        return [Piece(f"\n{opening}", True), *pieces, Piece(f"{closing}\n", True)]

    def _rest_of_turn(self, new: Sequence[ChatEntry], native: Sequence[ToolSpec]) -> list[int]:
        """The template's text after an assistant's text, when `new` follows."""
        word = unused_word(piece.text for entry in new for piece in entry.all_pieces())
        stub = stub_entries(new, self.features, word)
        inside = self.format.marks if stub[-1].calls else None
        return self._template.tokens([*stub, *new], native, True, after=word, inside=inside)

    def next_context(
        self,
        sequence: TokenSequence,
        conversation: Sequence[Message],
        messages: Sequence[Message],
        tools: Sequence[ToolSpec] = (),
    ) -> NextContext:
        """The context after `sequence`, whose last action is the last message of `conversation`."""
        if self.needs_split(conversation, messages, tools):
            return self.opening([*conversation, *messages], tools)
        last = sequence.segments[-1] if sequence.segments else None
        action = last.tokens if last and last.kind is SegmentKind.ACTION else []
        results = self._inline_results(action, messages)
        following = NextContext(
            self._observation(action, messages, tools),
            continues_turn=bool(results) and len(results) == len(messages),
        )
        return self._with_images(following, messages)

    def needs_split(
        self,
        conversation: Sequence[Message],
        messages: Sequence[Message],
        tools: Sequence[ToolSpec] = (),
    ) -> bool:
        """Whether the template rewrites this very conversation when `messages` follow, and we split."""
        if self.history != "split" or self.preserves_prefixes:
            return False
        if not conversation or conversation[-1].role != "assistant":
            return False
        before, native = self._conversation(conversation, tools)
        new = chat_entries(messages, self.format, self.features)
        return is_rewritten(self._template, before, new, native, self.features)

    def text_of(
        self, completion: Completion, *, continues_turn: bool = False, before: Sequence[str] = ()
    ) -> str:
        """The text of an action: without its stop token, and with the thought that the prompt opened.

        One that goes on in a turn has no such prompt before it. What the first of the stop strings `before`
        ends is left out with it; they are looked for in what was sampled, not in the prompt's words.
        """
        tokens = completion.tokens
        if completion.finish is FinishReason.STOP_TOKEN and tokens[-1:] and self._is_stop(tokens[-1]):
            tokens = tokens[:-1]
        text = self.tokenizer.decode(tokens)
        if (stop := first_stop(text, before)) is not None:
            text = text[: stop[0]]
        if continues_turn:
            return text
        return self.features.opens_thinking + text.removeprefix(self.features.lead)

    def action_text(self, message: Message) -> str:
        """An assistant's message as the text of an action, its calls included."""
        return action_text(message, self.format)

    def action_tokens(self, text: str, turn: str = "") -> list[int]:
        """An action that the model did not sample, as it would have sampled it, end of turn included.

        `turn` is the text of the same turn before it, where turns are inline. There, a call stays inside
        an open thought and does not end the turn.
        """
        opened, lead = ("", "") if turn else (self.features.opens_thinking, self.features.lead)
        calls = self.turns == "inline" and bool(self.format.parse(text).calls)
        if calls:
            stops = self.format.stops  # one may have a line break after the end of a call
            text += "\n" if not text.endswith(stops) and f"{text}\n".endswith(stops) else ""
        elif (opened and not text.startswith(THINK[0])) or (is_thinking(turn) and THINK[1] not in text):
            text = f"{opened}\n{THINK[1]}\n\n{text}"  # a thought is open: it is closed first
        pieces = split_at_marks(lead + text.removeprefix(opened), (*THINK, *self.format.marks))
        tokens = self._template.encode_pieces(pieces)
        end = self._end_after(text)
        return tokens if calls or end is None else [*tokens, end]

    def _end_after(self, text: str) -> int | None:
        """The token that ends an action with this text."""
        if not self._ends:
            return self.end_of_turn
        return self._ends[0 if self.format.parse(text).calls else 1]

    def _find_end_of_turn(self) -> int | None:
        """The stop token that the template writes after an assistant's text, if it does."""
        rest = self.observation([], [])
        found = next((index for index, token in enumerate(rest) if self._is_stop(token)), None)
        if found is None or self.tokenizer.decode(rest[:found]).strip():
            return None
        return rest[found]

    def _conversation(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec]
    ) -> tuple[list[ChatEntry], list[ToolSpec]]:
        """Inputs of the template: entries, and the tools that it describes itself."""
        made = chat_entries(messages, self.format, self.features)
        return with_description(made, self.describe(tools) or "", self.format, self.features), (
            list(tools) if self.features.native_tools else []
        )

    def _refuse_special_tags(self, format: ActionFormat) -> None:
        """Marks are special tokens where the tokenizer has them: no tool's author may choose which."""
        chosen = [mark for mark in format.marks if mark not in self.format.marks]
        special = [mark for mark in chosen if self._template.is_special(mark)]
        if special:
            raise ConfigError(
                f"a tool's name would make {special[0]!r} a tag of the format {format.name!r}, but that is "
                "a special token of this tokenizer; rename the tool, give the format its tags, or choose "
                "another format"
            )

    def _without_sampled_end(self, action: Sequence[int], rest: list[int]) -> list[int]:
        """`rest` without the end of turn that the action already ends with."""
        if not action or not self._is_stop(action[-1]):
            return rest
        ended = {action[-1]}
        if action[-1] in self._ends:
            # in a history the template may write another one, such as <|end|> for <|return|>
            ended |= set(self.tokenizer.stop_tokens) - set(self.stop_tokens)
        index = next((index for index, token in enumerate(rest) if token in ended), None)
        if index is None or self.tokenizer.decode(rest[:index]).strip():
            return rest
        return rest[index + 1 :]

    def _is_stop(self, token: int) -> bool:
        return token in self.stop_tokens


@lru_cache(maxsize=1)
def warn_of_unseen() -> None:
    """Once in a process; the metric has the count."""
    log.warning(
        "images (or other media) come up, and the model is not shown them: it reads text only, or they could "
        "not be read. In episodes images_unseen counts them; docs/images.md says which models see"
    )


def _refuse_unreachable(format: ActionFormat, tools: Sequence[ToolSpec]) -> None:
    """Tools that the format cannot call: an error if it can call none, a warning if it can call some."""
    lost = format.unreachable(tools)
    message = (
        f"the format {format.name!r} has no way to call {', '.join(lost)}: say how in agent.format "
        "(docs/formats.md), or choose another agent.format"
    )
    if lost and len(lost) == len(tools):
        raise ConfigError(message)
    if lost:
        log.warning("%s", message)


def _bytes(tokens: array[int]) -> int:
    """Bytes of a cached rendering, with a key of the longest kind."""
    return tokens.itemsize * len(tokens) + MOST_CHARACTERS + _OVERHEAD
