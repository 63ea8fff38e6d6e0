"""Where the compiled kernels can run, memory of devices, and copies between host and device."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_OLDEST = (8, 0)
"""Compute capability from which on bf16 matrix units exist."""


def unavailable(device: torch.device) -> str | None:
    """Why the compiled kernels cannot run on this device; None when they can."""
    if device.type != "cuda":
        return f"the kernels are for CUDA devices, not {device.type!r}"
    return _unavailable(device.index if device.index is not None else torch.cuda.current_device())


@cache
def _unavailable(index: int) -> str | None:
    if torch.version.hip is not None:
        return "the kernels have not been tried on ROCm"
    capability = torch.cuda.get_device_capability(index)
    if capability < _OLDEST:
        found, oldest = (".".join(map(str, numbers)) for numbers in (capability, _OLDEST))
        return f"the GPU has compute capability {found}, and the kernels need {oldest}"
    try:
        import triton  # noqa: F401 - whether it is there is the question
    except ImportError:
        return "Triton is not installed (pip install triton)"
    return None


def trial_failure(
    agrees: Callable[[torch.device], bool], device: torch.device, disagreement: str
) -> str | None:
    """Why a kernel fails a trial on a device; None when it passes."""
    try:
        return None if agrees(device) else disagreement
    except torch.OutOfMemoryError:
        raise  # says nothing about the kernel
    except Exception as error:  # noqa: BLE001 - whatever breaks here would break every use
        return f"{type(error).__name__}: {error}".splitlines()[0]


def next_power_of_2(number: int) -> int:
    """The smallest power of two that is at least `number`."""
    return 1 << (number - 1).bit_length()


def free_memory(device: torch.device) -> tuple[int, int]:
    """(free, all) bytes of a GPU; memory that torch has reserved and does not use counts as free."""
    free, total = torch.cuda.mem_get_info(device)
    held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free + held, total


def all_memory(device: torch.device) -> int:
    """The bytes of a GPU, or of this machine, as far as its container lets it use them (cgroup v1 and v2)."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    files = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
    texts = [Path(name).read_text().strip() for name in files if Path(name).is_file()]
    installed = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([installed, *(int(text) for text in texts if text.isdigit())])


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device's memory is full; libraries below torch say so in words alone."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    words = str(error).lower()
    return "out of memory" in words or "cublas_status_alloc_failed" in words


def free_cached_memory() -> None:
    """Give cached blocks back to the device, so that the next attempt finds whole ones."""
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Make `device` current: Triton launches on the current GPU, whatever its tensors are on."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


Array = npt.NDArray[Any]

_ALIGNMENT = 16
_DTYPES = {
    np.dtype(np.int64): torch.int64,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.float64): torch.float64,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.bool_): torch.bool,
}


def _offsets(sizes: Sequence[int]) -> list[int]:
    """Where pieces of these sizes begin in one buffer; the last number is its size."""
    offsets = [0]
    for size in sizes:
        offsets.append(offsets[-1] + -(-size // _ALIGNMENT) * _ALIGNMENT)
    return offsets


def _host_bytes(size: int, device: torch.device) -> Tensor:
    """Pinned memory, for asynchronous copies."""
    return torch.zeros(size, dtype=torch.uint8, pin_memory=device.type == "cuda")


class StagingBuffers:
    """Named arrays of `size` elements at fixed addresses on the device, and `copies` of them on the host.

    `device` has the tensors; `hosts[i]` has the arrays of copy i. A copy that is in flight must not be touched:
    with as many copies as there are steps in flight, each step has its own.
    """

    def __init__(
        self, fields: Mapping[str, npt.DTypeLike], size: int, device: torch.device, copies: int
    ) -> None:
        dtypes = {name: np.dtype(dtype) for name, dtype in fields.items()}
        offsets = _offsets([dtype.itemsize * size for dtype in dtypes.values()])
        self._device_bytes = torch.zeros(offsets[-1], dtype=torch.uint8, device=device)
        self._host_bytes = [_host_bytes(offsets[-1], device) for _ in range(copies)]
        self.device: dict[str, Tensor] = {}
        self.hosts: list[dict[str, Array]] = [{} for _ in range(copies)]
        for (name, dtype), start in zip(dtypes.items(), offsets, strict=False):
            stop = start + dtype.itemsize * size
            self.device[name] = self._device_bytes[start:stop].view(_DTYPES[dtype])
            for host, memory in zip(self.hosts, self._host_bytes, strict=True):
                host[name] = memory[start:stop].numpy().view(dtype)

    def send(self, copy: int) -> None:
        """Host to device, all fields at once."""
        self._device_bytes.copy_(self._host_bytes[copy], non_blocking=True)

    def fetch(self, copy: int) -> None:
        """Device to host, all fields at once; the arrays are valid once the device has got there."""
        self._host_bytes[copy].copy_(self._device_bytes, non_blocking=True)


def arrays_to_device(arrays: Sequence[Array], device: torch.device) -> list[Tensor]:
    """The arrays on the device, through one asynchronous copy from pinned memory."""
    offsets = _offsets([array.nbytes for array in arrays])
    host = torch.empty(offsets[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
    memory = host.numpy()
    for array, start in zip(arrays, offsets, strict=False):
        memory[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    # torch keeps pinned memory from being used again before the device has read it.
    there = host.to(device, non_blocking=True)
    return [
        there[start : start + array.nbytes].view(_DTYPES[array.dtype]).view(array.shape)
        for array, start in zip(arrays, offsets, strict=False)
    ]
