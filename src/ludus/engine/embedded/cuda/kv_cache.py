"""The KV cache of the CUDA runner: one allocation whose address stays while its memory comes and goes.

A captured graph knows addresses. So the cache reserves a range of addresses once, through the CUDA driver's
virtual memory functions, and maps physical memory into it while it needs any. During a pause the memory is the
trainer's; mapped again, the graphs are valid as they were.
"""

from __future__ import annotations

import ctypes
import logging
import weakref
from functools import cache
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

_log = logging.getLogger(__name__)

_PIECE = 1 << 30
"""Physical memory is taken in pieces of at most this size."""
_OUT_OF_MEMORY = 2


class DeviceMemory(Protocol):
    """Bytes on a device, at an address that never changes."""

    def take(self, size: int) -> Tensor:
        """`size` bytes (uint8) of any content; `torch.OutOfMemoryError` if there are not so many."""

    def give_back(self) -> None:
        """Release the bytes, where that is possible; what was taken must not be touched."""

    def close(self) -> None:
        """Release the bytes and their address, for good."""


class FixedMemory:
    """An ordinary allocation: it is never given back, so that its address stays."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._bytes: Tensor | None = None

    def take(self, size: int) -> Tensor:
        if self._bytes is None or len(self._bytes) < size:
            self._bytes = None
            self._bytes = torch.empty(size, dtype=torch.uint8, device=self._device)
        return self._bytes[:size]

    def give_back(self) -> None:
        """Nothing: the address could not be had again."""

    def close(self) -> None:
        self._bytes = None


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Flags(ctypes.Structure):
    _fields_ = (
        ("compression", ctypes.c_ubyte),
        ("rdma", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    )


class _Properties(ctypes.Structure):
    """CUmemAllocationProp: pinned (1) memory of a device (location type 1)."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("metadata", ctypes.c_void_p),
        ("flags", _Flags),
    )


class _Access(ctypes.Structure):
    """CUmemAccessDesc: who may read and write (3)."""

    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class DriverError(RuntimeError):
    """A driver function that refused."""

    def __init__(self, function: str, code: int) -> None:
        super().__init__(f"{function} gave the CUDA error {code}")
        self.code = code


@cache
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def _call(function: str, *arguments: object) -> None:
    code = getattr(_driver(), function)(*arguments)
    if code:
        raise DriverError(function, code)


class _Bytes:
    """What torch needs to see a range of addresses as a tensor."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3, "strides": None,
        }  # fmt: skip


class ReservedMemory:
    """A range of addresses of at most `size` bytes, with memory behind it from `take` to `give_back`."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._device = device
        self._index = torch.cuda.current_device() if device.index is None else device.index
        self._properties = _Properties(type=1, location=_Location(1, self._index))
        with torch.cuda.device(self._index):
            torch.cuda.synchronize()  # the thread has a context afterwards
            unit = ctypes.c_size_t()
            _call("cuMemGetAllocationGranularity", ctypes.byref(unit), ctypes.byref(self._properties), 0)
            self._unit = unit.value
            self._size = self._rounded(size)
            address = ctypes.c_uint64()
            _call(
                "cuMemAddressReserve",
                ctypes.byref(address),
                ctypes.c_size_t(self._size),
                ctypes.c_size_t(0),
                ctypes.c_uint64(0),
                ctypes.c_uint64(0),
            )
        self.address = address.value
        self._pieces: list[tuple[int, int]] = []  # offset and size of what is mapped
        self._end = weakref.finalize(self, _release, self._index, self.address, self._size, self._pieces)
        self._end.atexit = False  # steps may still be running then; the driver cleans up after a process
        if self.take(1).data_ptr() != self.address:  # map and unmap once: what does not work fails here
            raise DriverError("a tensor over mapped memory", 0)
        self.give_back()

    def take(self, size: int) -> Tensor:
        wanted = self._rounded(size)
        if wanted > self._size:
            raise ValueError(f"{size} bytes were asked of a range of {self._size}")
        mapped = sum(piece for _, piece in self._pieces)
        with torch.cuda.device(self._index):
            torch.cuda.synchronize()
            if torch.cuda.mem_get_info(self._index)[0] < wanted - mapped:
                torch.cuda.empty_cache()  # blocks that torch caches are not free
            try:
                while mapped < wanted:
                    piece = min(_PIECE, wanted - mapped)
                    self._map(mapped, piece)
                    mapped += piece
            except DriverError as error:
                self.give_back()
                if error.code != _OUT_OF_MEMORY:
                    raise
                raise torch.OutOfMemoryError(
                    f"the GPU has no {wanted >> 20} MiB for the KV cache"
                ) from None
            return torch.as_tensor(_Bytes(self.address, size), device=self._device)

    def _map(self, offset: int, size: int) -> None:
        handle = ctypes.c_uint64()
        amount, place = ctypes.c_size_t(size), ctypes.c_uint64(self.address + offset)
        _call(
            "cuMemCreate",
            ctypes.byref(handle),
            amount,
            ctypes.byref(self._properties),
            ctypes.c_uint64(0),
        )
        try:
            _call("cuMemMap", place, amount, ctypes.c_size_t(0), handle, ctypes.c_uint64(0))
        finally:
            _call("cuMemRelease", handle)  # the mapping keeps it alive
        self._pieces.append((offset, size))
        access = _Access(_Location(1, self._index), 3)
        _call("cuMemSetAccess", place, amount, ctypes.byref(access), ctypes.c_size_t(1))

    def give_back(self) -> None:
        with torch.cuda.device(self._index):
            torch.cuda.synchronize()  # no kernel may be reading it any more
            _unmap(self.address, self._pieces)

    def close(self) -> None:
        self._end()

    def _rounded(self, size: int) -> int:
        return -(-size // self._unit) * self._unit


def _unmap(address: int, pieces: list[tuple[int, int]]) -> None:
    while pieces:
        offset, size = pieces.pop()
        _call("cuMemUnmap", ctypes.c_uint64(address + offset), ctypes.c_size_t(size))


def _release(index: int, address: int, size: int, pieces: list[tuple[int, int]]) -> None:
    """The range's end, also when its owner was forgotten."""
    try:
        with torch.cuda.device(index):
            torch.cuda.synchronize()
            _unmap(address, pieces)
            _call("cuMemAddressFree", ctypes.c_uint64(address), ctypes.c_size_t(size))
    except RuntimeError as error:  # the context is broken, and nothing can be freed any more
        _log.debug("the KV cache's addresses were not freed: %s", error)


def memory_for(size: int, device: torch.device) -> DeviceMemory:
    """Memory of at most `size` bytes that can be handed back where the driver allows it."""
    if device.type == "cuda":
        try:
            return ReservedMemory(size, device)
        except (OSError, AttributeError, RuntimeError, TypeError) as error:
            _log.warning(
                "the KV cache's memory stays with the engine while training (the driver's virtual memory "
                "functions cannot be used: %s); lower engine.memory if the trainer needs more",
                error,
            )
    return FixedMemory(device)


_FEWEST_BLOCKS = 16


class KVShape(NamedTuple):
    """Shape of every layer's keys and values."""

    layers: int
    kv_heads: int
    head_size: int
    dtype: torch.dtype


class StaticKVCache:
    """Keys and values [blocks + 1, Hkv, block_size, D] of every layer, allocated as a whole.

    The block after the last one is spare: idle rows of a step write there.
    """

    def __init__(
        self,
        shape: KVShape,
        blocks: int,
        block_size: int,
        device: torch.device,
        memory: DeviceMemory | None = None,
    ) -> None:
        self.block_size = block_size
        self.count = blocks
        self._shape = shape
        self._device = device
        self._memory = memory or memory_for(self._bytes(blocks), device)
        self._all: Tensor | None = None

    @property
    def is_allocated(self) -> bool:
        return self._all is not None

    @property
    def spare_slot(self) -> int:
        """Where an idle row's keys and values go."""
        return self.count * self.block_size

    def acquire(self) -> int:
        """DeviceMemory for as many blocks as there were, or for half as many, and so on."""
        while True:
            try:
                taken = self._memory.take(self._bytes(self.count))
                break
            except torch.OutOfMemoryError:
                if self.count // 2 < _FEWEST_BLOCKS:
                    raise
                self.count //= 2
                _log.warning(
                    "there is no memory for the KV cache of %d tokens: trying half of it; a lower "
                    "engine.memory (or engine.cache_tokens) avoids this",
                    2 * self.count * self.block_size,
                )
        shape = self._shape
        # A NaN that others left here would spoil the first who reads beyond its own tokens.
        self._all = (
            taken.zero_()
            .view(shape.dtype)
            .view(2 * shape.layers, self.count + 1, shape.kv_heads, self.block_size, shape.head_size)
        )
        return self.count

    def release(self) -> None:
        self._all = None
        self._memory.give_back()

    def halve(self) -> bool:
        if self.count // 2 < _FEWEST_BLOCKS:
            return False
        self._all = None
        self._memory.close()
        self.count //= 2
        self._memory = memory_for(self._bytes(self.count), self._device)
        return True

    def blocks(self, layer: int) -> tuple[Tensor, Tensor]:
        """The layer's keys and values, each [blocks + 1, Hkv, block_size, D]."""
        everything = self._everything()
        return everything[2 * layer], everything[2 * layer + 1]

    def copy_block(self, source: int, target: int) -> None:
        everything = self._everything()
        everything[:, target].copy_(everything[:, source])

    def clear(self) -> None:
        if self._all is not None:
            self._all.zero_()

    def free(self) -> None:
        self._all = None
        self._memory.close()

    def _everything(self) -> Tensor:
        if self._all is None:
            raise RuntimeError("the KV cache's memory has been released")
        return self._all

    def _bytes(self, blocks: int) -> int:
        layers, heads, size, dtype = self._shape
        return 2 * layers * (blocks + 1) * heads * self.block_size * size * dtype.itemsize
