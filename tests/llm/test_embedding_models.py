"""Embedding models as their authors use them: pooling and prefixes, by their files and by their names.

The references are the model's hidden states, pooled one text at a time in plain torch, without padding.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ludus.core import ConfigError
from ludus.llm.embeddings import RemoteEmbedder, SentenceModel
from openai_server import serving
from tiny_bert import save_tiny_bert

TEXTS = ["bees", "a longer text about wasps and ants", "honey?"]
INSTRUCTION = "Represent this sentence for searching relevant passages: "


def reference(folder: str, text: str, pooling: str) -> Any:
    import torch
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder).eval()
    with torch.inference_mode():
        hidden_TD = model(**tokenizer([text], return_tensors="pt")).last_hidden_state[0]
    pooled = {
        "cls": hidden_TD[0],
        "mean": hidden_TD.mean(0),
        "max": hidden_TD.max(0).values,
        "lasttoken": hidden_TD[-1],
    }[pooling]
    return (pooled / pooled.norm()).numpy()


def check(folder: str, pooling: str, query: str, passage: str) -> None:
    model = SentenceModel(folder, device="cpu", batch=2)
    for kind, prefix in (("query", query), ("passage", passage)):
        expected = [reference(folder, prefix + text, pooling) for text in TEXTS]
        assert np.allclose(model.embed(TEXTS, kind), expected, atol=1e-5), (folder, kind)


def save_files(folder: str, pooling: dict[str, Any], prompts: dict[str, Any] | None = None) -> None:
    home = Path(folder)
    parts = [("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")]
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (kind, path) in enumerate(parts)
    ]
    (home / "modules.json").write_text(json.dumps(modules))
    (home / "1_Pooling").mkdir()
    (home / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    if prompts is not None:
        (home / "config_sentence_transformers.json").write_text(json.dumps(prompts))


@pytest.mark.parametrize(
    ("name", "pooling", "query", "passage"),
    [
        ("bge-small-en", "cls", INSTRUCTION, ""),
        ("bge-base-en-v1.5", "cls", INSTRUCTION, ""),
        ("bge-large-zh-v1.5", "cls", "为这个句子生成表示以用于检索相关文章：", ""),
        ("bge-m3", "cls", "", ""),
        ("e5-base-v2", "mean", "query: ", "passage: "),
        ("multilingual-e5-small", "mean", "query: ", "passage: "),
        ("contriever-msmarco", "mean", "", ""),
        ("models--BAAI--bge-base-en-v1.5/snapshots/a5beb1e3", "cls", INSTRUCTION, ""),
        ("bge-of-mine", "mean", "", ""),
    ],
)
def test_families_are_known_by_name(
    tmp_path: Path, name: str, pooling: str, query: str, passage: str
) -> None:
    check(save_tiny_bert(tmp_path / name), pooling, query, passage)


@pytest.mark.parametrize("pooling", ["cls", "mean", "max", "lasttoken"])
@pytest.mark.parametrize("named", [True, False], ids=["by name", "by flags"])
def test_a_models_files_say_how_it_is_pooled(tmp_path: Path, pooling: str, named: bool) -> None:
    flags = {"cls": "cls_token", "mean": "mean_tokens", "max": "max_tokens", "lasttoken": "lasttoken"}
    said = {f"pooling_mode_{flag}": one == pooling for one, flag in flags.items()}
    folder = save_tiny_bert(tmp_path / "e5-of-mine")  # the files go before the name
    save_files(folder, {"pooling_mode": pooling} if named else {"include_prompt": True, **said})
    check(folder, pooling, "query: ", "passage: ")


@pytest.mark.parametrize(
    ("said", "query", "passage"),
    [
        ({"prompts": {"query": "find: ", "document": "read: "}}, "find: ", "read: "),
        ({"prompts": {"query": "find: ", "passage": ""}}, "find: ", ""),
        ({"prompts": {"any": "text: "}, "default_prompt_name": "any"}, "text: ", "text: "),
        # sentence-transformers writes empty prompts for models that say nothing of them
        ({"prompts": {"query": "", "document": ""}, "default_prompt_name": None}, INSTRUCTION, ""),
        ({"__version__": {"transformers": "4.28.1"}}, INSTRUCTION, ""),
    ],
)
def test_a_models_files_say_what_is_put_before_a_text(
    tmp_path: Path, said: dict[str, Any], query: str, passage: str
) -> None:
    folder = save_tiny_bert(tmp_path / "bge-base-en-v1.5")
    save_files(folder, {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, said)
    check(folder, "cls", query, passage)


def test_a_model_of_the_hubs_cache_is_read_as_a_folder_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "hub" / "models--org--tiny"
    folder = save_tiny_bert(home / "snapshots" / "0123456789abcdef0123456789abcdef01234567")
    save_files(folder, {"pooling_mode": "cls"}, {"prompts": {"query": "find: "}})
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text(Path(folder).name)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    found = SentenceModel("org/tiny", device="cpu").embed(["bees"], "query")[0]
    assert np.allclose(found, reference(folder, "find: bees", "cls"), atol=1e-5)


def test_a_model_that_says_nothing_and_is_not_known_gets_the_mean_and_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = save_tiny_bert(tmp_path / "mine")
    with caplog.at_level(logging.WARNING):
        check(folder, "mean", "", "")
    assert "names no pooling" in caplog.text


def test_what_a_model_needs_and_is_not_known_is_refused(tmp_path: Path) -> None:
    folder = save_tiny_bert(tmp_path / "mine")
    save_files(folder, {"pooling_mode_weightedmean_tokens": True})
    with pytest.raises(ConfigError, match=r"pools by \['weightedmean_tokens'\].*v1/embeddings"):
        SentenceModel(folder)
    modules = json.loads((Path(folder) / "modules.json").read_text())
    modules[2]["type"] = "sentence_transformers.models.Dense"
    (Path(folder) / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ConfigError, match=r"a module Dense \(modules.json\)"):
        SentenceModel(folder)
    (Path(folder) / "modules.json").write_text("{")
    with pytest.raises(ConfigError, match=r"modules\.json is no JSON"):
        SentenceModel(folder)


@pytest.mark.parametrize("named", [True, False])
def test_a_server_is_sent_the_prefixes_of_its_model(named: bool) -> None:
    """OpenAI's API has no field for them, so servers do not add them."""
    seen: list[str] = []

    def vectors(body: dict[str, Any]) -> dict[str, Any]:
        seen.extend(body["input"])
        return {"data": [{"index": i, "embedding": [1, 2]} for i in range(len(body["input"]))]}

    with serving(vectors, models=["BAAI/bge-base-en-v1.5"]) as server:
        model = RemoteEmbedder(f"{server.url}#BAAI/bge-base-en-v1.5" if named else server.url)
        model.embed(["a passage"])
        model.embed(["a query"], "query")
    assert seen == ["a passage", f"{INSTRUCTION}a query"]
