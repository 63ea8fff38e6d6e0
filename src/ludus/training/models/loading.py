"""Where models come from: a folder, a hub, a short name, an adapter, or made on the spot."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from ludus.chat.tokenizers import HFTokenizer, load_tokenizer
from ludus.core.failures import ConfigError, MissingExtraError, not_there
from ludus.core.images import ImageError
from ludus.model.hf_model import auto_class, unwrapped, vocabulary_size
from ludus.model.images import ImageProcessor, attach_images, forget_features, vision_parameters
from ludus.model.probes import check_images, check_positions
from ludus.training.config.run import ModelConfig
from ludus.training.models.gguf import check_file, located, without_progress_bars
from ludus.training.models.lora import (
    CONFIG,
    add_adapter,
    base_of,
    check_weights,
    is_adapter,
    load_adapter,
    require_peft,
    revision_of,
)
from ludus.training.models.scratch import check_size, fit_tokenizer, scratch_model
from ludus.training.optim.shard_files import WeightFiles, hollow_parameters, is_hollow, standing_in

log = logging.getLogger(__name__)

_HUB_NAME = re.compile(r"[\w.-]{1,96}(/[\w.-]{1,96})?")


def device_of(config: ModelConfig) -> torch.device:
    """The device a recipe asks for; auto is the first GPU that works, or else the CPU."""
    if config.device == "auto":
        return torch.device("cuda" if _has_gpu() else "cpu")
    kind = config.device.partition(":")[0]
    if kind not in ("cpu", "cuda"):
        why = "models run on cpu and cuda devices"
        if kind == "mps":
            why += (
                ", and on a Mac on cpu alone (its GPU has no float64, in which random numbers are drawn)"
            )
        raise ConfigError(f"model.device = {config.device!r}: {why}; say one of them, or leave it out")
    try:
        device = torch.device(config.device)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"model.device = {config.device!r} cannot be used here: {error}") from None
    return device


def check_source(config: ModelConfig) -> None:
    """Refuse a model that cannot be loaded, as far as that shows without loading it."""
    device_of(config)
    if config.lora is not None:
        require_peft()
    if config.scratch is not None:
        check_size(config.scratch, device_of(config))
    if config.name is None:
        return
    if check_file(config.name):
        return
    folder = Path(config.name)
    if is_adapter(folder):
        base_of(folder)
        check_weights(folder)
    if folder.is_dir() and not is_adapter(folder) and not (folder / "config.json").is_file():
        raise ConfigError(f"model.name = {config.name!r} is a folder without a config.json: not a model")
    if folder.is_file():
        raise ConfigError(
            f"model.name = {config.name!r} is a file, and neither a folder nor a GGUF file"
        )
    if not folder.exists() and config.name.startswith((".", "/", "~")):
        raise ConfigError(f"model.name = {config.name!r}: {not_there(config.name, 'folder')}")
    if folder.exists() or "://" in config.name:
        return
    if not _HUB_NAME.fullmatch(config.name):
        raise ConfigError(
            f"model.name = {config.name!r} is neither a folder nor a name that a hub could have (owner/name)"
        )
    check_hub(config.name)


def _has_gpu() -> bool:
    """Whether there is a GPU, and it can be used: a driver that does not fit, or a taken GPU, cannot."""
    if not torch.cuda.is_available():
        return False
    try:
        torch.zeros(1, device="cuda").item()
    except RuntimeError as error:
        log.warning("there is a GPU, but it cannot be used, so the CPU is: %s", error)
        return False
    return True


def dtype_of(config: ModelConfig, device: torch.device) -> torch.dtype:
    """The number format a recipe asks for; auto is bfloat16 where the device computes in it, or else float32.

    float16 is never chosen: small gradients vanish in it, unless a loss is scaled to fit.
    """
    if config.dtype == "auto":
        fits = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.bfloat16 if fits else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[config.dtype]


def load_model(
    config: ModelConfig,
    seed: int,
    corpus: Iterable[str] = (),
    *,
    hollow: bool = False,
    base: str | None = None,
) -> tuple[nn.Module, HFTokenizer]:
    """The model and its tokenizer.

    Args:
        config: Which one.
        seed: Decides what is drawn: a model made from scratch, a new adapter.
        corpus: What a tokenizer made from scratch is fitted to.
        hollow: Without the weights of the files, on the host. Not for a model made from scratch.
        base: A folder with the base weights, where they are not those that `config` names.
    """
    device = device_of(config)
    dtype = dtype_of(config, device)
    if config.scratch is not None:
        fitted = fit_tokenizer(corpus, config.scratch.vocabulary)
        model = scratch_model(config.scratch, fitted, seed)
        own = HFTokenizer(fitted, template_kwargs=config.chat_template_kwargs)
        return model.to(device=device, dtype=dtype), own
    assert config.name is not None, "a recipe gives exactly one of name and scratch"
    if config.trust_remote_code:
        log.warning(
            "model.trust_remote_code: the code that %s brings runs in this process, with all that you may do",
            config.name,
        )
    if is_adapter(config.name):
        model, tokenizer = _load_adapted(Path(config.name), config, dtype, base, hollow)
    else:
        folder = source_of(config.name) if base is None else base
        with suppress(OSError, ValueError):  # a damaged one is told of before its tokenizer is read
            read_config(folder, trust=config.trust_remote_code)
        tokenizer = _tokenizer(folder, config)
        model = load_weights(folder, dtype, hollow=hollow, trust=config.trust_remote_code)
        load_vision(model, tokenizer, folder, config.vision)
        if config.lora is not None:
            with standing_in(model):
                model = add_adapter(model, config.lora, _lasting(config.name), seed)
    _compare_vocabularies(model, tokenizer, config.name)
    return model if hollow else _moved(model, device), tokenizer


def _compare_vocabularies(model: Any, tokenizer: HFTokenizer, name: str) -> None:
    size = model.get_input_embeddings().weight.shape[0]
    if tokenizer.vocabulary_size > size:
        log.warning(
            "the tokenizer of %s has %d tokens and the model only %d: an episode in which one of the others "
            "comes up fails. Is it another model's tokenizer, or were the embeddings not resized?",
            name,
            tokenizer.vocabulary_size,
            size,
        )


def _load_adapted(
    folder: Path, config: ModelConfig, dtype: torch.dtype, given: str | None, hollow: bool
) -> tuple[nn.Module, HFTokenizer]:
    base, revision = base_of(folder), revision_of(folder)
    try:
        weights, revision = (source_of(base, revision), revision) if given is None else (given, None)
        model = load_weights(weights, dtype, revision, hollow=hollow, trust=config.trust_remote_code)
    except ConfigError as error:
        raise ConfigError(
            f"the adapter in {folder} is for the model {base!r}, which cannot be loaded ({error}); where it "
            f"has moved, set base_model_name_or_path in {folder / CONFIG}"
        ) from error
    own = (folder / "tokenizer_config.json").is_file()
    tokenizer = _tokenizer(str(folder), config) if own else _tokenizer(weights, config, revision)
    load_vision(model, tokenizer, weights, config.vision, revision)
    with standing_in(model):
        adapted: Any = load_adapter(model, folder, config.lora)
    adapted.peft_config["default"].base_model_name_or_path = _lasting(base)
    return adapted, tokenizer


def _tokenizer(folder: str, config: ModelConfig, revision: str | None = None) -> HFTokenizer:
    return load_tokenizer(
        folder,
        revision=revision,
        template_kwargs=config.chat_template_kwargs,
        trust_remote_code=config.trust_remote_code,
    )


def tokenizer_of(config: ModelConfig) -> HFTokenizer:
    """A named model's tokenizer alone."""
    assert config.name is not None
    folder = Path(config.name)
    if is_adapter(folder) and not (folder / "tokenizer_config.json").is_file():
        return _tokenizer(source_of(base_of(folder)), config, revision_of(folder))
    return _tokenizer(config.name if is_adapter(folder) else source_of(config.name), config)


def source_of(name: str, revision: str | None = None) -> str:
    """The folder to load a model from, or a name that a hub has."""
    found = located(name)
    if not Path(found).exists():
        check_hub(found, revision)
    return found


def _lasting(name: str) -> str:
    """A name or path by which a model is found from any folder."""
    return str(Path(name).resolve()) if Path(name).exists() else name


def _moved(model: nn.Module, device: torch.device) -> nn.Module:
    try:
        return model.to(device)
    except torch.OutOfMemoryError as error:
        size = sum(p.numel() * p.element_size() for p in model.parameters()) / 2**30
        raise ConfigError(
            f"the model's weights alone take {size:.1f} GiB, and {device} has no room for them: free it, or "
            f"use a smaller model or another model.device ({error})"
        ) from error


def load_weights(
    name: str,
    dtype: torch.dtype,
    revision: str | None = None,
    *,
    hollow: bool = False,
    trust: bool = False,
) -> nn.Module:
    """A causal LM from a folder or the hub, there in its newest version or in the one that is named.

    `trust` runs the code that comes with it (model.trust_remote_code).
    """
    try:
        config = read_config(name, revision, trust=trust)
        silenced = without_dropout(config)
        model = (
            _made(name, config, dtype, revision, trust)
            if hollow
            else _loaded(name, config, dtype, revision, trust)
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        if "trust_remote_code" in str(error):
            raise ConfigError(
                f"model.name = {name!r} brings Python code of its own, which could do anything that you can: "
                "read it, then set model.trust_remote_code = true to run it"
            ) from error
        raise ConfigError(
            f"model.name = {name!r} is neither a folder with a whole model in Hugging Face format nor a "
            f"name that the hub answers to: {error}"
        ) from error
    if silenced:
        log.info("%s is trained without its own dropout (%s)", name, ", ".join(silenced))
    return model


_MOST = {
    **dict.fromkeys(("num_hidden_layers", "n_layer"), 4096),
    **dict.fromkeys(("hidden_size", "n_embd"), 1 << 20),
    "intermediate_size": 1 << 24,
    "num_attention_heads": 1 << 14,
    "num_key_value_heads": 1 << 14,
    "vocab_size": 1 << 25,
}
"""Larger numbers in a config.json are damage, and would take hours and all memory to find out."""


def read_config(name: str, revision: str | None = None, *, trust: bool = False) -> Any:
    """The Hugging Face configuration of a model: nothing else is read or downloaded."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    written = written_config(name, revision)
    for table in (written, written.get("text_config")):
        for key, most in _MOST.items():
            value = table.get(key) if isinstance(table, dict) else None
            if isinstance(value, int | float) and not 0 < value <= most:
                raise ConfigError(
                    f"the config.json of {name!r} is damaged: {key} = {value!r:.40} is not between 1 and {most}"
                )
    try:
        return AutoConfig.from_pretrained(name, revision=revision or "main", trust_remote_code=trust)
    except (StrictDataclassError, TypeError, AttributeError, KeyError) as error:
        why = " ".join(str(error).split())
        raise ConfigError(f"the config.json of {name!r} is damaged: {why:.300}") from None


def written_config(name: str, revision: str | None = None) -> dict[str, Any]:
    """What is in a model's config.json."""
    from transformers import PretrainedConfig

    written, _ = PretrainedConfig.get_config_dict(name, revision=revision or "main")
    return dict(written)


def _loaded(name: str, config: Any, dtype: torch.dtype, revision: str | None, trust: bool) -> nn.Module:
    with without_progress_bars():
        model, found = auto_class(config).from_pretrained(
            name,
            config=config,
            dtype=dtype,
            output_loading_info=True,
            revision=revision or "main",
            trust_remote_code=trust,
        )
    missing = sorted(found["missing_keys"])
    if missing:
        raise ConfigError(
            f"model.name = {name!r}: its files lack {len(missing)} of the weights that its config.json asks "
            f"for, such as {missing[0]}; they would be random numbers. Are all files there, and of one model?"
        )
    loaded: nn.Module = model
    for parameter in loaded.parameters():
        # A file's tensors lie wherever the file has them. Matrix products round differently on memory that
        # is not aligned, and a resumed run must not differ from one that was never stopped.
        parameter.data = parameter.data.clone()
    return loaded


def _made(name: str, config: Any, dtype: torch.dtype, revision: str | None, trust: bool) -> nn.Module:
    """The module without its weights; with its files, where these have them under its own names."""
    from transformers import GenerationConfig

    with hollow_parameters():
        model: Any = auto_class(config).from_config(config, dtype=dtype, trust_remote_code=trust)
    with suppress(OSError):
        model.generation_config = GenerationConfig.from_pretrained(name, revision=revision or "main")
    files = WeightFiles.find(name, revision)
    model.ludus_files = files if files is not None and files.fit(model) else None
    made: nn.Module = model.eval()
    return made


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


# Asking a hub once whether it has a model: transformers asks file by file, for most of a minute.

_PATIENCE = 10.0
_known: set[str] = set()


def check_hub(name: str, revision: str | None = None) -> None:
    """Refuse a name that is neither in the hub's local cache nor known to a hub that can be reached."""
    from huggingface_hub import HfApi, constants, try_to_load_from_cache
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    try:
        if name in _known or isinstance(
            try_to_load_from_cache(name, "config.json", revision=revision), str
        ):
            return
    except HFValidationError as error:
        raise ConfigError(
            f"model.name = {name!r} is neither a folder nor a name that a hub could have (owner/name)"
        ) from error
    hub = constants.ENDPOINT
    try:
        HfApi(endpoint=hub).model_info(name, timeout=_PATIENCE)
    except RepositoryNotFoundError as error:
        raise ConfigError(
            f"model.name = {name!r} is neither a folder nor a model that {hub} would show you: look at its "
            "spelling, or log in (hf auth login, or HF_TOKEN) if it is private"
        ) from error
    except OfflineModeIsEnabled as error:
        raise ConfigError(
            f"model.name = {name!r} is neither a folder nor in {constants.HF_HUB_CACHE}, and HF_HUB_OFFLINE "
            "forbids to ask for it"
        ) from error
    except HfHubHTTPError:
        pass  # a mirror need not answer this question; whether it has the files will be seen
    except Exception as error:
        # what a broken connection raises depends on the library, and on its version, that the hub's client uses
        raise ConfigError(
            f"model.name = {name!r} is neither a folder nor in {constants.HF_HUB_CACHE}, and {hub} cannot be "
            f"reached ({type(error).__name__}: {error}): give a folder with the model, or mend the connection "
            "(HF_ENDPOINT names another hub)"
        ) from error
    _known.add(name)


# A model's vision part: its processor, the probe of its images, and what of it is trained.


def load_vision(
    model: nn.Module, tokenizer: HFTokenizer, name: str, vision: str, revision: str | None = None
) -> None:
    """Let a model see, as `model.vision` says; before an adapter is put around it.

    One without weights is not probed: rank 0 has done that with the weights.
    """
    inner: Any = unwrapped(model)
    if not hasattr(inner, "get_image_features"):
        if vision in ("frozen", "trained"):
            raise ConfigError(f"model.vision = {vision!r}: {type(inner).__name__} has no vision part")
        return
    if vision != "trained":
        for parameter in vision_parameters(model):
            parameter.requires_grad_(False)
    if vision == "off":
        return
    try:
        check_positions(model)
        images = _processor(name, tokenizer, revision)
        if images.token >= vocabulary_size(model):
            raise ConfigError(f"the image token {images.text!r} is not in the model's vocabulary")
        attach_images(model, images)
        if not is_hollow(model):
            check_images(model)
        forget_features(model)
    except (ConfigError, MissingExtraError, ImageError) as error:
        if hasattr(inner, "ludus_images"):
            del inner.ludus_images
        if vision != "auto":
            raise ConfigError(f"model.vision = {vision!r}: {error}") from error
        log.warning("%s reads text only: %s", name, error)
        return
    tokenizer.images = images


def _processor(name: str, tokenizer: HFTokenizer, revision: str | None) -> ImageProcessor:
    images = ImageProcessor.load(name, tokenizer.inner, revision)
    if images.token not in tokenizer.controls.values():
        # anybody's text could show an image
        raise ConfigError(f"the image token {images.text!r} is not a special token of the tokenizer")
    return images
