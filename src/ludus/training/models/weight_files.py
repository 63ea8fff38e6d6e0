"""Weights of a model in Hugging Face format as files, and models without their weights, which are read later.

Each rank of a sharded run makes the module so that its parameters take no memory, and then reads its own parts
of the weights. Buffers are real, and so are the weights of an adapter, which are drawn or read as for a whole
model.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from ludus.core.failures import LudusError
from ludus.training.optim.shard_files import read_into

_ONE, _INDEX = "model.safetensors", "model.safetensors.index.json"


class WeightFiles:
    """Files of safetensors, and which tensor is in which of them."""

    def __init__(self, places: Mapping[str, Path]) -> None:
        self._places = places

    @classmethod
    def find(cls, name: str, revision: str | None = None) -> WeightFiles | None:
        """Those of a folder or of a hub's model; None where its weights are in another format."""
        index = _file(name, _INDEX, revision)
        if index is not None:
            files: Mapping[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            paths = {one: _file(name, one, revision) for one in set(files.values())}
            found = {tensor: path for tensor, one in files.items() if (path := paths[one]) is not None}
            return cls(found) if len(found) == len(files) else None
        path = _file(name, _ONE, revision)
        if path is None:
            return None
        with safe_open(str(path), "pt") as opened:
            return cls(dict.fromkeys(opened.keys(), path))

    def fit(self, model: nn.Module) -> bool:
        """Whether they have all tensors of a model under the names and in the shapes that these have in it."""
        try:
            with ExitStack() as stack:
                files = self._opened(stack)
                return all(
                    name in self._places
                    and list(files[self._places[name]].get_slice(name).get_shape()) == list(tensor.shape)
                    for name, tensor in kept_tensors(model).items()
                )
        except SafetensorError:
            return False

    @torch.no_grad()
    def read(self, tensors: Mapping[str, Tensor]) -> None:
        """Read this rank's parts of these tensors, in place."""
        with ExitStack() as stack:
            files = self._opened(stack)
            for name, tensor in tensors.items():
                try:
                    read_into(tensor, files[self._places[name]], name)
                except SafetensorError as error:
                    raise LudusError(f"{self._places[name]}: {name}: {error}") from error

    def tensors(self, model: nn.Module) -> Iterator[Tensor]:
        """The tensors of a model's state, one at a time; tied ones as often as they are in it."""
        with ExitStack() as stack:
            files = self._opened(stack)
            first = {id(tensor): name for name, tensor in reversed(kept_tensors(model).items())}
            for tensor in model.state_dict(keep_vars=True).values():
                name = first[id(tensor)]
                yield files[self._places[name]].get_tensor(name)

    def _opened(self, stack: ExitStack) -> dict[Path, Any]:
        return {
            path: stack.enter_context(safe_open(str(path), "pt")) for path in set(self._places.values())
        }


def kept_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Tensors of a model in a checkpoint: parameters and buffers of its state by name, tied ones once."""
    found: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        found.setdefault(id(tensor), (name, tensor))
    return dict(found.values())


def _file(name: str, file: str, revision: str | None) -> Path | None:
    folder = Path(name)
    if folder.is_dir():
        path = folder / file
        return path if path.is_file() else None
    from transformers.utils.hub import cached_file

    found = cached_file(
        name, file, revision=revision or "main", _raise_exceptions_for_missing_entries=False
    )
    return None if found is None else Path(found)


@contextmanager
def hollow_parameters() -> Iterator[None]:
    """Modules that this thread makes have their parameters on the meta device; each is there for a moment."""
    own = threading.get_ident()

    def emptied(module: nn.Module, name: str, parameter: Any) -> Any:
        if threading.get_ident() != own or not isinstance(parameter, nn.Parameter) or parameter.is_meta:
            return None
        return nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)

    hook = register_module_parameter_registration_hook(emptied)
    try:
        yield
    finally:
        hook.remove()


def is_hollow(model: nn.Module) -> bool:
    """Whether a model's weights have yet to be read."""
    return any(parameter.is_meta for parameter in model.parameters())


@contextmanager
def standing_in(model: nn.Module) -> Iterator[None]:
    """Zeros of no memory in the place of parameters on the meta device.

    peft makes an adapter's weights on the device of the layer that it adapts, so that they are real then.
    """
    hollow = _replaced(model, lambda p: p.is_meta, _zeros)
    try:
        yield
    finally:
        stand_ins = {id(made) for made in hollow}
        _replaced(model, lambda p: id(p) in stand_ins, lambda p: p.detach().to("meta"))


def _zeros(parameter: nn.Parameter) -> torch.Tensor:
    return torch.zeros((), dtype=parameter.dtype).expand(parameter.shape)


def _replaced(model: nn.Module, which: Any, make: Any) -> list[nn.Parameter]:
    """Replace parameters; tied ones stay tied."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and which(parameter):
                if parameter not in made:
                    made[parameter] = nn.Parameter(make(parameter), parameter.requires_grad)
                module._parameters[name] = made[parameter]
    return list(made.values())
