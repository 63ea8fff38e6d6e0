"""LoRA through peft: small matrices beside a model's own, never merged into them.

The adapted module is sampled and trained as it stands; the engine runs its layers, adapters and all. Only the
adapter's weights are trained and saved. They are float32 whatever the base is, so that small updates are not
lost, and an optimizer needs no second copy of them.

Folders are as peft writes them. peft fills missing weights with random numbers, loads weights into the base
that no checkpoint would keep, and takes whatever a configuration asks for: what Ludus cannot sample, train or
save is refused here.
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

from ludus.core.failures import ConfigError, MissingExtraError
from ludus.model import decoder_of, unwrapped
from ludus.model.state_layers import read_past_forward
from ludus.training.config.run import LoraConfig
from ludus.training.optim.shard_files import write_shards
from ludus.training.optim.sharding import group_of, module_of

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


# Adapters of a model.

RANK, ALPHA = 16, 32.0
"""Defaults of a new adapter."""


def is_adapted(model: nn.Module) -> bool:
    """Whether a model is trained through an adapter."""
    return hasattr(module_of(model), "peft_config")


def add_adapter(model: nn.Module, config: LoraConfig, base: str, seed: int) -> nn.Module:
    """The model with a new adapter, which changes nothing yet. `base` is what the model is loaded by."""
    peft = require_peft()
    modules, parameters = lora_targets(model, config)
    if parameters and config.dropout:
        raise ConfigError(
            f"model.lora.dropout = {config.dropout:g}, and {parameters[0]} belongs to experts, whose adapters "
            "have no dropout in peft: set it to 0, or leave experts out of model.lora.targets"
        )
    settings = peft.LoraConfig(
        r=config.rank or RANK,
        lora_alpha=config.alpha or ALPHA,
        lora_dropout=config.dropout,
        target_modules=modules,
        target_parameters=parameters or None,
        task_type="CAUSAL_LM",
    )
    print_of_base = fingerprint(model)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            adapted: Any = peft.get_peft_model(model, settings)
        except ValueError as error:
            raise ConfigError(f"model.lora: peft cannot adapt {base!r}: {error}") from error
    adapted.peft_config["default"].base_model_name_or_path = base
    adapted.base_fingerprint = print_of_base
    return _checked(adapted)


def load_adapter(model: nn.Module, folder: Path, config: LoraConfig | None) -> nn.Module:
    """The base model with the adapter of a folder, ready to be trained further."""
    peft = require_peft()
    weights = read_weights(folder)
    print_of_base = fingerprint(model)
    check_base(print_of_base, folder)
    try:
        settings = peft.LoraConfig.from_pretrained(str(folder))
        check_settings(settings, folder)
        # asked for by a recipe or not at all: an adapter from elsewhere often has some
        settings.lora_dropout = config.dropout if config is not None else 0.0
        with keeping_the_base(weights, model, folder):
            adapted: Any = peft.PeftModel.from_pretrained(
                model, str(folder), config=settings, is_trainable=True
            )
            loaded = peft.set_peft_model_state_dict(adapted, weights)  # again, for the names amiss
    except ConfigError:
        raise
    except Exception as error:  # peft passes on whatever its parts raise
        raise ConfigError(
            f"the adapter in {folder} does not fit its base {base_of(folder)!r}: "
            f"{type(error).__name__}: {str(error).strip():.300}"
        ) from error
    missing, foreign = (
        sorted(name for name in names if "lora_" in name)
        for names in (loaded.missing_keys, loaded.unexpected_keys)
    )
    check_complete(missing, foreign, folder)
    if config is not None:
        _compare(adapted, config, folder)
    adapted.base_fingerprint = print_of_base
    return _checked(adapted)


def _compare(adapted: Any, config: LoraConfig, folder: Path) -> None:
    """Refuse a recipe that says something else about an adapter than it is."""
    settings = adapted.peft_config["default"]
    layers = {n.rpartition(".lora_")[0] for n, _ in adapter_parameters(adapted)}
    # a layer of experts has an adapter for each of its parameters, and the wrappers have no names of their own
    wrapped = {name for name in layers if hasattr(adapted.get_submodule(name), "parameter_name")}
    names = {*(layers - wrapped), *(settings.target_parameters or ())}
    found = (settings.r, settings.lora_alpha, {name.rpartition(".")[2] for name in names})
    named = config.targets != "all-linear"  # which says nothing of a saved one
    targets = {target.rpartition(".")[2] for target in config.targets} if named else found[2]
    if (config.rank or found[0], config.alpha or found[1], targets) != found:
        raise ConfigError(
            f"the adapter in {folder} has rank {found[0]}, alpha {found[1]:g} and the targets "
            f"{', '.join(sorted(found[2]))}, which model.lora does not say: leave them out to take the adapter "
            "as it is"
        )


def save_adapter(folder: Path, model: nn.Module) -> None:
    """Write an adapter as peft reads it; of a sharded one, each rank its parts."""
    adapted: Any = module_of(model)
    settings, group = adapted.peft_config["default"], group_of(model)
    state = require_peft().get_peft_model_state_dict(adapted, save_embedding_layers=False)
    write_shards(folder / WEIGHTS, state, group)
    if group.rank != 0:
        return
    write_base(adapted.base_fingerprint, folder)
    settings.inference_mode = (
        True  # as peft leaves it on disk: a plain load is for use, not for training
    )
    try:
        settings.save_pretrained(str(folder))
    finally:
        settings.inference_mode = False


def adapter_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The adapter's own, by name."""
    return ((name, p) for name, p in model.named_parameters() if "lora_" in name)


def lora_targets(model: nn.Module, config: LoraConfig) -> tuple[list[str], list[str]]:
    """What peft calls target modules and target parameters: the last parts of the layers' names, and the whole
    names of matrices of experts, which are one parameter together. Head and embeddings are left as they are."""
    from transformers.pytorch_utils import Conv1D

    # by what they compute: a router of experts may be a linear layer by name and give something else
    products = (nn.Linear.forward, Conv1D.forward)
    decoder = decoder_of(model)
    names = {name for name, m in decoder.named_modules() if type(m).forward in products}
    passed_over = names & read_past_forward(model)
    names -= passed_over
    known = sorted({name.rpartition(".")[2] for name in names})
    if config.targets == "all-linear":
        # a number, as a list of layers has them, would name layers of other kinds too
        others = {name.rpartition(".")[2] for name in passed_over}
        says_which = _is_alone(model) and not any(n.isdigit() or n in others for n in known)
        return known if says_which else _within_decoder(model, names), []
    experts = {name for name, p in decoder.named_parameters() if _is_experts(name, p)}
    more = sorted({".".join(name.split(".")[-2:]) for name in experts})
    for target in config.targets:
        if any(name == target or name.endswith(f".{target}") for name in passed_over):
            raise ConfigError(
                f"model.lora.targets names {target!r}, whose weight a layer with a state reads itself: an "
                f"adapter would be passed over. It has {', '.join(known)}"
            )
        if not any(name == target or name.endswith(f".{target}") for name in names | experts):
            raise ConfigError(
                f"model.lora.targets names {target!r}, and the decoder has no linear layer of that name; "
                f"it has {', '.join([*known, *more])}"
            )
    chosen, parameters = (
        {n for n in all_ if any(n == t or n.endswith(f".{t}") for t in config.targets)}
        for all_ in (names, experts)
    )
    linear = [t for t in config.targets if any(n == t or n.endswith(f".{t}") for n in names)]
    modules = sorted(linear) if _is_alone(model) else _within_decoder(model, chosen)
    return modules, _within_decoder(model, parameters)


def _is_experts(name: str, parameter: nn.Parameter) -> bool:
    """Whether this has a matrix for each expert of a layer."""
    return parameter.ndim == 3 and "experts" in name.split(".")


def _is_alone(model: nn.Module) -> bool:
    """Whether no other part, such as a vision tower, could have layers of the decoder's names."""
    return not hasattr(unwrapped(model), "get_image_features")


def _within_decoder(model: nn.Module, names: set[str]) -> list[str]:
    """The whole names of a decoder's layers."""
    decoder = decoder_of(model)
    prefix = next(name for name, module in unwrapped(model).named_modules() if module is decoder)
    return sorted(f"{prefix}.{name}" for name in names)


def _checked(model: nn.Module) -> nn.Module:
    """The adapted model, its base out of training's reach."""
    others = [name for name, p in model.named_parameters() if p.requires_grad and "lora_" not in name]
    if others:
        raise ConfigError(
            f"the adapter would train {others[0]} and {len(others) - 1} more weights of the base itself "
            "(biases, or modules_to_save); Ludus keeps and saves low-rank matrices alone"
        )
    return model


def require_peft() -> Any:
    """The package; an error that names the extra where it is missing."""
    try:
        import peft
    except ImportError:
        raise MissingExtraError("peft", "lora", "model.lora") from None
    return peft
