"""Adapter folders as peft writes them, and which base an adapter belongs to.

peft fills missing weights with random numbers, loads weights into the base that no checkpoint would keep, and
takes whatever a configuration asks for: what Ludus cannot sample, train or save is refused here.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ludus.core.failures import ConfigError
from ludus.model import unwrapped

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
"""peft's names of an adapter's files."""

_BASE = "base.json"
"""Ludus' own file: the weights that the adapter was trained with."""

_SPLITTING = ("pissa", "olora", "corda", "lora_ga", "loftq")
"""Ways to begin in which an adapter changes the base: the base without it is not the model."""


def is_adapter(folder: str | Path) -> bool:
    """Whether a folder holds an adapter instead of a whole model."""
    return (Path(folder) / CONFIG).is_file()


def base_of(folder: Path) -> str:
    """Name or path of the base model of an adapter."""
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


def revision_of(folder: Path) -> str | None:
    """Which version of its base a hub is asked for."""
    revision = json.loads((folder / CONFIG).read_text(encoding="utf-8")).get("revision")
    return revision if isinstance(revision, str) and revision else None


def write_base(fingerprint: str, folder: Path) -> None:
    """Note which weights an adapter belongs to."""
    (folder / _BASE).write_text(json.dumps({"fingerprint": fingerprint}), encoding="utf-8")


def check_base(fingerprint: str, folder: Path) -> None:
    """Refuse other weights than an adapter was trained beside, where that is noted."""
    try:
        noted = json.loads((folder / _BASE).read_text(encoding="utf-8"))["fingerprint"]
    except FileNotFoundError:
        return  # others do not note it
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{folder / _BASE} cannot be read ({type(error).__name__}: {error})") from None
    if noted != fingerprint:
        raise ConfigError(
            f"the adapter in {folder} was trained beside other weights than {base_of(folder)!r} has now: put "
            f"those back, or set base_model_name_or_path in {CONFIG}; to use it with these all the same, "
            f"remove {_BASE}"
        )


def check_settings(settings: Any, folder: Path) -> None:
    """Refuse what a configuration asks for and Ludus does not do."""
    if getattr(settings, "alora_invocation_tokens", None):
        raise ConfigError(
            f"the adapter in {folder} wakes up at certain tokens (alora_invocation_tokens), which Ludus does "
            "not know"
        )
    if getattr(settings, "layer_replication", None):
        raise ConfigError(
            f"the adapter in {folder} repeats layers (layer_replication), which Ludus does not"
        )
    if _beginning(settings).startswith("pissa_niter"):
        raise ConfigError(
            f"the adapter in {folder} begins with {settings.init_lora_weights}, which peft draws anew whenever "
            "it is loaded: save it as a plain one first (peft's path_initial_model_for_weight_conversion)"
        )


def splits_its_base(settings: Any) -> bool:
    """Whether the model without its adapter is not the model that the adapter was made for."""
    return _beginning(settings).startswith(_SPLITTING) or bool(getattr(settings, "kasa_config", None))


def splits_base_of(folder: Path) -> bool:
    """Whether loading an adapter changes its base: it began so, or its file has weights of the base itself."""
    from peft import LoraConfig

    weights = read_weights(folder)
    return splits_its_base(LoraConfig.from_pretrained(str(folder))) or not all(
        "lora_" in name for name in weights
    )


def _beginning(settings: Any) -> str:
    """How the adapter's weights are initialised; peft ignores the case."""
    return str(settings.init_lora_weights).lower()


def check_weights(folder: Path) -> None:
    """Refuse a folder that says what an adapter is, and does not have it."""
    if not any((folder / name).is_file() for name in (WEIGHTS, "adapter_model.bin")):
        raise ConfigError(
            f"{folder} has an {CONFIG} and no {WEIGHTS}: the adapter's weights are missing"
        )


def read_weights(folder: Path) -> dict[str, Tensor]:
    """The tensors of an adapter, by the names that peft gives them in a file."""
    from peft.utils import load_peft_weights

    check_weights(folder)
    try:
        weights: dict[str, Tensor] = load_peft_weights(str(folder), device="cpu")
    except Exception as error:
        raise ConfigError(
            f"the adapter's weights in {folder} cannot be read ({type(error).__name__}: {str(error)[:200]})"
        ) from error
    return weights


@contextmanager
def keeping_the_base(weights: Mapping[str, Tensor], model: nn.Module, folder: Path) -> Iterator[None]:
    """Refuse weights of the base itself, unless they are those that it has: they would not be saved again.

    peft loads them, and an adapter may have them in a coarser format: what the base had comes back.
    """
    own = model.state_dict()
    coarser: list[tuple[Tensor, Tensor]] = []
    for name, tensor in weights.items():
        if "lora_" in name:
            continue
        known = own.get(name.removeprefix("base_model.model.").replace(".base_layer.", "."))
        if known is None or not _is_same(known.cpu(), tensor):
            raise ConfigError(
                f"the adapter's weights in {folder} have {name}, which is no part of an adapter and not what "
                "the base has; Ludus keeps and saves low-rank matrices alone"
            )
        if tensor.dtype != known.dtype:
            coarser.append((known, known.clone()))
    yield
    for known, value in coarser:
        known.copy_(value)


def _is_same(known: Tensor, saved: Tensor) -> bool:
    """Whether these are the same numbers, in the finer or in the coarser of the two formats."""
    return torch.equal(known, saved.to(known.dtype)) or torch.equal(known.to(saved.dtype), saved)


def check_complete(missing: Sequence[str], foreign: Sequence[str], folder: Path) -> None:
    """Refuse a file that has not just the weights that its configuration asks for."""
    if missing:
        raise ConfigError(
            f"the adapter's weights in {folder} lack {len(missing)} of those that its {CONFIG} asks for, such "
            f"as {missing[0]}; they would be random numbers. Are both files of one adapter?"
        )
    if foreign:
        raise ConfigError(
            f"the adapter's weights in {folder} have {len(foreign)} that its {CONFIG} does not ask for, such "
            f"as {foreign[0]}; they would be ignored. Are both files of one adapter?"
        )


def saved_name(name: str) -> str:
    """peft's name of a parameter in a file: without the adapter's own name."""
    bare = name.replace(".default.", ".").removesuffix(".default")
    return bare.removesuffix(".weight") if "lora_magnitude_vector" in bare else bare


_PLACES = 256
"""How many numbers of each tensor are looked at."""


def fingerprint(model: nn.Module) -> str:
    """Fingerprint of weights, independent of the format that they were loaded in.

    Names are left out: they change with the versions of the library that loads a model.
    """
    files = getattr(
        unwrapped(model), "ludus_files", None
    )  # of a model whose weights have yet to be read
    parts = sorted(map(_digest, model.state_dict().values() if files is None else files.tensors(model)))
    return hashlib.sha256("".join(parts).encode()).hexdigest()


def _digest(tensor: Tensor) -> str:
    flat = tensor.detach().flatten()
    step = max(1, len(flat) // _PLACES) | 1  # odd, so that not all places are in one column
    seen = flat[::step].to("cpu", torch.bfloat16)
    shape = str(tuple(tensor.shape)).encode()
    return hashlib.sha256(shape + seen.view(torch.int16).numpy().tobytes()).hexdigest()
