"""GPU utilization from NVIDIA's management library: sampled by a thread, averaged over each step.

The library (NVML) comes with the driver and is called through ctypes, so that no package is needed. Where it is
not there, or says no, nothing is measured.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Mapping
from typing import Any, Self

LIBRARY = "libnvidia-ml.so.1"
_GIB = 2**30


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
