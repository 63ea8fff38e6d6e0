"""Files of tensors that all ranks write and read at once, each its own part.

safetensors keeps a tensor's numbers in one piece, row by row, and FSDP cuts a tensor along its rows. So what a
rank has of a tensor is one piece of the file, which it writes and reads by itself: nothing is gathered, and no
rank ever holds more than its parts. The file is the one that a single process writes, so any number of ranks
reads what any number has written.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor

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
