"""What engines in other processes are given: the trained weights in Hugging Face format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_lora import adapted, base, shaken  # noqa: F401 - a fixture
from transformers import AutoModelForCausalLM, AutoTokenizer

from ludus.chat.tokenizers import HFTokenizer, load_tokenizer
from ludus.engine.replicas.weights import load_into, load_model
from ludus.model import use_ludus_attention
from ludus.training.models.loading import load_weights
from ludus.training.placement import PolicyWeights
from ludus.training.ranks.steps import Ranks

TOKENS = list(range(3, 40))


def stock_logprobs(model: Any) -> list[float]:
    with torch.no_grad():
        logits = model(torch.tensor([TOKENS])).logits[0].float()
    found = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(TOKENS[1:])[:, None])[:, 0]
    return [0.0, *found.tolist()]


def written(source: PolicyWeights, folder: Path) -> Path:
    folder.mkdir()
    source.write(folder)
    return folder


@torch.no_grad()
def changed(model: Any) -> None:
    for parameter in model.parameters():
        parameter.add_(0.01 * torch.randn_like(parameter))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_version_is_a_whole_model(base: Path, tmp_path: Path, dtype: str) -> None:  # noqa: F811
    """The first is written by transformers, later ones by us: each is what transformers would write."""
    model = load_weights(str(base), getattr(torch, dtype))
    use_ludus_attention(model)
    source = PolicyWeights(Ranks.alone(model), load_tokenizer(str(base)))
    engine = load_model(written(source, tmp_path / "0"), dtype, "cpu")
    for version in range(1, 4):
        changed(model)
        folder = written(source, tmp_path / str(version))
        model.save_pretrained(tmp_path / f"stock-{version}")
        ours, theirs = (
            load_file(f / "model.safetensors") for f in (folder, tmp_path / f"stock-{version}")
        )
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
        load_into(engine, folder)
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, engine.state_dict()[name]), name
        assert AutoTokenizer.from_pretrained(folder).get_vocab()
        stock = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
        close = {"float32": 1e-4, "bfloat16": 0.1}[dtype]
        assert source.score(TOKENS) == pytest.approx(stock_logprobs(stock), abs=close)


@pytest.mark.parametrize("options", [{}, {"targets": ["q_proj", "down_proj"]}])
def test_an_adapter_is_merged(base: Path, tmp_path: Path, options: dict[str, Any]) -> None:  # noqa: F811
    """As peft itself merges it; the model that is trained stays as it is."""
    model = adapted(base, **options)
    source = PolicyWeights(Ranks.alone(model), load_tokenizer(str(base)))
    for version in range(2):
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        folder = written(source, tmp_path / str(version))
        assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())
        merged = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        assert source.score(TOKENS) == pytest.approx(stock_logprobs(merged), abs=1e-4)
        model = shaken(model, 0.1, seed=version)
    expected = model.merge_and_unload().state_dict()
    final = load_file(written(source, tmp_path / "last") / "model.safetensors")
    for name, tensor in final.items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-5)


def test_files_of_other_names_are_translated(base: Path, tmp_path: Path) -> None:  # noqa: F811
    """Where a module's names are not the file's, transformers knows how to read it."""
    model = load_weights(str(base), torch.float32)
    source = PolicyWeights(Ranks.alone(model), HFTokenizer(AutoTokenizer.from_pretrained(base)))
    engine = load_model(written(source, tmp_path / "0"), "float32", "cpu")
    changed(model)
    folder = written(source, tmp_path / "1")
    from safetensors.torch import save_file

    state = load_file(folder / "model.safetensors")
    renamed = {name.removeprefix("model."): tensor for name, tensor in state.items()}
    save_file(renamed, str(folder / "model.safetensors"), metadata={"format": "pt"})
    load_into(engine, folder)
    assert all(torch.equal(t, engine.state_dict()[n]) for n, t in model.state_dict().items())
