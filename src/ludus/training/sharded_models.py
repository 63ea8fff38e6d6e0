"""Models, from rank 0 to all ranks and back.

What is sent is how to make the module again, and never its weights: no other rank holds all of them. A module
is the class and the configuration of its Hugging Face model, its adapter's settings, and what a constructor
cannot know: which parameters there are, the values of buffers, the files of the processor of images.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ludus.core.failures import LudusError
from ludus.model import decoder_of, images_of, unwrapped
from ludus.model.fused_model import disable_fused
from ludus.model.images import ImageProcessor, attach_images
from ludus.training.models.lora import require_peft
from ludus.training.optim.critic import ValueModel
from ludus.training.optim.sharding import ShardedModel, current_group, shard
from ludus.training.ranks.calls import OnLeader

Place = tuple[str, str]
"""A module, by its name in the model, and an attribute of it."""


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """A parameter without its values; tied ones have the same number."""

    number: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_trained: bool


@dataclass(frozen=True, slots=True)
class Skeleton:
    """A module without its weights."""

    kind: type[nn.Module]
    inner: type[nn.Module] | None
    """The class of the Hugging Face model inside; None for a critic that is a head alone."""
    config: type | None
    settings: dict[str, Any]
    """Its configuration."""
    attention: dict[str, str]
    """The attention function of each of its parts that has one."""
    adapter: Any
    adapted: tuple[str, ...]
    """The layers inside that have an adapter."""
    parameters: dict[Place, ParameterSpec]
    buffers: dict[Place, Tensor]
    processor: dict[str, bytes] | None
    """The files of what turns images into tokens and pixels."""
    width: int
    is_training: bool


def skeleton_of(model: nn.Module) -> Skeleton:
    """How to make a module like this one, whose parameters will come later."""
    is_critic = isinstance(model, ValueModel)
    inner: Any = model.trunk if isinstance(model, ValueModel) else unwrapped(model)
    adapter = model.adapter if is_critic else getattr(model, "peft_config", {}).get("default")
    numbers: dict[int, int] = {}
    return Skeleton(
        kind=type(model),
        inner=None if inner is None else type(inner),
        config=None if inner is None else type(inner.config),
        settings={} if inner is None else inner.config.to_dict(),
        attention=dict(_attention(inner)),
        adapter=adapter if inner is not None else None,
        adapted=()
        if inner is None
        else tuple(n for n, m in inner.named_modules() if hasattr(m, "lora_A")),
        parameters={
            (name, own): ParameterSpec(
                numbers.setdefault(id(p), len(numbers)), tuple(p.shape), p.dtype, p.requires_grad
            )
            for name, module in model.named_modules()
            for own, p in module._parameters.items()
            if p is not None
        },
        buffers={
            (name, own): tensor
            for name, module in model.named_modules()
            for own, tensor in (*module._buffers.items(), *vars(module).items())
            if isinstance(tensor, Tensor)
        },
        processor=None if is_critic else _processor_files(model),
        width=model.head.in_features if isinstance(model, ValueModel) else 0,
        is_training=model.training,
    )


def _attention(inner: Any) -> Iterator[tuple[str, str]]:
    for name, module in inner.named_modules() if inner is not None else ():
        if hasattr(module, "set_attn_implementation"):
            yield name, module.config._attn_implementation


def _processor_files(model: nn.Module) -> dict[str, bytes] | None:
    processor = images_of(model)
    if processor is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        processor.save(Path(folder))
        return {one.name: one.read_bytes() for one in Path(folder).iterdir() if one.is_file()}


def build_sharded(skeleton: Skeleton, source: OnLeader[nn.Module]) -> ShardedModel:
    """On every rank: the module made anew, sharded, with rank 0's weights."""
    group = current_group()
    assert group.mesh is not None
    kind = group.mesh.device_type
    device = torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
    model = made_from(skeleton, device)
    root = shard(model, group, _layers(model))
    root.receive(source.value)
    return root


def made_from(skeleton: Skeleton, device: torch.device) -> nn.Module:
    """The module, with its buffers on a device and its parameters on the meta device."""
    with torch.device("meta"):
        model = _constructed(skeleton)
    _fill(model, skeleton, device)
    if skeleton.processor is not None:
        with tempfile.TemporaryDirectory() as folder:
            for name, data in skeleton.processor.items():
                Path(folder, Path(name).name).write_bytes(data)
            attach_images(model, ImageProcessor.load(folder))
    return model.train(skeleton.is_training)


def _constructed(skeleton: Skeleton) -> nn.Module:
    inner: Any = None
    if skeleton.inner is not None:
        config: Any = skeleton.config
        make: Any = skeleton.inner
        inner = make(config.from_dict(skeleton.settings))
        for name, attention in skeleton.attention.items():
            inner.get_submodule(name).config._attn_implementation = attention
    is_critic = issubclass(skeleton.kind, ValueModel)
    if skeleton.adapter is not None:
        # its weights come from rank 0, so nothing is computed for them here
        own = replace(skeleton.adapter, init_lora_weights=False, target_modules=list(skeleton.adapted))
        wrap: Any = skeleton.kind
        if is_critic:
            require_peft().inject_adapter_in_model(own, inner, low_cpu_mem_usage=True)
        else:
            return wrap(inner, own, low_cpu_mem_usage=True)  # type: ignore[no-any-return]
    return ValueModel.around(inner, skeleton.width, skeleton.adapter) if is_critic else inner


def _fill(model: nn.Module, skeleton: Skeleton, device: torch.device) -> None:
    modules = dict(model.named_modules())
    there = {(n, own) for n, m in modules.items() for own, p in m._parameters.items() if p is not None}
    if there != skeleton.parameters.keys() or {name for name, _ in skeleton.buffers} - modules.keys():
        other = sorted(there ^ skeleton.parameters.keys()) or sorted(skeleton.buffers)
        raise LudusError(
            f"{skeleton.kind.__name__} cannot be made again on other trainer ranks from its configuration: it "
            f"has other parameters there ({'.'.join(other[0])} is one of {len(other)}). Train it on one rank"
        )
    made: dict[int, nn.Parameter] = {}
    for (name, own), spec in skeleton.parameters.items():
        if spec.number not in made:
            empty = torch.empty(spec.shape, dtype=spec.dtype, device="meta")
            made[spec.number] = nn.Parameter(empty, requires_grad=spec.is_trained)
        modules[name]._parameters[own] = made[spec.number]
    for (name, own), tensor in skeleton.buffers.items():
        module: Any = modules[name]
        held = module._buffers if own in module._buffers else module.__dict__
        held[own] = tensor.detach().to(device, copy=True)


def _layers(model: nn.Module) -> list[nn.Module]:
    """The decoder's layers, which are gathered one at a time."""
    inner = unwrapped(model)
    if getattr(inner, "trunk", inner) is None:
        return []  # a critic that is a head alone
    decoder = decoder_of(model)
    disable_fused(decoder, "its parameters are sharded, and whole only while their layer runs")
    lists = [child for child in decoder.children() if isinstance(child, nn.ModuleList)]
    return [layer for child in lists for layer in child]


@torch.no_grad()
def publish_weights(policy: ShardedModel, target: OnLeader[nn.Module]) -> None:
    """On every rank: gather what is trained, tensor by tensor, into rank 0's model."""
    known = dict(target.value.named_parameters()) if target.value is not None else {}
    for name, whole in policy.wholes(trainable=True):
        if known:
            known[name].copy_(whole)


def receive_weights(policy: ShardedModel, source: OnLeader[nn.Module]) -> None:
    """On every rank: take the weights of rank 0's model."""
    policy.receive(source.value)
