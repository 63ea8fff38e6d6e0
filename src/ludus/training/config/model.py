"""[model]: which model is trained, whole or through an adapter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from ludus.core.config import Config, Place
from ludus.observe.files import read_regular


class ScratchConfig(Config):
    """A small Llama made on the spot, with a tokenizer fitted to the demonstrations."""

    layers: int = Field(default=2, ge=1)
    """Transformer layers."""
    width: int = Field(default=128, ge=16)
    """Size of the hidden states."""
    heads: int = Field(default=4, ge=1)
    """Attention heads; the width must be a multiple of them."""
    kv_heads: int = Field(default=2, ge=1)
    """Heads that keys and values have; the heads must be a multiple of them."""
    vocabulary: int = Field(default=1024, ge=300)
    """Most tokens the fitted tokenizer may have."""
    context: int = Field(default=4096, ge=16)
    """Longest sequence."""

    @model_validator(mode="after")
    def _divisible(self) -> ScratchConfig:
        if self.width % self.heads or (self.width // self.heads) % 2:
            raise ValueError("scratch.width must be an even multiple of scratch.heads")
        if self.heads % self.kv_heads:
            raise ValueError("scratch.heads must be a multiple of scratch.kv_heads")
        return self


class LoraConfig(Config):
    """Train small low-rank matrices beside the model's own, which stay as they are (extra: lora)."""

    rank: int | None = Field(default=None, ge=1, le=1024)
    """Rank of the update of each matrix: 16 for a new adapter when left out; a saved one has its own."""
    alpha: float | None = Field(default=None, gt=0)
    """The update is scaled by alpha / rank: 32 for a new adapter when left out; a saved one has its own."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout before the adapter, in training alone; above 0, engine and trainer differ by it."""
    targets: Literal["all-linear"] | tuple[str, ...] = "all-linear"
    """Which linear layers, by the last part of their names, such as ["q_proj", "v_proj"]."""
    reference: Literal["start", "base"] = "start"
    """Reference of KL and DPO: the model that the stage began with, or the base model (docs/models.md)."""

    @model_validator(mode="after")
    def _has_targets(self) -> LoraConfig:
        if not self.targets:
            raise ValueError('lora.targets must name at least one layer; leave it out for "all-linear"')
        return self


_NOT_VARIABLES = (
    "messages",
    "conversation",
    "tools",
    "documents",
    "chat_template",
    "add_generation_prompt",
    "continue_final_message",
    "tokenize",
)
"""Arguments of rendering that are not a template's own variables."""


class ModelConfig(Config):
    """Which model: a folder, a short or hub name, or one made from scratch."""

    name: Place | None = None
    """A folder in Hugging Face format, a .gguf file, a short name (smollm2), or a name on the hub."""
    scratch: ScratchConfig | None = None
    """Make a new small model instead."""
    lora: LoraConfig | None = None
    """Train an adapter instead of all weights."""
    vision: Literal["auto", "frozen", "trained", "off"] = "auto"
    """The vision part of a model that has one: frozen or trained; auto is frozen where images can be run, and
    else off, which reads text alone (docs/images.md)."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Number format of the weights; auto is bfloat16 on a GPU that computes in it, and else float32."""
    device: str = "auto"
    """Where it runs: auto, cpu, cuda, cuda:1, ..."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Variables of the chat template, such as { enable_thinking = false }, wherever a conversation is rendered:
    training, evaluation, serving."""
    trust_remote_code: bool = False
    """Run the Python code that the model's folder or hub page brings: it can do anything that you can."""

    @property
    def is_from_scratch(self) -> bool:
        """Whether it is made from scratch, or was in the run whose checkpoint it is."""
        return self.scratch is not None or (self.name is not None and _began_from_scratch(self.name))

    @field_validator("chat_template_kwargs")
    @classmethod
    def _are_variables(cls, given: dict[str, Any]) -> dict[str, Any]:
        if own := [name for name in given if name in _NOT_VARIABLES]:
            raise ValueError(f"{', '.join(own)} is given by Ludus: leave it out")
        return given

    @model_validator(mode="after")
    def _one_of(self) -> ModelConfig:
        if (self.name is None) == (self.scratch is None):
            raise ValueError(
                "give exactly one of model.name and model.scratch; on the command line, model.scratch.layers=2 "
                "makes a model in place of the recipe's, and model.name=NAME takes another one"
            )
        if self.scratch is not None and self.lora is not None:
            raise ValueError(
                "model.lora adapts a model that has learned something; one made from scratch has not: leave "
                "out model.lora, or name a model"
            )
        if self.vision == "trained" and self.lora is not None:
            raise ValueError(
                'model.vision = "trained" trains weights of the model itself, and model.lora leaves all '
                "of them as they are: leave out one of the two"
            )
        return self


def _began_from_scratch(name: str, runs: int = 8) -> bool:
    """Whether a folder is a checkpoint of a run that made its model, or began with such a checkpoint."""
    folder = Path(name)
    for run in (folder, folder.parent.parent) if runs else ():
        try:
            model = json.loads(read_regular(run / "recipe.json"))["model"]
            made, before = model.get("scratch"), model.get("name")
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            continue
        return made is not None or (isinstance(before, str) and _began_from_scratch(before, runs - 1))
    return False
