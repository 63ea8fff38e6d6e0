"""The requests of a replica as operations and bytes, whatever carries them to a `ServedEngine`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict

from ludus.core.failures import EngineError
from ludus.core.generation import Completion, OnTokens, Sampling
from ludus.core.messages import Json, MediaSpan
from ludus.engine.replicas.frames import pack_tokens, unpack_completion, unpack_logprobs


class RequestedReplica(ABC):
    """The part of a `Replica` that asks."""

    @abstractmethod
    async def _request(
        self, operation: str, head: Json | None = None, body: bytes = b""
    ) -> tuple[Json, bytes]:
        """The reply of the `ServedEngine`; its errors, and its death, are raised as `EngineError`."""

    async def generate(
        self,
        tokens: Sequence[int],
        sampling: Sampling,
        *,
        session: str | None = None,
        media: Sequence[MediaSpan] = (),
        on_tokens: OnTokens | None = None,
    ) -> Completion:
        if media:
            raise EngineError(
                "this engine reads text only: pictures are shown by the engine inside the trainer's process "
                "(a recipe without cluster.engines and cluster.servers)",
                retriable=False,
            )
        head = {"sampling": asdict(sampling), "session": session}
        return unpack_completion(*await self._request("generate", head, pack_tokens(tokens)))

    async def score(self, tokens: Sequence[int], *, temperature: float = 1.0) -> list[float]:
        _, body = await self._request("score", {"temperature": temperature}, pack_tokens(tokens))
        return unpack_logprobs(body)

    async def fork(self, session: str, into: str) -> None:
        await self._request("fork", {"session": session, "into": into})

    async def release(self, session: str) -> None:
        await self._request("release", {"session": session})

    async def abort(self, session: str) -> None:
        await self._request("abort", {"session": session})

    async def pause(self) -> None:
        await self._request("pause")

    async def resume(self) -> None:
        await self._request("resume")

    async def forget(self) -> None:
        await self._request("forget")
