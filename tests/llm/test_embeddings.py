"""Embeddings behind a real HTTP server: what is sent, what comes back, and what servers do wrong."""

from __future__ import annotations

import asyncio
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ludus.core import ConfigError
from ludus.llm import ChatError, RetryPolicy
from ludus.llm.embeddings import RemoteEmbedder, load_embedder, open_embedder
from openai_server import Raw, cut_off, error, garbage, serving

FAST = RetryPolicy(seconds=20, retries=2, first_pause=0.001)


def vectors(body: dict[str, Any]) -> dict[str, Any]:
    """Of each text its length and one, in another order than asked for."""
    rows = [{"index": i, "embedding": [len(text), 1]} for i, text in enumerate(body["input"])]
    return {"data": rows[::-1]}


def test_texts_come_back_in_order_with_length_one() -> None:
    with serving(vectors, key="secret") as server:
        model = RemoteEmbedder(f"{server.url}#tiny", key="secret", policy=FAST)
        texts = ["x" * n for n in range(1, 301)]
        found = model.embed(texts)
        asked = list(server.bodies)
        assert model.embed([]).shape[0] == 0
    assert np.allclose(np.linalg.norm(found, axis=1), 1)
    assert np.allclose(found[:, 0] / found[:, 1], range(1, 301), rtol=1e-4)
    assert {body["model"] for body in asked} == {"tiny"}
    assert sorted(len(body["input"]) for body in asked) == [44, 128, 128]
    assert server.asked[0].path == "/v1/embeddings"


async def test_it_can_be_called_where_a_loop_is_running() -> None:
    with serving(vectors, models=["only"]) as server:
        model = load_embedder(server.url)
        assert model.embed(["abc"]).shape == (1, 2)
        assert (await asyncio.to_thread(model.embed, ["abc", ""])).shape == (2, 2)
    assert server.bodies[-1] == {"model": "only", "input": ["abc", " "]}


def test_texts_are_cut_until_the_server_takes_them() -> None:
    def short_only(body: dict[str, Any]) -> Any:
        if any(len(text) > 3000 for text in body["input"]):
            return error(400, "maximum context length")
        return vectors(body)

    with serving(short_only) as server:
        model = RemoteEmbedder(f"{server.url}#tiny", policy=FAST)
        assert model.embed(["x" * 50_000, "short"]).shape == (2, 2)
        assert [len(body["input"][0]) for body in server.bodies] == [16_000, 8_000, 4_000, 2_000]
        server.reply = lambda body: error(400, "no such model")
        with pytest.raises(ChatError, match="no such model"):
            model.embed(["x" * 50_000])


@pytest.mark.parametrize(
    "answer",
    [
        garbage(),
        cut_off(),
        error(503),
        {},
        {"data": []},
        {"data": [{"index": 0, "embedding": [1.0]}, {"index": 0, "embedding": [1.0]}]},
        {"data": [{"index": 7, "embedding": [1.0]}, {"index": 1, "embedding": [1.0]}]},
        {"data": [{"index": 0, "embedding": [1.0]}, {"index": 1, "embedding": [1.0, 2.0]}]},
        {"data": [{"index": 0, "embedding": [float("nan")]}, {"index": 1, "embedding": [1.0]}]},
        {"data": [{"index": 0, "embedding": "AAAA"}, {"index": 1, "embedding": []}]},
        {"data": [{"index": 0, "embedding": [1e39]}, {"index": 1, "embedding": [1.0]}]},
        {"data": [{"index": 0, "embedding": [10**400]}, {"index": 1, "embedding": [1.0]}]},
        {"data": [{"index": 0, "embedding": [0] * 70_000}, {"index": 1, "embedding": [0] * 70_000}]},
        {"data": [{"index": 0, "embedding": [True]}, {"index": 1, "embedding": [1.0]}]},
        {"data": [3, 4]},
    ],
)
def test_what_is_no_embedding_is_retried_and_then_typed(answer: dict[str, Any] | Raw) -> None:
    with serving(lambda body: answer) as server:
        with pytest.raises(ChatError, match="in 3 attempts"):
            RemoteEmbedder(f"{server.url}#tiny", policy=FAST).embed(["a", "b"])
        server.reply = vectors
        server.faults = [error(429)]
        assert RemoteEmbedder(f"{server.url}#tiny", policy=FAST).embed(["a", "b"]).shape == (2, 2)


def test_a_name_that_is_none_lists_what_there_is() -> None:
    with pytest.raises(ConfigError, match=r"hashed, an address such as .* sentence:MODEL"):
        load_embedder("minilm")


MALFORMED: dict[str, Any] = {
    "NaN": lambda n: [[float("nan"), 1.0]] * n,
    "ragged": lambda n: [[1.0] * (2 + i % 2) for i in range(n)],
    "one short": lambda n: [[1.0, 2.0]] * (n - 1),
    "no list": lambda n: "AAAA",
    "huge": lambda n: [[0.5] * 100_000] * n,
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_embedder_is_told_when_it_is_opened(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However patient the policy of the long job is."""
    make = MALFORMED[name]

    def malformed(body: dict[str, Any]) -> dict[str, Any]:
        made = make(len(body["input"]))
        rows = [{"index": i, "embedding": row} for i, row in enumerate(made)]
        return {"data": rows if isinstance(made, list) else made}

    with serving(malformed) as server:
        with pytest.raises(ConfigError, match=r"the embedder .*#tiny' cannot be used: .* attempts: "):
            open_embedder(f"{server.url}#tiny")
        assert len(server.bodies) == 2
        # a long job is more patient with a server that fails, and not with one that answers nonsense
        patient = RetryPolicy(retries=50, unusable=2, first_pause=0.01)
        with pytest.raises(ChatError, match="in 3 attempts"):
            RemoteEmbedder(f"{server.url}#tiny", policy=patient).embed(["a", "b"])
    own = SimpleNamespace(embed=lambda texts: make(len(texts)))
    monkeypatch.setitem(sys.modules, "own_embedder", SimpleNamespace(own=own))
    with pytest.raises(ConfigError, match=r"the embedder 'own_embedder:own': .*embedding"):
        open_embedder("own_embedder:own")


def test_an_embedder_that_is_not_there_is_told_when_it_is_opened(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = "in 2 attempts: status 500: out of memory"
    with (
        serving(lambda body: error(500, "out of memory")) as server,
        pytest.raises(ConfigError, match=told),
    ):
        open_embedder(f"{server.url}#tiny")
    with pytest.raises(ConfigError, match=r"cannot be used: .*in 2 attempts"):
        open_embedder(f"{server.url}#tiny")

    def broken(texts: list[str]) -> None:
        raise RuntimeError("no GPU")

    monkeypatch.setitem(sys.modules, "own_embedder", SimpleNamespace(own=SimpleNamespace(embed=broken)))
    with pytest.raises(ConfigError, match=r"own_embedder:own.*RuntimeError: no GPU"):
        open_embedder("own_embedder:own")
