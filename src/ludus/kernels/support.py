"""Where the compiled kernels can run."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch

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


def distrust(agrees: Callable[[torch.device], bool], device: torch.device, otherwise: str) -> str | None:
    """Why a kernel is not to be used on a device, found out by a trial; None when it gives what it should."""
    try:
        return None if agrees(device) else otherwise
    except torch.OutOfMemoryError:
        raise  # says nothing about the kernel
    except Exception as error:  # noqa: BLE001 - whatever breaks here would break every use
        return f"{type(error).__name__}: {error}".splitlines()[0]


def next_power_of_2(number: int) -> int:
    """The smallest power of two that is at least `number`."""
    return 1 << (number - 1).bit_length()
