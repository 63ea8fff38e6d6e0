"""model.chat_template_kwargs and model.trust_remote_code, from the recipe to the prompt and the module."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from transformers import dynamic_module_utils

from ludus import train
from ludus.chat.tokenizers import CHATML
from ludus.core import ConfigError
from ludus.observe import RunFolder
from ludus.training.config.run import ModelConfig, ScratchConfig
from ludus.training.models.loading import load_model

THINKING = "{% if not enable_thinking | default(true) %}{{ '(no thoughts)' }}{% endif %}"
CODE = """from transformers import LlamaConfig, LlamaForCausalLM


class OwnConfig(LlamaConfig):
    model_type = "own-llama"


class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small model whose template has a variable."""
    model, tokenizer = load_model(ModelConfig(scratch=ScratchConfig(layers=1, width=16)), seed=0)
    model.save_pretrained(tmp_path / "model")  # type: ignore[operator]
    tokenizer.inner.save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "chat_template.jinja").write_text(THINKING + CHATML)
    return tmp_path / "model"


def test_variables_of_the_template_are_in_every_prompt_of_a_run(folder: Path, tmp_path: Path) -> None:
    model = {"name": str(folder), "chat_template_kwargs": {"enable_thinking": False}}
    train(
        model=model,
        tasks=[{"prompt": "?", "target": "!"}],
        held_out=[{"prompt": "??", "target": "!"}],
        rewards=["exact_match"],
        demonstrations=[
            {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]}
        ],
        warm_start={"steps": 1},
        rl={"steps": 1, "tasks": 1, "attempts": 2},
        budgets={"max_turn_tokens": 2},
        run={"folder": str(tmp_path / "run")},
    )
    _, tokenizer = load_model(ModelConfig(name=str(folder)), seed=0)
    for step, split in ((2, "train"), (2, "eval")):
        played = RunFolder(tmp_path / "run").trajectories(step, split)
        assert played
        for one in played:
            assert "(no thoughts)" in tokenizer.decode(one.tokens)
    assert json.loads((tmp_path / "run" / "recipe.json").read_text())["model"][
        "chat_template_kwargs"
    ] == {"enable_thinking": False}


def test_variables_that_are_not_the_templates_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="tools is given by Ludus"):
        ModelConfig.parse({"name": str(folder), "chat_template_kwargs": {"tools": []}})
    with pytest.raises(ConfigError, match="the chat template does not read 'thinking_budget'"):
        load_model(ModelConfig(name=str(folder), chat_template_kwargs={"thinking_budget": 3}), seed=0)


def test_code_of_a_model_runs_only_where_it_is_trusted(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(tmp_path / "modules")
    settings = json.loads((folder / "config.json").read_text())
    settings["model_type"] = "own-llama"
    settings["auto_map"] = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    (folder / "config.json").write_text(json.dumps(settings))
    (folder / "own.py").write_text(CODE)
    with pytest.raises(ConfigError, match=r"set model.trust_remote_code = true to run it"):
        load_model(ModelConfig(name=str(folder)), seed=0)
    model, _ = load_model(ModelConfig(name=str(folder), trust_remote_code=True), seed=0)
    assert type(model).__name__ == "OwnModel"
    assert torch.isfinite(next(model.parameters())).all()
    assert any(
        "trust_remote_code" in one.message for one in caplog.records if one.levelno == logging.WARNING
    )
