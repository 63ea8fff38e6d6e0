"""The interface of a tokenizer, and a byte-level one that needs no files (tests and tiny models)."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Protocol, runtime_checkable

from ludus.core.messages import Json, Media

SPECIALS = (
    "<|im_start|>",
    "<|im_end|>",
    "<|pad|>",
    "<tool_call>",
    "</tool_call>",
    "<think>",
    "</think>",
)


class ImageTokens(Protocol):
    """How a model's prompts say that an image stands here."""

    @property
    def token(self) -> int:
        """The placeholder, one of the tokenizer's controls: a part of an image is read where it stands."""

    @property
    def text(self) -> str:
        """The placeholder's text; chat templates write it once for each image."""

    def pixels(self, media: Media) -> int:
        """How many pixels it has, by its header; `ImageError` if it has none, or too many."""

    def tokens(self, media: Media) -> list[int]:
        """Tokens that represent this image: placeholders and the model's delimiters around them.

        Raises `ImageError` if it cannot be read. The result is kept: the same image costs nothing again.
        """


class Tokenizer(Protocol):
    """Text to tokens and back. Only new text is ever encoded, and decoding is for people and parsers."""

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """The tokens that end a turn."""

    @property
    def vocabulary_size(self) -> int:
        """How many ids there are."""

    @property
    def longest_token(self) -> int:
        """The most characters of a text that one token stands for: a bound before anything is encoded."""

    @property
    def controls(self) -> Mapping[str, int]:
        """The special tokens by their text. Templates write them; content must not be able to."""

    def encode(self, text: str) -> list[int]:
        """Ids for `text`, special tokens recognised, nothing added at either end."""

    def encode_text(self, text: str) -> list[int]:
        """Ids for `text` in which nothing is special: a control token's text stays text."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Text for ids, special tokens included; never raises on an incomplete character."""

    def apply_chat_template(
        self, messages: Sequence[Json], tools: Sequence[Json] | None, add_generation_prompt: bool
    ) -> str:
        """The conversation as one text."""


@runtime_checkable
class ImageTokenizer(Protocol):
    """A tokenizer whose model may see images."""

    images: ImageTokens | None
    """How prompts show images; None for a model that reads text only."""


@runtime_checkable
class ByteFallback(Protocol):
    """A tokenizer with tokens for single bytes where its vocabulary has nothing better (SentencePiece)."""

    @property
    def fallback_bytes(self) -> frozenset[int]:
        """The tokens that stand for a single byte."""


def images_of(tokenizer: Tokenizer) -> ImageTokens | None:
    """How this tokenizer's prompts show images; None where its model reads text only."""
    return tokenizer.images if isinstance(tokenizer, ImageTokenizer) else None


class ByteTokenizer:
    """Ids 0 to 255 are bytes; special tokens follow. Its chat template is ChatML, as Qwen writes it."""

    def __init__(self, specials: Sequence[str] = SPECIALS) -> None:
        self._specials = {text: 256 + i for i, text in enumerate(specials)}
        self._texts = {number: text for text, number in self._specials.items()}
        self._split = re.compile("(" + "|".join(re.escape(text) for text in specials) + ")")

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        return (self._specials["<|im_end|>"],)

    @property
    def vocabulary_size(self) -> int:
        return 256 + len(self._specials)

    @property
    def longest_token(self) -> int:
        return 1

    @property
    def controls(self) -> Mapping[str, int]:
        return MappingProxyType(self._specials)

    def encode(self, text: str) -> list[int]:
        tokens: list[int] = []
        for piece in self._split.split(text):
            if piece in self._specials:
                tokens.append(self._specials[piece])
            else:
                tokens.extend(self.encode_text(piece))
        return tokens

    def encode_text(self, text: str) -> list[int]:
        return list(text.encode("utf-8", errors="surrogatepass"))

    def decode(self, tokens: Sequence[int]) -> str:
        pieces: list[str] = []
        pending = bytearray()
        for token in tokens:
            if token < 256:
                pending.append(token)
            else:
                pieces.append(pending.decode("utf-8", errors="replace"))
                pending.clear()
                pieces.append(self._texts.get(token, f"<|{token}|>"))
        return "".join([*pieces, pending.decode("utf-8", errors="replace")])

    def apply_chat_template(
        self, messages: Sequence[Json], tools: Sequence[Json] | None, add_generation_prompt: bool
    ) -> str:
        parts: list[str] = []
        rest = list(messages)
        if tools:
            system = rest.pop(0)["content"] + "\n\n" if rest and rest[0]["role"] == "system" else ""
            listed = "\n".join(json.dumps(tool) for tool in tools)
            parts.append(f"<|im_start|>system\n{system}<tools>\n{listed}\n</tools><|im_end|>\n")
        for message in rest:
            calls = "".join(
                "\n<tool_call>\n" + json.dumps(call["function"]) + "\n</tool_call>"
                for call in message.get("tool_calls") or ()
            )
            parts.append(f"<|im_start|>{message['role']}\n{message['content']}{calls}<|im_end|>\n")
        if add_generation_prompt:
            parts.append("<|im_start|>assistant\n")
        return "".join(parts)
