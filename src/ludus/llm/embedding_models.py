"""How an embedding model wants its texts: pooling of the hidden states, and prefixes of queries and passages.

A model in the format of sentence-transformers says it in files (`modules.json`, its pooling's `config.json`,
the prompts of `config_sentence_transformers.json`). What the files leave out is known of some families by name.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ludus.core.failures import ConfigError

log = logging.getLogger(__name__)

Kind = Literal["query", "passage"]

POOLING: dict[str, Callable[[Any, Any], Any]] = {
    "cls": lambda hidden, mask: hidden[:, 0],
    "mean": lambda hidden, mask: (hidden * mask).sum(1) / mask.sum(1),
    "max": lambda hidden, mask: hidden.masked_fill(mask == 0, -1e9).amax(1),
    "lasttoken": lambda hidden, mask: hidden[range(len(hidden)), _last(mask)],
}
"""Poolings by name: of hidden states [B, T, D] and a mask [B, T, 1]."""
_FLAGS = {"cls_token": "cls", "mean_tokens": "mean", "max_tokens": "max", "lasttoken": "lasttoken"}
_PARTS = ("Transformer", "Pooling", "Normalize")


def _last(mask: Any) -> Any:
    """Of each row, the position of its last token: padding may be on either side."""
    return mask.shape[1] - 1 - mask[:, :, 0].flip(1).argmax(1)


@dataclass(frozen=True)
class EmbeddingStyle:
    """A pooling of `POOLING`, and what is put before a query and a passage."""

    pooling: str = "mean"
    query: str = ""
    passage: str = ""

    def prefixed(self, texts: Sequence[str], kind: Kind) -> list[str]:
        """Texts as the model reads them."""
        prefix = self.query if kind == "query" else self.passage
        return [prefix + text for text in texts]


_PASSAGES = "Represent this sentence for searching relevant passages: "
_WEB = "Instruct: Given a web search query, retrieve relevant passages that answer the query\nQuery:"
_FAMILIES = {
    r"bge-(small|base|large)-en\b": EmbeddingStyle("cls", _PASSAGES),
    r"bge-(small|base|large)-zh\b": EmbeddingStyle("cls", "为这个句子生成表示以用于检索相关文章："),
    r"bge-m3\b": EmbeddingStyle("cls"),
    r"e5-mistral-7b-instruct\b": EmbeddingStyle("lasttoken", f"{_WEB} "),
    r"e5-.*-instruct\b": EmbeddingStyle("mean", f"{_WEB} "),
    r"e5-": EmbeddingStyle("mean", "query: ", "passage: "),
    r"mxbai-embed-large\b": EmbeddingStyle("cls", _PASSAGES),
    r"snowflake-arctic-embed-.*v2": EmbeddingStyle("cls", "query: "),
    r"snowflake-arctic-embed-": EmbeddingStyle("cls", _PASSAGES),
    r"nomic-embed-text-": EmbeddingStyle("mean", "search_query: ", "search_document: "),
    r"qwen3-embedding-": EmbeddingStyle("lasttoken", _WEB),
    r"contriever|minilm|all-mpnet": EmbeddingStyle("mean"),
}
"""The first that a model's name contains: what its authors say of it."""


def style_by_name(name: str) -> EmbeddingStyle | None:
    """The style of the family that a model's name (on the hub, or its folder's) belongs to."""
    parts = Path(name).parts or ("",)
    cached = [part for part in parts if part.startswith("models--")]  # a folder of the hub's cache
    last = (cached or parts)[-1].lower()
    return next((style for known, style in _FAMILIES.items() if re.search(known, last)), None)


def read_style(name: str, read: Callable[[str], str | None]) -> EmbeddingStyle:
    """The style of the model `name`, whose files `read` gives by path, or None where there is none."""
    family = style_by_name(name)
    pooling = _own_pooling(name, read)
    if pooling is None and family is None:
        log.warning(
            "the embedding model %s names no pooling (modules.json, 1_Pooling/config.json) and is of no "
            "known family: it gets the mean of its tokens, and no prefix",
            name,
        )
    known = family or EmbeddingStyle()
    said = _json(name, read, "config_sentence_transformers.json") or {}
    prompts = said.get("prompts") or {}
    default = prompts.get(said.get("default_prompt_name"), "")
    # prompts that are saved empty say nothing: sentence-transformers writes them for every model
    passages = (prompts.get(kind) for kind in ("document", "passage", "corpus"))
    return EmbeddingStyle(
        pooling or known.pooling,
        prompts.get("query") or default or known.query,
        next(filter(None, passages), default) or known.passage,
    )


def _own_pooling(name: str, read: Callable[[str], str | None]) -> str | None:
    modules = _json(name, read, "modules.json")
    folder = "1_Pooling"
    for module in modules or ():
        kind = str(module.get("type", "")).rpartition(".")[2]
        if kind not in _PARTS:
            raise ConfigError(
                f"the embedding model {name!r} has a module {kind} (modules.json), which is not known here "
                f"({', '.join(_PARTS)} are): serve it behind an address with /v1/embeddings, and give that"
            )
        if kind == "Pooling":
            folder = module.get("path") or folder
    said = _json(name, read, f"{folder}/config.json")
    if said is None:
        return None
    flags = [key.removeprefix("pooling_mode_") for key, on in said.items() if on is True]
    modes = said.get("pooling_mode") or [_FLAGS.get(f, f) for f in flags if f != "include_prompt"]
    chosen = [modes] if isinstance(modes, str) else list(modes)
    if len(chosen) != 1 or chosen[0] not in POOLING or said.get("include_prompt") is False:
        raise ConfigError(
            f"the embedding model {name!r} pools by {chosen} (include_prompt = "
            f"{said.get('include_prompt', True)}, {folder}/config.json): known are {', '.join(POOLING)}, one "
            "at a time, over the prompt too. Serve it behind an address with /v1/embeddings, and give that"
        )
    return str(chosen[0])


def _json(name: str, read: Callable[[str], str | None], path: str) -> Any:
    text = read(path)
    if text is None:
        return None
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"the embedding model {name!r}: {path} is no JSON: {error}") from None
    if not isinstance(found, Mapping | list):
        raise ConfigError(f"the embedding model {name!r}: {path} holds no object")
    return found
