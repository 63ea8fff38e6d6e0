"""Files of tensors, of which each rank writes and reads its own part; models whose weights are read later.

safetensors keeps a tensor's numbers in one piece, row by row, and FSDP cuts a tensor along its rows. So what a
rank has of a tensor is one piece of the file, which it writes and reads by itself: nothing is gathered, and no
rank ever holds more than its parts. The file is the one that a single process writes, so any number of ranks
reads what any number has written.

Each rank of a sharded run makes the module so that its parameters take no memory, and then reads its own parts
of the weights. Buffers are real, and so are the weights of an adapter, which are drawn or read as for a whole
model.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_parameter_registration_hook

from ludus.core.failures import LudusError
from ludus.training.optim.sharding import ALONE, RankGroup, local, rows_before

_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
    torch.bool: "BOOL",
}  # fmt: skip
"""safetensors' names of the dtypes."""
_ALIGNMENT = 8


class UnsavedError(LudusError):
    """Something of a run could not be written."""


@dataclass(frozen=True, slots=True)
class FileLayout:
    """Where each tensor is in a file of safetensors.

    The format: the length of a header in 8 bytes, the header in JSON (dtype, shape and place of each tensor),
    then the tensors' bytes.
    """

    header: bytes
    places: Mapping[str, int]
    """The first byte of each tensor, in the file's order."""
    size: int

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> FileLayout:
        """By the tensors' shapes alone, of sharded ones those of the whole."""
        # as safetensors orders them: the widest numbers first, so that each is aligned
        order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
        entries: dict[str, object] = {"__metadata__": {"format": "pt", **(metadata or {})}}
        starts: dict[str, int] = {}
        end = 0
        for name in order:
            tensor = tensors[name]
            starts[name], end = end, end + tensor.numel() * tensor.element_size()
            entries[name] = {
                "dtype": _DTYPES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [starts[name], end],
            }
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        header = len(text).to_bytes(8, "little") + text
        places = {name: len(header) + start for name, start in starts.items()}
        return cls(header, places, len(header) + end)


def write_shards(
    path: Path,
    tensors: Mapping[str, Tensor],
    group: RankGroup = ALONE,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write one file; all ranks call it. What several ranks hold alike, the first of them writes."""
    layout = FileLayout.of(tensors, metadata)
    if group.rank == 0:
        with path.open("wb") as file:
            file.write(layout.header)
            file.truncate(layout.size)
    group.agree()  # that the file is there
    with path.open("r+b") as file:
        for name, place in layout.places.items():
            tensor = tensors[name]
            if not _writes(tensor, group):
                continue
            part = local(tensor).detach().contiguous().cpu()
            row = part[0].numel() * part.element_size() if part.ndim and len(part) else 0
            file.seek(place + rows_before(tensor) * row)
            file.write(part.reshape(-1).view(torch.uint8).numpy().data)
    group.agree()  # that it is whole


def _writes(tensor: Tensor, group: RankGroup) -> bool:
    if not isinstance(tensor, DTensor):
        return group.rank == 0
    mesh = tensor.device_mesh
    return mesh.ndim == 1 or mesh.get_local_rank(0) == 0


def write_wholes(path: Path, layout: FileLayout, wholes: Iterator[tuple[str, Tensor]]) -> None:
    """Write a file by one process, from tensors that come one at a time and are gone afterwards."""
    with path.open("wb") as file:
        file.write(layout.header)
        file.truncate(layout.size)
        for name, whole in wholes:
            file.seek(layout.places[name])
            file.write(whole.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy().data)


@torch.no_grad()
def read_shards(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Read this rank's parts of these tensors, in place; what else the file has is left."""
    with safe_open(str(path), "pt") as opened:
        for name, tensor in tensors.items():
            try:
                read_into(tensor, opened, name)
            except SafetensorError as error:
                raise LudusError(f"{path} has no {name}, or not all of it: {error}") from error


def read_into(tensor: Tensor, opened: Any, name: str) -> None:
    """Read this rank's part of a tensor from an opened file, in place."""
    if not tensor.ndim:
        tensor.copy_(opened.get_tensor(name))
        return
    held, part, first = opened.get_slice(name), local(tensor), rows_before(tensor)
    if list(held.get_shape()) != list(tensor.shape):
        raise SafetensorError(f"it is {held.get_shape()} there and {list(tensor.shape)} here")
    if len(part):
        part.copy_(held[first : first + len(part)])


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
