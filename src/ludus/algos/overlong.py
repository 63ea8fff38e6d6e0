"""DAPO's overlong shaping: a price for coming close to the longest length, rising over a buffer.

              0                                   length <= longest - buffer
    price  =  (longest - buffer - length) / buffer    up to the longest
              -1                                  beyond

Added to the total reward, it tells a policy that it is running out of room before it is cut.

Yu et al., "DAPO: An Open-Source LLM Reinforcement Learning System at Scale", 2025, arXiv:2503.14476,
equation 13.
"""

from __future__ import annotations

from torch import Tensor


def overlong_price(length_N: Tensor, *, longest: int, buffer: int) -> Tensor:
    """What to add to each total: from 0 down to -1. Lengths are in tokens said."""
    if not 0 < buffer <= longest:
        raise ValueError(f"the buffer must lie between 1 and the longest length {longest}, not {buffer}")
    return ((longest - buffer - length_N) / buffer).clamp(-1, 0)
