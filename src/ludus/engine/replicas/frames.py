"""Payloads of the connection to a replica's process, as the bodies of frames (`remote/channel.py`).

Tokens are int32, log-probabilities float64, so that nothing is rounded; images are the bytes of their files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ludus.core.generation import Completion, FinishReason, VersionSpan, checked_context
from ludus.core.messages import Json


def pack_tokens(tokens: Sequence[int]) -> bytes:
    return checked_context(tokens).astype("<i4").tobytes()


def pack_images(tokens: bytes, images: Mapping[str, bytes]) -> tuple[Json, bytes]:
    """Packed tokens and the files of images behind them, by their hashes."""
    head = {"images": [[sha256, len(data)] for sha256, data in images.items()]}
    return head, b"".join((tokens, *images.values()))


def unpack_images(head: Json, body: bytes) -> tuple[bytes, dict[str, bytes]]:
    """Inverse of `pack_images`."""
    sizes = head.get("images", [])
    place = len(body) - sum(size for _, size in sizes)
    tokens, images = body[:place], {}
    for sha256, size in sizes:
        images[sha256] = body[place : place + size]
        place += size
    return tokens, images


def unpack_tokens(body: bytes) -> list[int]:
    tokens: list[int] = np.frombuffer(body, "<i4").tolist()
    return tokens


def pack_logprobs(logprobs: Sequence[float]) -> bytes:
    return np.asarray(logprobs, "<f8").tobytes()


def unpack_logprobs(body: bytes) -> list[float]:
    logprobs: list[float] = np.frombuffer(body, "<f8").tolist()
    return logprobs


def pack_completion(completion: Completion) -> tuple[Json, bytes]:
    head = {
        "finish": completion.finish.value,
        "versions": [[span.start, span.version] for span in completion.versions],
        "stop": completion.stop,
        "cached_tokens": completion.cached_tokens,
    }
    tokens = np.asarray(completion.tokens, "<i4").tobytes()
    return head, tokens + pack_logprobs(completion.logprobs)


def unpack_completion(head: Json, body: bytes) -> Completion:
    count = len(body) // 12
    return Completion(
        tokens=unpack_tokens(body[: 4 * count]),
        logprobs=unpack_logprobs(body[4 * count :]),
        finish=FinishReason(head["finish"]),
        versions=tuple(VersionSpan(start, version) for start, version in head["versions"]),
        stop=head["stop"],
        cached_tokens=head["cached_tokens"],
    )
