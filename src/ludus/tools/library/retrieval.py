"""Search in a corpus of one's own: BM25 (bm25s), dense (FAISS and an embedding model), or both by rank fusion.

An index is built once and kept in the cache folder, under the corpus's SHA-256: a changed file is another
index. It appears whole or not at all, with a list of its files, and one that does not fit its list is built
again. Documents and indexes are memory-mapped, so that all episodes share one, and processes share its pages.

Concurrency: searching only reads, so it runs in the threads that sync tools run in. One thread at a time
embeds, and one process at a time builds an index (a lock file); the others wait for it.
"""

from __future__ import annotations

import contextlib
import fcntl
import gzip
import hashlib
import importlib
import json
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from ludus.core.config import cache_folder
from ludus.core.failures import ConfigError, MissingExtraError, ToolFault
from ludus.core.registry import import_object
from ludus.core.user_files import decode_user_text, file_problem, parse_user_json
from ludus.llm.embeddings import TextEmbedder, load_embedder, model_folder
from ludus.llm.remote import is_address
from ludus.observe import atomic_directory, remove_directory
from ludus.tools.tool import Tool

_log = logging.getLogger(__name__)

Method = Literal["bm25", "dense", "hybrid"]
METHODS: tuple[Method, ...] = ("bm25", "dense", "hybrid")
FORMAT = 1
"""Counted up when what is written changes."""
_LISTING = "index.json"
_FUSION_CONSTANT = 60
"""For reciprocal rank fusion (Cormack et al., 2009): a document's score is the sum of 1 / (60 + rank)."""
_FUSION_DEPTH = 100
_MOST_QUERY_CHARS = 2_000


class Document(NamedTuple):
    """One passage."""

    title: str
    text: str


# A corpus: what people have


def read_corpus(source: str) -> Iterator[Document]:
    """The documents of a file (.jsonl or .json, also .gz), or of 'module:function'.

    A row has `title` and `text` (or `contents`), or, as in Search-R1, `contents` whose first line is the title.
    """
    if not source.endswith((".jsonl", ".json", ".jsonl.gz", ".json.gz")):
        if ":" not in source:
            raise ConfigError(
                f"the corpus {source!r} is no .jsonl or .json file (.gz or not), nor 'module:function'"
            )
        made = import_object(source)
        for number, row in enumerate(made() if callable(made) else made, start=1):
            yield as_document(row, f"{source}, row {number}")
        return
    path = Path(source).expanduser()
    if (problem := file_problem(path)) is not None:
        raise ConfigError(problem)
    opening: Callable[..., Any] = gzip.open if source.endswith(".gz") else open
    try:
        with opening(path, "rb") as lines:
            if source.removesuffix(".gz").endswith(".json"):
                rows: Iterable[Any] = parse_user_json(decode_user_text(lines.read(), source), source)
            else:
                rows = (
                    parse_user_json(decode_user_text(line, source, number), f"{source}, line {number},")
                    for number, line in enumerate(lines, start=1)
                    if line.strip()
                )
            for number, row in enumerate(rows, start=1):
                yield as_document(row, f"{source}, document {number}")
    except (OSError, ValueError) as error:
        raise ConfigError(f"the corpus {source} cannot be read: {error}") from None


def as_document(row: Any, where: str) -> Document:
    """A row of a corpus; `ConfigError` says which one is none."""
    if isinstance(row, tuple) and len(row) == 2:
        return Document(str(row[0]), str(row[1]))
    if isinstance(row, Mapping):
        text = row.get("text", row.get("contents"))
        if isinstance(text, list):  # HotpotQA's passages are lists of sentences
            text = "".join(map(str, text))
        title = row.get("title")
        if isinstance(text, str) and title is None:
            title, _, text = text.partition("\n") if "\n" in text else ("", "", text)
            title = title.strip().strip('"')
        if isinstance(text, str) and isinstance(title, str):
            return Document(title, text)
    raise ConfigError(f"{where} is no document: it needs text, or contents, beside a title or after it")


# An index: built once, memory-mapped


def checksum(source: str) -> str:
    """The SHA-256 of a corpus; that of a file is remembered with its size and time."""
    path = Path(source).expanduser()
    if not path.is_file():
        return _checksum_of_reference(source)
    status = path.stat()
    stamp = [status.st_size, status.st_mtime_ns]
    known = (
        cache_folder()
        / "search"
        / f"{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:32]}.json"
    )
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        held = json.loads(known.read_text(encoding="utf-8"))
        if held["stamp"] == stamp:
            return str(held["sha256"])
    with path.open("rb") as opened:
        found = hashlib.file_digest(opened, "sha256").hexdigest()
    known.parent.mkdir(parents=True, exist_ok=True)
    known.write_text(json.dumps({"stamp": stamp, "sha256": found}), encoding="utf-8")
    return found


@cache
def _checksum_of_reference(source: str) -> str:
    digest = hashlib.sha256()
    for document in read_corpus(source):
        digest.update(_packed(document) + b"\n")
    return digest.hexdigest()


def _packed(document: Document) -> bytes:
    return json.dumps(document, ensure_ascii=False).encode("utf-8", "replace")


def _built(folder: Path, build: Callable[[Path], None]) -> Path:
    """A folder of the cache, made by `build` where it is not there or damaged."""
    if _is_whole(folder):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if _is_whole(folder):
            return folder  # another process has built it meanwhile
        if folder.exists():
            _log.warning("%s is damaged and is built again", folder)
            remove_directory(folder)
        with atomic_directory(folder) as temporary:
            build(temporary)
            sizes = {one.name: one.stat().st_size for one in sorted(temporary.iterdir())}
            (temporary / _LISTING).write_text(json.dumps(sizes), encoding="utf-8")
    return folder


def _is_whole(folder: Path) -> bool:
    try:
        sizes = json.loads((folder / _LISTING).read_text(encoding="utf-8"))
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, AttributeError):
        return False


class Documents(Sequence[Document]):
    """All documents in one memory-mapped file."""

    def __init__(self, folder: Path) -> None:
        self._ends = np.load(folder / "ends.npy", mmap_mode="r")
        self._bytes = np.memmap(folder / "documents.bin", dtype=np.uint8, mode="r")

    @staticmethod
    def write(source: str, folder: Path) -> None:
        ends, end = [], 0
        with (folder / "documents.bin").open("wb") as file:
            for document in read_corpus(source):
                end += file.write(_packed(document))
                ends.append(end)
        if not ends:
            raise ConfigError(f"the corpus {source} holds no documents")
        np.save(folder / "ends.npy", np.array(ends, dtype=np.int64))

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: Any) -> Any:
        start = int(self._ends[index - 1]) if index else 0
        return Document(*json.loads(self._bytes[start : int(self._ends[index])].tobytes()))


class Bm25Index:
    """BM25 as Lucene's, over titles and texts."""

    def __init__(self, folder: Path) -> None:
        self._index = _package("bm25s").BM25.load(folder, mmap=True, show_progress=False)

    @staticmethod
    def write(documents: Documents, folder: Path) -> None:
        bm25s = _package("bm25s")
        texts = [f"{document.title} {document.text}" for document in documents]
        index = bm25s.BM25()
        index.index(bm25s.tokenize(texts, show_progress=False), show_progress=False)
        index.save(folder, show_progress=False)

    def top(self, query: str, count: int) -> list[int]:
        """The best documents that share a word with the query, the best first; of equals, the earlier."""
        tokens = _package("bm25s").tokenize([query], return_ids=False, show_progress=False)[0]
        known = [token for token in dict.fromkeys(tokens) if token in self._index.vocab_dict]
        if not known:
            return []
        scores = np.asarray(self._index.get_scores(known))
        return _best(scores, count, above=0.0)


class DenseIndex:
    """Normalised embeddings in a FAISS index, by inner product."""

    def __init__(self, folder: Path, model: TextEmbedder) -> None:
        faiss = _package("faiss")
        self._index = faiss.read_index(str(folder / "dense.faiss"), faiss.IO_FLAG_MMAP_IFC)
        self._model = model

    @staticmethod
    def write(documents: Documents, folder: Path, model: TextEmbedder, kind: str) -> None:
        faiss = _package("faiss")
        rows = [model.embed(part) for part in _parts(documents, 4096)]
        vectors = np.concatenate(rows)
        index = faiss.index_factory(vectors.shape[1], kind, faiss.METRIC_INNER_PRODUCT)
        if not index.is_trained:
            index.train(vectors)
        index.add(vectors)
        faiss.write_index(index, str(folder / "dense.faiss"))

    def top(self, query: str, count: int) -> list[int]:
        """The nearest documents, the nearest first."""
        _, found = self._index.search(self._model.embed([query], "query"), count)
        return [int(one) for one in found[0] if one >= 0]


def _parts(documents: Documents, size: int) -> Iterator[list[str]]:
    for start in range(0, len(documents), size):
        chosen = [documents[i] for i in range(start, min(start + size, len(documents)))]
        yield [f"{title}\n{text}" if title else text for title, text in chosen]


def _best(scores: npt.NDArray[np.floating[Any]], count: int, above: float) -> list[int]:
    """Positions of the highest scores above a bound, in an order that ties do not change."""
    count = min(count, len(scores))
    bound = max(float(np.partition(scores, len(scores) - count)[len(scores) - count]), above)
    near = np.flatnonzero((scores >= bound) & (scores > above))
    order = np.lexsort((near, -scores[near]))
    return [int(one) for one in near[order][:count]]


class Retriever:
    """Finds documents of one corpus. Safe to use from several threads."""

    def __init__(self, documents: Documents, indexes: Sequence[Bm25Index | DenseIndex]) -> None:
        self.documents, self._indexes = documents, tuple(indexes)

    def search(self, query: str, k: int = 3) -> list[Document]:
        """At most `k` documents, the best first; of several indexes by reciprocal rank fusion."""
        if len(self._indexes) == 1:
            return [self.documents[i] for i in self._indexes[0].top(query, k)]
        scores: dict[int, float] = {}
        for index in self._indexes:
            for rank, found in enumerate(index.top(query, max(k, _FUSION_DEPTH)), start=1):
                scores[found] = scores.get(found, 0.0) + 1 / (_FUSION_CONSTANT + rank)
        ranked = sorted(scores, key=lambda one: (-scores[one], one))
        return [self.documents[i] for i in ranked[:k]]


_opening = threading.Lock()


def open_retriever(
    corpus: str,
    method: Method = "bm25",
    model: str | None = None,
    *,
    index: str = "Flat",
    device: str | None = None,
) -> Retriever:
    """The retriever of a corpus; one for all who ask for it. Its index is built at the first need.

    `model` is the embedding model of `dense` and `hybrid`: a folder, a name on the hub, "minilm", or an address
    with /v1/embeddings. `index` is FAISS's description of the index, such as "Flat" or "IVF4096,SQ8".
    """
    if method not in METHODS:
        raise ConfigError(f"search: method is one of {', '.join(METHODS)}, not {method!r}")
    if method != "bm25" and model is None:
        raise ConfigError(
            f"search: method = {method!r} needs an embedding model (model = a folder, a name on the hub, "
            '"minilm", or an address)'
        )
    digest = checksum(corpus)
    with _opening:  # one that is being built is waited for
        return _opened(corpus, digest, method, model, index, device, str(cache_folder()))


@lru_cache(maxsize=8)
def _opened(
    corpus: str, digest: str, method: Method, model: str | None, kind: str, device: str | None, root: str
) -> Retriever:
    home = Path(root) / "search" / f"{digest[:16]}-{FORMAT}"
    documents = Documents(_built(home / "documents", lambda new: Documents.write(corpus, new)))
    indexes: list[Bm25Index | DenseIndex] = []
    if method != "dense":
        indexes.append(Bm25Index(_built(home / "bm25", lambda new: Bm25Index.write(documents, new))))
    if method != "bm25":
        assert model is not None
        _package("faiss")
        source = model if is_address(model) else model_folder(model)
        embedder = load_embedder(model if is_address(model) else f"sentence:{model}", device=device)
        name = hashlib.sha256(f"{source}\n{kind}\n{embedder.style}".encode()).hexdigest()[:16]
        built = _built(
            home / f"dense-{name}", lambda new: DenseIndex.write(documents, new, embedder, kind)
        )
        indexes.append(DenseIndex(built, embedder))
    return Retriever(documents, indexes)


def _package(name: Literal["bm25s", "faiss"]) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        package = "faiss-cpu" if name == "faiss" else name
        extra = "dense" if name == "faiss" else "search"
        raise MissingExtraError(package, extra, "the tool 'search'") from None


# The tool


def checked_query(query: str) -> str:
    """The query, if it can be searched for; else a `ToolFault` says what is wrong with it."""
    query = " ".join(query.split())
    if not query:
        raise ToolFault("the query is empty; write what you want to find")
    if len(query) > _MOST_QUERY_CHARS:
        raise ToolFault(f"the query has {len(query):,} characters; write at most {_MOST_QUERY_CHARS:,}")
    return query


def shown(documents: Iterable[Document]) -> str:
    """Documents as Search-R1 shows them: "Doc 1(Title: ...) text"."""
    lines = [f"Doc {n}(Title: {title}) {text}" for n, (title, text) in enumerate(documents, start=1)]
    return "\n".join(lines) or "No document matches the query."


class SearchTool(Tool):
    """Search the corpus for passages.

    Args:
        query: What to search for, in a few words.
    """

    name = "search"

    def __init__(
        self,
        corpus: str,
        method: Method = "bm25",
        k: int = 3,
        model: str | None = None,
        index: str = "Flat",
        device: str | None = None,
    ) -> None:
        super().__init__()
        if k < 1:
            raise ConfigError(f"search: k is at least 1, not {k}")
        self.corpus, self.method, self.k = corpus, method, k
        self.model, self.index, self.device = model, index, device
        self.corpus_digest = checksum(corpus)
        self._open()  # built now, and not within the deadline of a call

    def _open(self) -> Retriever:
        return open_retriever(self.corpus, self.method, self.model, index=self.index, device=self.device)

    def run(self, query: str) -> str:
        return shown(self._open().search(checked_query(query), self.k))
