"""Dropout: a model's own is off, and an adapter's is drawn from the run's seed.

What is trained must be what was sampled. With dropout, a policy's probabilities in the trainer are not those of
the engine, ratios are off before anything was learned, and a model diverges from itself. So a model is loaded
without the dropout that its configuration asks for (GPT-2's and OPT's do, by 0.1), and without the noise that
some routers of experts have in training (PhiMoE's, by 0.01). An adapter's dropout (`model.lora.dropout`) is
asked for by whoever writes the recipe, and stays.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ludus.core.random import key


def without_dropout(config: Any) -> list[str]:
    """Set every rate in a Hugging Face configuration to 0; those that were not, as "name = rate"."""
    silenced: list[str] = []
    for name, value in list(vars(config).items()):
        if hasattr(value, "to_dict"):  # the configuration of a part
            silenced += without_dropout(value)
        elif (
            _is_noise(name) and isinstance(value, float | int) and not isinstance(value, bool) and value
        ):
            silenced.append(f"{name} = {value:g}")
            setattr(config, name, 0.0)
    return silenced


def _is_noise(name: str) -> bool:
    """Whether this is a rate of something that is random in training alone."""
    return "drop" in name or name.endswith(("jitter_noise", "jitter_eps"))


class SeededDropout:
    """Makes what a module drops out in a step a function of a seed and the step."""

    def __init__(self, model: nn.Module, device: torch.device, seed: int) -> None:
        self._seed = seed
        self._layers = [module for module in model.modules() if isinstance(module, nn.Dropout)]
        self._devices = [device] if device.type == "cuda" else []

    @contextmanager
    def drawn_for(self, step: int) -> Iterator[None]:
        """Where nothing is dropped out, nothing happens; other random draws go on afterwards as before."""
        if not any(layer.p > 0 for layer in self._layers):
            yield
            return
        with torch.random.fork_rng(devices=self._devices):
            torch.manual_seed(key(self._seed, "dropout", step))
            yield
