"""Checkpoints of sharded tensors: every rank writes its parts, and any number of ranks reads them.

A folder holds one file of safetensors for each rank. The name of a part says where in the whole it begins; the
file of rank 0 has the tensors that every rank holds whole, and says how many files there are.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from ludus.core.failures import LudusError
from ludus.training.optim.sharding import RankGroup, local, rows_before

_RANKS = "ranks"


def save_shards(folder: Path, tensors: dict[str, Tensor], group: RankGroup) -> None:
    """Write this rank's parts; all ranks call it. Of several replicas the first one writes."""
    own: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            mesh, part = tensor.device_mesh, local(tensor)
            is_first = mesh.ndim == 1 or mesh.get_local_rank(0) == 0
            if is_first and len(part):
                own[f"{rows_before(tensor)}:{name}"] = part
        elif group.rank == 0:
            own[f":{name}"] = tensor
    folder.mkdir(exist_ok=True)
    # counters may be one tensor under several names, which safetensors refuses
    written = {
        n: t.detach().cpu().contiguous() if t.ndim else t.detach().cpu().clone() for n, t in own.items()
    }
    save_file(written, str(_file(folder, group.rank)), metadata={_RANKS: str(group.size)})


@torch.no_grad()
def load_shards(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Read into these tensors, in place, what any number of ranks has written. Others stay as they are."""
    first = _file(folder, 0)
    if not first.is_file():
        raise LudusError(
            f"{folder} holds no {first.name}: an earlier version of Ludus wrote it, or it is not whole. Go on "
            "from another checkpoint, or with the version that wrote it"
        )
    with safe_open(str(first), "pt") as opened:
        files = [_file(folder, rank) for rank in range(int(opened.metadata()[_RANKS]))]
    for path in files:
        if not path.is_file():
            raise LudusError(f"{folder} is not whole: {path.name} is not there")
        with safe_open(str(path), "pt") as opened:
            for key in opened.keys():  # noqa: SIM118 - it is no mapping
                start, _, name = key.partition(":")
                if name not in tensors:
                    continue
                if not start:
                    tensors[name].copy_(opened.get_tensor(key))
                    continue
                part, before = local(tensors[name]), rows_before(tensors[name])
                held = opened.get_slice(key)
                low = max(before, int(start))
                high = min(before + len(part), int(start) + held.get_shape()[0])
                if low < high:
                    found = held[low - int(start) : high - int(start)]
                    part[low - before : high - before].copy_(found)


def _file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05d}.safetensors"
