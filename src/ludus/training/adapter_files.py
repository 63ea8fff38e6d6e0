"""What lies in an adapter's folder, and whether it can be taken as it is.

peft fills up what is missing with random numbers, loads weights into the base that no checkpoint would keep,
and takes whatever a configuration asks for. What Ludus would sample, train or save otherwise is refused here.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ludus.core.failures import ConfigError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
"""What peft calls them."""

_SPLITTING = ("pissa", "olora", "corda", "lora_ga")
"""Ways to begin in which an adapter takes its start out of the base: the base without it is not the model."""


def is_adapter(folder: str | Path) -> bool:
    """Whether a folder holds an adapter instead of a whole model."""
    return (Path(folder) / CONFIG).is_file()


def base_of(folder: Path) -> str:
    """What the model is loaded by that an adapter was trained on."""
    try:
        settings = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        kind, base = settings["peft_type"], settings["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{folder / CONFIG} is not an adapter's ({type(error).__name__}: {error})"
        ) from None
    if kind != "LORA":
        raise ConfigError(f"{folder} holds an adapter of the kind {kind}; Ludus trains LoRA adapters")
    if not isinstance(base, str):
        raise ConfigError(
            f"{folder / CONFIG} does not say which model its adapter is for: set base_model_name_or_path"
        )
    if is_adapter(base):
        raise ConfigError(
            f"the adapter in {folder} is for {base!r}, which is an adapter itself: merge that one into its "
            "base first (peft's merge_and_unload), and name the folder with the merged model"
        )
    return base


def check_settings(settings: Any, folder: Path) -> None:
    """Refuse what a configuration asks for and Ludus does not do."""
    if getattr(settings, "alora_invocation_tokens", None):
        raise ConfigError(
            f"the adapter in {folder} wakes up at certain tokens (alora_invocation_tokens), which Ludus does "
            "not know"
        )
    if str(settings.init_lora_weights).startswith("pissa_niter"):
        raise ConfigError(
            f"the adapter in {folder} begins with {settings.init_lora_weights}, which peft draws anew whenever "
            "it is loaded: save it as a plain one first (peft's path_initial_model_for_weight_conversion)"
        )


def splits_its_base(settings: Any) -> bool:
    """Whether the model without its adapter is not the model that the adapter was made for."""
    return str(settings.init_lora_weights).startswith(_SPLITTING)


def read_weights(folder: Path) -> dict[str, Tensor]:
    """The tensors of an adapter, by the names that peft gives them in a file."""
    from peft.utils import load_peft_weights

    if not any((folder / name).is_file() for name in (WEIGHTS, "adapter_model.bin")):
        raise ConfigError(
            f"{folder} has an {CONFIG} and no {WEIGHTS}: the adapter's weights are missing"
        )
    try:
        weights: dict[str, Tensor] = load_peft_weights(str(folder), device="cpu")
    except Exception as error:
        raise ConfigError(
            f"the adapter's weights in {folder} cannot be read ({type(error).__name__}: {str(error)[:200]})"
        ) from error
    return weights


def check_foreign(weights: Mapping[str, Tensor], model: nn.Module, folder: Path) -> None:
    """Refuse weights of the base itself, unless they are those that it has: they would not be saved again."""
    own = model.state_dict()
    for name, tensor in weights.items():
        if "lora_" in name:
            continue
        known = own.get(name.removeprefix("base_model.model.").replace(".base_layer.", "."))
        if (
            known is None
            or known.shape != tensor.shape
            or not torch.equal(known.cpu(), tensor.to(known.dtype))
        ):
            raise ConfigError(
                f"the adapter's weights in {folder} have {name}, which is no part of an adapter and not what "
                "the base has; Ludus keeps and saves low-rank matrices alone"
            )


def check_complete(weights: Iterable[str], wanted: Iterable[str], folder: Path) -> None:
    """Refuse a file that has not just the weights that its configuration asks for."""
    saved, asked = {name for name in weights if "lora_" in name}, set(wanted)
    if missing := sorted(asked - saved):
        raise ConfigError(
            f"the adapter's weights in {folder} lack {len(missing)} of those that its {CONFIG} asks for, such "
            f"as {missing[0]}; they would be random numbers. Are both files of one adapter?"
        )
    if foreign := sorted(saved - asked):
        raise ConfigError(
            f"the adapter's weights in {folder} have {len(foreign)} that its {CONFIG} does not ask for, such "
            f"as {foreign[0]}; they would be ignored. Are both files of one adapter?"
        )


def saved_name(name: str) -> str:
    """What peft calls a parameter in a file: without the adapter's own name."""
    bare = name.replace(".default.", ".").removesuffix(".default")
    return bare.removesuffix(".weight") if "lora_magnitude_vector" in bare else bare
