"""Models of which every rank makes and reads its own part, and the files to which all of them write.

A rank makes the module without weights, cuts its layers with FSDP, and reads its parts from the files: no rank
ever holds more than a layer. That needs files of safetensors that have the tensors under the names that they
have in the module. What comes otherwise (made from scratch; a model that sees, which is probed; weights that
transformers converts as it loads them) rank 0 reads as a whole, once, and writes into such files
(`source_for_ranks`). Engines of their own get whole tensors, of which rank 0 writes each one and lets it go.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ludus.chat.tokenizers import HFTokenizer
from ludus.core.failures import ConfigError
from ludus.core.messages import MediaSpan
from ludus.kernels import on_device, token_logprobs
from ludus.model import (
    decoder_of,
    head_logits,
    images_of,
    probe_architecture,
    sampling_mode,
    switch_attention,
    unwrapped,
    use_ludus_attention,
)
from ludus.model.fused_model import disable_fused
from ludus.model.images import forget_features, row_hidden_states
from ludus.training.config.run import ModelConfig
from ludus.training.models.gguf import without_progress_bars
from ludus.training.models.loading import device_of as device_for
from ludus.training.models.loading import dtype_of, load_model, load_weights, source_of
from ludus.training.models.lora import (
    base_of,
    is_adapted,
    is_adapter,
    revision_of,
    save_adapter,
    splits_base_of,
)
from ludus.training.optim.critic import ValueModel
from ludus.training.optim.learner import frozen
from ludus.training.optim.logprobs import compute
from ludus.training.optim.shard_files import FileLayout, kept_tensors, write_shards, write_wholes
from ludus.training.optim.sharding import (
    RankGroup,
    ShardedModel,
    group_of,
    local,
    shard,
    whole_of,
)

WEIGHTS = "model.safetensors"


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where each rank finds its part of a model."""

    config: ModelConfig
    seed: int
    """Seed of a new adapter."""
    base: str | None = None
    """A folder with the base weights, where they are not those that `config` names."""


def source_for_ranks(
    config: ModelConfig, seed: int, folder: Path, corpus: Iterable[str] = ()
) -> ModelSource:
    """On rank 0: where the ranks can read a model. What they could not read is written into `folder` first."""
    if config.scratch is None:
        assert config.name is not None
        name, revision = config.name, None
        if is_adapter(name):
            name, revision = base_of(Path(name)), revision_of(Path(name))
            if splits_base_of(Path(config.name)):
                raise ConfigError(
                    f"the adapter in {config.name} changes its base when it is loaded: train it with "
                    "cluster.trainer_ranks=1, or save it as a plain one first"
                )
        dtype = dtype_of(config, device_for(config))
        inner: Any = load_weights(
            source_of(name, revision), dtype, revision, hollow=True, trust=config.trust_remote_code
        )
        is_blind = config.vision == "off" or not hasattr(inner, "get_image_features")
        if inner.ludus_files is not None and is_blind:
            probe_architecture(inner)
            return ModelSource(config, seed)
    on_host = config.model_copy(update={"device": "cpu", "dtype": _named(config)})
    whole, tokenizer = load_model(on_host, seed, corpus)
    use_ludus_attention(whole, or_alone=False)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {n.replace(".base_layer.", "."): t for n, t in kept_tensors(unwrapped(whole)).items()}
    write_shards(folder / WEIGHTS, {n: t for n, t in tensors.items() if "lora_" not in n})
    save_settings(folder, whole)
    tokenizer.inner.save_pretrained(folder)
    if (images := images_of(whole)) is not None:
        images.save(folder)
    elif config.scratch is None:
        config = config.model_copy(update={"vision": "off"})
    if config.scratch is not None:
        config = config.model_copy(update={"name": str(folder), "scratch": None})
    return ModelSource(config, seed, str(folder))


def _named(config: ModelConfig) -> str:
    """The number format, by name: what "auto" means depends on the device."""
    return str(dtype_of(config, device_for(config))).removeprefix("torch.")


def hollow_model(source: ModelSource) -> nn.Module:
    """The module without its weights, but for those of an adapter."""
    model, _ = load_model(source.config, source.seed, hollow=True, base=source.base)
    switch_attention(model)
    return model


def hollow_tokenizer(source: ModelSource) -> HFTokenizer:
    """The tokenizer of a model that the ranks read."""
    return load_model(source.config, source.seed, hollow=True, base=source.base)[1]


def load_sharded(source: ModelSource, group: RankGroup, *, trains: bool = True) -> ShardedModel:
    """This rank's part of a model; all ranks call it."""
    model = hollow_model(source) if trains else frozen(hollow_model(source))
    inner = unwrapped(model)
    kept = {
        name.replace(".base_layer.", "."): tensor
        for name, tensor in kept_tensors(inner).items()
        if "lora_" not in name
    }
    places = {id(tensor): name for name, tensor in _tensors(model).items()}
    root = shard(model, group, layers_of(model))
    now = _tensors(model)
    inner.ludus_files.read({name: now[places[id(tensor)]].detach() for name, tensor in kept.items()})
    return root


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The decoder's layers, which are gathered one at a time; none of a critic that is a head alone."""
    inner = unwrapped(model)
    if getattr(inner, "trunk", inner) is None:
        return []
    decoder = decoder_of(model)
    disable_fused(decoder, "its parameters are sharded, and whole only while their layer runs")
    lists = [child for child in decoder.children() if isinstance(child, nn.ModuleList)]
    return [layer for child in lists for layer in child]


def shard_values(policy: ShardedModel, made: nn.Module, own_trunk: bool) -> ShardedModel:
    """A critic for a sharded policy. `made` is the policy's module without weights; a trunk is its decoder."""
    values = ValueModel(made, own_trunk=own_trunk)
    root = shard(values, policy.group, layers_of(values))
    source = {f"trunk.{name}": p for name, p in decoder_of(policy).named_parameters()}
    with torch.no_grad():
        for name, parameter in values.named_parameters():
            if name in source:
                local(parameter).copy_(local(source[name]))
            else:
                local(parameter).zero_()
    return root


def save_policy(folder: Path, model: nn.Module) -> None:
    """Write a model, or its adapter, in Hugging Face format; of a sharded one, each rank its parts."""
    if is_adapted(model):
        save_adapter(folder, model)
        return
    inner, group = unwrapped(model), group_of(model)
    if group.size == 1:
        with without_progress_bars():
            inner.save_pretrained(folder)
        return
    tensors = kept_tensors(inner)
    if is_converted(inner):
        wholes = gathered(tensors, group)
        if group.rank == 0:
            with without_progress_bars():
                inner.save_pretrained(folder, state_dict=wholes)
        return
    write_shards(folder / WEIGHTS, tensors, group)
    if group.rank == 0:
        save_settings(folder, inner)


def gathered(tensors: Mapping[str, Tensor], group: RankGroup) -> dict[str, Tensor]:
    """Whole tensors, one after the other, on the host of rank 0; the other ranks keep nothing."""
    wholes: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        group.agree()
        whole = whole_of(tensor.detach())
        if group.rank == 0:
            wholes[name] = whole.cpu()
    return wholes


def is_converted(inner: Any) -> bool:
    """Whether transformers writes other tensors than the module has, as it has read them from others."""
    from transformers.conversion_mapping import get_model_conversion_mapping

    return bool(get_model_conversion_mapping(inner, add_legacy=False))


def save_settings(folder: Path, model: nn.Module) -> None:
    """Write a model's configuration, as transformers does beside the weights."""
    inner = unwrapped(model)
    inner.config.architectures = [type(inner).__name__]
    inner.config.dtype = str(inner.dtype).removeprefix("torch.")
    inner.config.save_pretrained(folder)
    if inner.can_generate():
        inner.generation_config.save_pretrained(folder)


@torch.no_grad()
def write_merged(folder: Path, model: nn.Module) -> None:
    """Write a model's weights into a folder; all ranks call it, and rank 0 writes."""
    forget_features(model)
    group = group_of(model)
    wholes = _wholes(model)
    if group.rank != 0:
        for _ in wholes:
            pass
    elif is_converted(unwrapped(model)):
        state = {name: whole.cpu() for name, whole in wholes}
        with without_progress_bars():
            unwrapped(model).save_pretrained(folder, state_dict=state, max_shard_size=1 << 60)
    else:
        write_wholes(folder / WEIGHTS, FileLayout.of(_bases(model)), wholes)


def _bases(model: nn.Module) -> dict[str, Tensor]:
    """The tensors by their names in the files, those that an adapter is merged into as they are without it."""
    kept = kept_tensors(unwrapped(model))
    return {name.replace(".base_layer.", "."): t for name, t in kept.items() if "lora_" not in name}


def _wholes(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Each tensor, gathered and merged when it is its turn.

    The model stays as it is. Merged weights are rounded once, to the base's format: engines in float32 sample
    what is trained to the last digits, and those in bfloat16 what it is rounded to.
    """
    group, adapted = group_of(model), dict[str, Any]()
    if is_adapted(model):
        from peft.tuners.lora import LoraLayer

        modules = unwrapped(model).named_modules()
        adapted = {f"{name}.weight": one for name, one in modules if isinstance(one, LoraLayer)}
    for name, tensor in _bases(model).items():
        group.agree()
        yield name, _merged(adapted[name]) if name in adapted else whole_of(tensor.detach())


def _merged(layer: Any) -> Tensor:
    made = copy.deepcopy(layer)
    for module in made.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                whole = whole_of(parameter.detach())
                module._parameters[name] = nn.Parameter(whole, requires_grad=False)
    made.merge()
    weight: Tensor = made.get_base_layer().weight.detach()
    return weight


@torch.no_grad()
def score_tokens(
    model: nn.Module, tokens: Sequence[int], media: Sequence[MediaSpan] = ()
) -> list[float]:
    """The log-probability of each token given those before it; the first one's is 0. All ranks call it."""
    device = next(model.parameters()).device
    with on_device(device), sampling_mode(model):
        return [0.0, *compute(model, _scored, list(tokens), media, device).tolist()]


def _scored(
    model: nn.Module, tokens: list[int], media: Sequence[MediaSpan], device: torch.device
) -> Tensor:
    tokens_T = torch.tensor(tokens, device=device)
    hidden_TD = row_hidden_states(model, tokens_T, media)
    logprobs, _ = token_logprobs(head_logits(model, hidden_TD[:-1]), tokens_T[1:], 1.0)
    return logprobs
