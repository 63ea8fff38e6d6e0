"""Counter-based randomness: a number is a function of its key and its position, of nothing else.

There is no generator state to save, to share or to disturb: the same request draws the same numbers
whatever it is batched with, before and after a resume. The mixer is splitmix64 (Steele, Lea and Flood,
"Fast splittable pseudorandom number generators", OOPSLA 2014).
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

_GOLDEN = 0x9E3779B97F4A7C15


def key(*parts: int | str) -> int:
    """A 63-bit key for, say, (run seed, task id, attempt, turn); equal parts give equal keys."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return (
        int.from_bytes(
            hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big"
        )
        >> 1
    )


def uniforms(keys: npt.ArrayLike, positions: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """One number in [0, 1) for each (key, position)."""
    with np.errstate(over="ignore"):
        z = np.asarray(keys, dtype=np.uint64) + np.uint64(_GOLDEN) * (
            np.asarray(positions, dtype=np.uint64) + np.uint64(1)
        )
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = z ^ (z >> np.uint64(31))
    return np.asarray((z >> np.uint64(11)).astype(np.float64) * 2.0**-53)


def uniform(key: int, position: int) -> float:
    """One number in [0, 1)."""
    return float(uniforms(key, position))


def shuffled(count: int, key: int) -> list[int]:
    """The numbers below `count` in an order that the key alone decides."""
    return [int(i) for i in np.argsort(uniforms(key, np.arange(count)), kind="stable")]
