"""Models, from rank 0 to all ranks and back.

What is sent is the module without its weights: no other rank holds all of them.
"""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import torch
from torch import Tensor, nn

from ludus.engine import decoder_of, unwrapped
from ludus.engine.fused_model import disable_fused
from ludus.training.optim.sharding import ShardedModel, current_group, shard
from ludus.training.rank_calls import OnLeader


def skeleton_of(model: nn.Module) -> bytes:
    """The module with the shapes of its parameters instead of their values; buffers as they are."""
    file = io.BytesIO()
    _SkeletonDumper(file).dump(model)
    return file.getvalue()


class _SkeletonDumper(pickle.Pickler):
    _PROTOCOL = pickle.HIGHEST_PROTOCOL

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=self._PROTOCOL)
        self._parameters: dict[int, int] = {}

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, nn.Parameter):
            number = self._parameters.setdefault(id(obj), len(self._parameters))
            return "parameter", number, tuple(obj.shape), obj.dtype, obj.requires_grad
        if isinstance(obj, Tensor):
            file = io.BytesIO()
            torch.save(obj.detach().cpu(), file)
            return "tensor", file.getvalue()
        if isinstance(obj, torch.device):
            return ("device",)
        return None

    def reducer_override(self, obj: Any) -> Any:
        """Leave out the hooks by which transformers reads hidden states (a vision tower's, say).

        They cannot be pickled; transformers puts them there again when they are needed first.
        """
        if not isinstance(obj, nn.Module):
            return NotImplemented
        reduced: Any = obj.__reduce_ex__(self._PROTOCOL)
        make, args, state, *others = reduced
        kept = {name: value for name, value in state.items() if name != _HOOKED}
        hooks = [number for number, hook in obj._forward_hooks.items() if _is_recording(hook)]
        for name, value in kept.items():
            if name.startswith("_forward_hooks"):
                kept[name] = type(value)((n, one) for n, one in value.items() if n not in hooks)
        return make, args, kept, *others


_HOOKED = "_output_capturing_hooks_installed"
"""Where transformers notes that a model has these hooks."""


def _is_recording(hook: Any) -> bool:
    return getattr(hook, "__module__", "") == "transformers.utils.output_capturing"


class _SkeletonLoader(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, device: torch.device) -> None:
        super().__init__(file)
        self._device = device
        self._parameters: dict[int, nn.Parameter] = {}

    def persistent_load(self, given: Any) -> Any:
        kind, *facts = given
        if kind == "device":
            return self._device
        if kind == "tensor":
            return torch.load(io.BytesIO(facts[0]), weights_only=True).to(self._device)
        number, shape, dtype, trained = facts
        if number not in self._parameters:
            empty = torch.empty(shape, dtype=dtype, device="meta")
            self._parameters[number] = nn.Parameter(empty, requires_grad=trained)
        return self._parameters[number]


def build_sharded(skeleton: bytes, source: OnLeader[nn.Module]) -> ShardedModel:
    """On every rank: the module made anew, sharded, with rank 0's weights."""
    group = current_group()
    assert group.mesh is not None
    kind = group.mesh.device_type
    device = torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
    model: nn.Module = _SkeletonLoader(io.BytesIO(skeleton), device).load()
    _make_known(model)
    root = shard(model, group, _layers(model))
    root.receive(source.value)
    return root


def _make_known(model: nn.Module) -> None:
    """Make one like a model that sees, without weights, and drop it.

    Constructors tell transformers which hidden states a class can be asked for, in each process; unpickling
    calls none, and a vision tower's features are hidden states.
    """
    inner = unwrapped(model)
    if hasattr(inner, "get_image_features"):
        with torch.device("meta"):
            type(inner)(copy.deepcopy(inner.config))


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
