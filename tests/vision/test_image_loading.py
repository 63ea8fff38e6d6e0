"""Which models see: families that the probe accepts, and those that it refuses, with the reason."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from vision_models import (
    LLAVA_TEMPLATE,
    noise,
    save_idefics3,
    save_llava,
    save_llava_next,
    save_paligemma,
)

from ludus.chat import Renderer, load_format
from ludus.core.failures import ConfigError
from ludus.core.messages import Message
from ludus.model import images_of, unwrapped, use_ludus_attention
from ludus.model.images import vision_parameters
from ludus.model.probes import check_images
from ludus.training import load_model
from ludus.training.checkpoint import save_model
from ludus.training.config.run import ModelConfig, ScratchConfig


def load(folder: Path, **more: Any) -> tuple[Any, Any]:
    return load_model(ModelConfig.parse({"name": str(folder), "device": "cpu", **more}), 0)


@pytest.mark.parametrize("save", [save_llava, save_idefics3, save_llava_next])
def test_models_of_these_families_see(save: Any, tmp_path: Path) -> None:
    model, tokenizer = load(save(tmp_path), vision="frozen")
    assert tokenizer.images is images_of(model) is not None
    assert tokenizer.images.text in tokenizer.controls
    use_ludus_attention(model)
    assert model.config.text_config._attn_implementation == "ludus"
    assert model.config.vision_config._attn_implementation != "ludus"
    seeing = vision_parameters(model)
    assert seeing and not any(p.requires_grad for p in seeing)
    assert all(p.requires_grad for p in model.get_decoder().parameters())


@pytest.mark.parametrize(("save", "reason"), [(save_paligemma, "in other tokens beside another")])
def test_others_are_refused_or_read_text_only(
    save: Any, reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = save(tmp_path)
    with pytest.raises(ConfigError, match=reason):
        load(folder, vision="frozen")
    with caplog.at_level(logging.WARNING):
        model, tokenizer = load(folder)
    assert tokenizer.images is None and images_of(model) is None
    assert "reads text only" in caplog.text and reason in caplog.text
    assert not any(p.requires_grad for p in vision_parameters(model))


def test_a_model_whose_forward_does_more_with_images_is_refused(tmp_path: Path) -> None:
    """Its own forward lets images into the decoder by another way, as deep features do."""
    model, _ = load(save_llava(tmp_path))
    inside: list[bool] = []

    def change(module: nn.Module, args: Any, kwargs: Any) -> Any:
        if inside:
            kwargs["inputs_embeds"] = kwargs["inputs_embeds"] + 0.01
        return args, kwargs

    check_images(model)
    model.register_forward_pre_hook(lambda *_: inside.append(True))
    model.register_forward_hook(lambda *_: inside.clear())
    model.get_decoder().register_forward_pre_hook(change, with_kwargs=True)
    with pytest.raises(ConfigError, match="does something else with images"):
        check_images(model)


def test_what_a_setting_asks_for_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="leave out one of the two"):
        ModelConfig.parse({"name": "x", "vision": "trained", "lora": {}})
    from ludus.training import fit_tokenizer
    from ludus.training.models.scratch import scratch_model

    tokenizer = fit_tokenizer([], 0)
    scratch_model(ScratchConfig(layers=1, width=16, heads=2), tokenizer, 0).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="has no vision part"):
        load(tmp_path, vision="frozen")
    assert load(tmp_path, vision="off")[1].images is None


def test_a_model_without_a_processor_reads_text_only(tmp_path: Path) -> None:
    save_llava(tmp_path)
    (tmp_path / "processor_config.json").unlink()
    assert load(tmp_path)[1].images is None
    with pytest.raises(ConfigError, match="processor"):
        load(tmp_path, vision="frozen")


def test_an_image_token_that_text_can_hold_is_refused(tmp_path: Path) -> None:
    """One that is an ordinary word of the vocabulary could be written by anybody."""
    save_llava(tmp_path)
    _, tokenizer = load(tmp_path)
    import ludus.training.models.loading as vision

    del tokenizer._controls["<image>"]
    with pytest.raises(ConfigError, match="not a special token"):
        vision._processor(str(tmp_path), tokenizer, None)


@pytest.mark.parametrize("template", [None, LLAVA_TEMPLATE])
def test_a_checkpoint_sees_as_the_model_did(tmp_path: Path, template: str | None) -> None:
    more = {} if template is None else {"template": template}
    model, tokenizer = load(save_llava(tmp_path / "base", **more))
    saved = tmp_path / "saved"
    saved.mkdir()
    save_model(saved, model, tokenizer)
    again, other = load(saved, vision="frozen")
    shown = [Message("user", "what is this", media=(noise(1),))]
    first, second = (Renderer(t, load_format("hermes")).opening(shown) for t in (tokenizer, other))
    assert first == second
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, again.state_dict()[name]), name


def test_an_adapter_is_put_into_the_decoder_alone(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    save_llava(tmp_path / "base")
    for targets in ("all-linear", ["q_proj", "v_proj"]):
        model, tokenizer = load(tmp_path / "base", lora={"rank": 2, "targets": targets})
        adapted = [name for name, _ in model.named_parameters() if "lora_" in name]
        assert adapted and all("language_model" in name for name in adapted)
        assert tokenizer.images is images_of(model) is not None
    folder = tmp_path / f"adapter-{len(adapted)}"
    folder.mkdir()
    save_model(folder, model, tokenizer)
    again, other = load(folder)
    assert other.images is images_of(again) is not None
    assert [n for n, _ in again.named_parameters() if "lora_" in n] == adapted
    assert not any(p.requires_grad for p in vision_parameters(unwrapped(again)))
