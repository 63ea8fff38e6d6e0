"""Hugging Face tokenizers behind the `Tokenizer` protocol, and the texts of their special tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ludus.core.failures import ConfigError
from ludus.core.messages import Json
from ludus.core.tokenizer import ImageTokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


CHATML = (
    "{%- if tools %}{{- '<|im_start|>system\\n' }}"
    "{%- if messages and messages[0].role == 'system' %}"
    "{{- messages[0].content + '\\n\\n' }}{%- endif %}"
    "{{- '# Tools\\n\\nYou may call one or more functions. You are given their signatures within "
    "<tools></tools>:\\n<tools>' }}"
    "{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}"
    "{{- '\\n</tools>\\n\\nFor each call, write a JSON object within <tool_call></tool_call>:\\n"
    '<tool_call>\\n{"name": <function-name>, "arguments": <arguments-object>}\\n</tool_call>'
    "<|im_end|>\\n' }}{%- endif %}"
    "{%- for message in messages %}"
    "{%- if message.role == 'tool' %}"
    "{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}"
    "{{- '<|im_start|>user' }}{%- endif %}"
    "{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}"
    "{%- elif not (tools and loop.first and message.role == 'system') %}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content }}"
    "{%- for call in message.tool_calls or [] %}"
    '{{- \'\\n<tool_call>\\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{- (call.function.arguments | tojson) + '}\\n</tool_call>' }}"
    "{%- endfor %}{{- '<|im_end|>\\n' }}{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
"""Our template for tokenizers that come without one: ChatML, with tools the way Hermes writes them."""

END_OF_TURN = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|eot|>",
    "<|eom|>",
    "<end_of_turn>",
    "<|end_of_turn|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|END_OF_TURN_TOKEN|>",
)
"""Tokens that end a turn in the templates we know; a template's own is also found by rendering."""

_TAG = re.compile(r"[<\[{].*[>\]}]", re.DOTALL)
_PROBE = "0x5eed"
_SHORT = 4096
"""Characters of a text that is encoded at once; a longer one is left to `transformers`."""


class ControlTexts:
    """A set of control texts, the texts of special tokens; found in any text in linear time."""

    def __init__(self, texts: Iterable[str]) -> None:
        self._texts = frozenset(text for text in texts if len(text) > 1)
        self._lengths = sorted({len(text) for text in self._texts}, reverse=True)
        starts = "".join(sorted({re.escape(text[0]) for text in self._texts}))
        self._start = re.compile(f"[{starts}]" if starts else r"(?!)")

    def find(self, text: str) -> list[tuple[int, int]]:
        """Where control texts stand in `text`, overlapping ones included; the longest at each start."""
        found: list[tuple[int, int]] = []
        for match in self._start.finditer(text):
            start = match.start()
            for length in self._lengths:
                here = text[start : start + length]
                if here in self._texts:
                    found.append((start, start + len(here)))
                    break
        return found

    def cut(self, text: str) -> list[str]:
        """`text` in pieces, cut after the first character of each control text: none stays whole."""
        edges = [0, *(start + 1 for start, _ in self.find(text)), len(text)]
        return [text[start:stop] for start, stop in pairwise(edges) if start < stop]

    def broken(self, text: str) -> str:
        """`text` with a space inside each control text: changed, but for certain only text."""
        return " ".join(self.cut(text))

    def opened(self, text: str, separator: str) -> str:
        """`text` with `separator` after every character that a control text could begin with."""
        return self._start.sub(lambda match: match[0] + separator, text)


class HFTokenizer:
    """A `transformers` tokenizer. Its `chat_template` is used, or ChatML when it has none."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        chat_template: str | None = None,
        stop_tokens: Iterable[int] = (),
        template_kwargs: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """`stop_tokens` are further ones, such as the `eos_token_id` of a generation config."""
        self.inner: Any = tokenizer
        self.images: ImageTokens | None = None
        """How prompts show images; None for a model that reads text only."""
        self._template: str | None = chat_template
        if chat_template is None and not getattr(tokenizer, "chat_template", None):
            self._template = CHATML
            self._require(("<|im_start|>", "<|im_end|>"))
        self._kwargs = dict(template_kwargs)
        self._check_kwargs()
        self._takes_parts = False
        self._takes_parts = self._needs_parts()
        self._has_library = _encodes_by_library(self.inner)
        self._controls = _controls(self.inner)
        self._texts = ControlTexts(self._controls)
        self._anchors = self._find_anchors()
        self._stops = self._find_stops(stop_tokens)

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        return self._stops

    @property
    def template_source(self) -> str:
        """The chat template, as Jinja."""
        source = self._template or self.inner.chat_template
        if not isinstance(source, str):
            raise ConfigError(
                "the tokenizer has several chat templates, by name: set its chat_template to one of them"
            )
        return source

    @property
    def template_kwargs(self) -> Mapping[str, Any]:
        """Variables with which the chat template is always rendered."""
        return MappingProxyType(self._kwargs)

    @property
    def takes_parts(self) -> bool:
        """Whether the template shows a text only as a part of a list."""
        return self._takes_parts

    @property
    def vocabulary_size(self) -> int:
        return len(self.inner)

    @cached_property
    def longest_token(self) -> int:
        """Length in bytes of the longest byte-level token: an upper bound on its characters."""
        return max(len(text) for text in self.inner.get_vocab() if text not in self._controls)

    @property
    def controls(self) -> Mapping[str, int]:
        return MappingProxyType(self._controls)

    @cached_property
    def fallback_bytes(self) -> frozenset[int]:
        """The tokens that stand for a single byte where the vocabulary has nothing better (SentencePiece)."""
        names = [f"<0x{byte:02X}>" for byte in range(256)]
        ids = self.inner.convert_tokens_to_ids(names)
        found = [id for id in ids if id is not None]
        known = dict(zip(found, self.inner.convert_ids_to_tokens(found), strict=True))
        return frozenset(id for name, id in zip(names, ids, strict=True) if known.get(id) == name)

    def encode(self, text: str) -> list[int]:
        """A tokenizer that puts a space before any text is kept from doing so: pieces must join."""
        for anchor, known in self._anchors.items():
            anchored = self._ids(anchor + text)
            if anchored[: len(known)] == known:
                return anchored[len(known) :]
        return self._ids(text)

    def encode_text(self, text: str) -> list[int]:
        """The text is cut inside everything that would be special, so that no encoder sees it whole."""
        forbidden = set(self._controls.values())
        ids = [token for piece in self._texts.cut(text) for token in self.encode(piece)]
        if forbidden.isdisjoint(ids):
            return ids
        # A normaliser can make a control token of text that did not look like one: one character at
        # a time cannot be one.
        return [t for character in text for t in self.encode(character) if t not in forbidden]

    def decode(self, tokens: Sequence[int]) -> str:
        return str(
            self.inner.decode(
                list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False
            )
        )

    def apply_chat_template(
        self, messages: Sequence[Json], tools: Sequence[Json] | None, add_generation_prompt: bool
    ) -> str:
        from jinja2 import TemplateError

        if self._takes_parts:
            messages = [_in_parts(message) for message in messages]
        try:
            return str(
                self.inner.apply_chat_template(
                    list(messages),
                    tools=list(tools) if tools else None,
                    chat_template=self._template,
                    add_generation_prompt=add_generation_prompt,
                    tokenize=False,
                    **self._kwargs,
                )
            )
        except (TemplateError, TypeError, KeyError, AttributeError, IndexError) as error:
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise ConfigError(
                f"the chat template refuses a conversation of the roles ({roles}): {error}"
            ) from error

    def _check_kwargs(self) -> None:
        source = str(self._template or self.inner.chat_template)
        for name in self._kwargs:
            if not re.search(rf"\b{re.escape(name)}\b", source):
                raise ConfigError(
                    f"model.chat_template_kwargs: the chat template does not read {name!r}"
                )

    def _needs_parts(self) -> bool:
        """Whether the template shows a text only as a part of a list, as those of models that see often do."""
        shown = [{"role": "user", "content": _PROBE}]
        try:
            if _PROBE in self.apply_chat_template(shown, None, False):
                return False
        except ConfigError:
            pass
        try:
            return _PROBE in self.apply_chat_template([_in_parts(shown[0])], None, False)
        except ConfigError:
            return False

    def _ids(self, text: str) -> list[int]:
        sound = text.encode("utf-8", errors="replace").decode("utf-8")  # halves of surrogate pairs
        if len(sound) <= _SHORT and self._is_direct():
            return list(self.inner.backend_tokenizer.encode(sound, add_special_tokens=False).ids)
        return list(self.inner.encode(sound, add_special_tokens=False))

    def _is_direct(self) -> bool:
        """Whether `transformers` would ask the library below for exactly this.

        `transformers` asks it for a batch of one, which releases the GIL and wakes a thread on every core. An
        engine's thread then takes the GIL for longer than it takes to encode a short text, and thousands of
        episodes wait for it.
        """
        if not self._has_library:
            return False
        below = self.inner.backend_tokenizer
        is_whole = below.truncation is None and below.padding is None
        return is_whole and below.encode_special_tokens == self.inner.split_special_tokens

    def _require(self, texts: Sequence[str]) -> None:
        known = self.inner.get_vocab()
        missing = [text for text in texts if text not in known]
        if missing:
            raise ConfigError(
                f"the tokenizer has no chat template, and ours (ChatML) needs {' and '.join(missing)}, "
                "which it lacks: give chat_template=..., or add these as special tokens "
                "(and resize the model's embeddings)"
            )

    def _find_anchors(self) -> dict[str, list[int]]:
        """Texts to put before another, so that it is not the first; none where that makes no odds."""
        known = {anchor: self._ids(anchor) for anchor in ("\n", "a", ".")}
        return known if self._ids("\na") != known["\n"] + known["a"] else {}

    def _find_stops(self, further: Iterable[int]) -> tuple[int, ...]:
        found: list[int] = []
        if self.inner.eos_token_id is not None:
            found.append(int(self.inner.eos_token_id))
        template = self._template or self.inner.chat_template
        source = template if isinstance(template, str) else str(template)
        found += [self._controls[t] for t in END_OF_TURN if t in self._controls and t in source]
        found += [token for token in [self._rendered_end()] if token is not None]
        found += [int(token) for token in further]
        return tuple(dict.fromkeys(found))

    def _rendered_end(self) -> int | None:
        """The control token that the template writes right after an assistant's text."""
        turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _PROBE}]
        try:
            rendered = self.apply_chat_template(turns, None, False)
        except ConfigError:
            return None
        rest = rendered.rpartition(_PROBE)[2].lstrip()
        fitting = [text for text in self._controls if rest.startswith(text)]
        return self._controls[max(fitting, key=len)] if fitting else None


def _in_parts(message: Json) -> Json:
    """This message with its text as a list of parts."""
    content = message.get("content")
    return (
        {**message, "content": [{"type": "text", "text": content}]}
        if isinstance(content, str)
        else message
    )


def load_tokenizer(
    name_or_path: str | Path,
    *,
    template_kwargs: Mapping[str, Any] = MappingProxyType({}),
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> HFTokenizer:
    """The tokenizer of a local folder or a hub name, with the stop tokens of its generation config.

    `template_kwargs` are variables of its chat template, such as `enable_thinking`.
    """
    from transformers import AutoTokenizer

    where = str(name_or_path)
    if not Path(where).is_dir() and (where.startswith((".", "/", "~")) or where.count("/") > 1):
        raise ConfigError(f"there is no folder {where!r} with a tokenizer in it")
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            where, revision=revision, trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"no tokenizer could be loaded from {where!r}: it is neither a folder with tokenizer files "
            f"nor a model that the hub gives ({type(error).__name__}: {str(error).strip():.200})"
        ) from error
    has_template = getattr(tokenizer, "chat_template", None)
    return HFTokenizer(
        tokenizer,
        chat_template=None if has_template else _processor_template(where, revision),
        stop_tokens=_generation_stops(where, revision),
        template_kwargs=template_kwargs,
    )


def _processor_template(where: str, revision: str | None) -> str | None:
    """The chat template that older models which see keep in a file of their processor's."""
    from transformers.utils import cached_file

    try:
        file = cached_file(where, "chat_template.json", revision=revision or "main")
    except OSError:
        return None
    template = json.loads(Path(file).read_text(encoding="utf-8")).get("chat_template") if file else None
    return template if isinstance(template, str) else None


def _encodes_by_library(tokenizer: Any) -> bool:
    """Whether this is a tokenizer of the `tokenizers` library, whose class adds nothing to its encoding."""
    from transformers import PreTrainedTokenizerBase, TokenizersBackend

    kind: Any = type(tokenizer)
    return (
        isinstance(tokenizer, TokenizersBackend)
        and kind.encode is PreTrainedTokenizerBase.encode
        and kind._encode_plus is TokenizersBackend._encode_plus
    )


def _controls(tokenizer: Any) -> dict[str, int]:
    """Special tokens, and added ones that look like tags: `<tool_call>` is often not marked special."""
    return {
        str(token.content): int(number)
        for number, token in tokenizer.added_tokens_decoder.items()
        if len(token.content) > 1 and (token.special or _TAG.fullmatch(token.content))
    }


def _generation_stops(name_or_path: str, revision: str | None) -> list[int]:
    from transformers import GenerationConfig

    try:
        config: Any = GenerationConfig.from_pretrained(name_or_path, revision=revision)
    except (OSError, ValueError):
        return []  # a tokenizer need not come with a generation config
    stops = config.eos_token_id
    return list(stops) if isinstance(stops, (list, tuple)) else [] if stops is None else [stops]
