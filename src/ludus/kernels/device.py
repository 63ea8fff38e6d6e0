"""Devices: where the compiled kernels can run, memory, copies between host and device, utilization."""

from __future__ import annotations

import ctypes
import gc
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_OLDEST = (8, 0)
"""Compute capability from which on bf16 matrix units exist."""

_ALIGNMENT = 16
_DTYPES = {
    np.dtype(np.int64): torch.int64,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.float64): torch.float64,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.bool_): torch.bool,
}
LIBRARY = "libnvidia-ml.so.1"
_GIB = 2**30


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
    if device.type == "cpu":
        return [torch.from_numpy(np.array(array)) for array in arrays]
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


# Utilization of GPUs, from NVIDIA's management library (NVML). It comes with the driver and is called through
# ctypes, so that no package is needed. Where it is not there, or says no, nothing is measured.


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _Memory(ctypes.Structure):
    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


class GpuMonitor:
    """Samples the GPUs that this process may see, until it is closed."""

    def __init__(self, library: Any, handles: list[ctypes.c_void_p], seconds: float) -> None:
        self._library, self._handles = library, handles
        self._lock = threading.Lock()
        self._busy: list[float] = []
        self._used = 0.0
        self._ended = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(seconds,), name="ludus-gpu-monitor", daemon=True
        )
        self._thread.start()

    @classmethod
    def start(
        cls,
        library: str = LIBRARY,
        *,
        seconds: float = 0.5,
        variables: Mapping[str, str] = os.environ,
    ) -> Self | None:
        """A monitor of the GPUs in CUDA_VISIBLE_DEVICES, or of all; None where there are none to ask."""
        try:
            nvml = ctypes.CDLL(library)
            if nvml.nvmlInit_v2():
                return None
            handles = _handles(nvml, variables.get("CUDA_VISIBLE_DEVICES"))
        except (OSError, AttributeError):  # no driver, or one that knows nothing of this
            return None
        return cls(nvml, handles, seconds) if handles else None

    def take(self) -> dict[str, float]:
        """The metrics since the last time; nothing where nothing was sampled."""
        with self._lock:
            busy, self._busy = self._busy, []
            used, self._used = self._used, 0.0
        if not busy:
            return {}
        return {"gpu/utilisation": sum(busy) / len(busy), "gpu/memory_gb": used}

    def close(self) -> None:
        self._ended.set()
        self._thread.join()
        self._library.nvmlShutdown()

    def _run(self, seconds: float) -> None:
        while not self._ended.wait(seconds):
            for handle in self._handles:
                self._sample(handle)

    def _sample(self, handle: ctypes.c_void_p) -> None:
        busy, memory = _Utilization(), _Memory()
        if self._library.nvmlDeviceGetUtilizationRates(handle, ctypes.byref(busy)):
            return
        if self._library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)):
            return
        with self._lock:
            self._busy.append(busy.gpu / 100)
            self._used = max(self._used, memory.used / _GIB)


def _handles(nvml: Any, visible: str | None) -> list[ctypes.c_void_p]:
    """NVML handles of GPUs given by number or UUID, in CUDA's order; a wrong name ends the list."""
    if visible is None:
        count = ctypes.c_uint()
        nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
        names = [str(number) for number in range(count.value)]
    else:
        names = [name.strip() for name in visible.split(",") if name.strip()]
    found: list[ctypes.c_void_p] = []
    for name in names:
        handle = ctypes.c_void_p()
        failed = (
            nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(int(name)), ctypes.byref(handle))
            if name.isdecimal()
            else nvml.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(handle))
        )
        if failed:
            break
        found.append(handle)
    return found
