"""The requests of a replica as operations and bytes, whatever carries them to a `ServedEngine`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import asdict

from ludus.core.failures import EngineError
from ludus.core.generation import Completion, Engine, OnTokens, Sampling
from ludus.core.messages import Json, MediaSpan
from ludus.engine.replicas.frames import (
    pack_images,
    pack_tokens,
    unpack_completion,
    unpack_logprobs,
)
from ludus.remote.channel import Frame


class RequestedReplica(Engine):
    """The part of an engine elsewhere that asks."""

    @abstractmethod
    async def _ask(self, operation: str, head: Json, body: bytes) -> Frame:
        """The reply of the `ServedEngine`; its death is raised as `EngineError`."""

    async def _request(self, operation: str, head: Json | None = None, body: bytes = b"") -> Frame:
        """The reply of the `ServedEngine`; an error in it is raised as `EngineError`."""
        reply, found = await self._ask(operation, head or {}, body)
        return checked(reply), found

    async def generate(
        self,
        tokens: Sequence[int],
        sampling: Sampling,
        *,
        session: str | None = None,
        media: Sequence[MediaSpan] = (),
        on_tokens: OnTokens | None = None,
    ) -> Completion:
        head = {"sampling": asdict(sampling), "session": session}
        return unpack_completion(*await self._request_on("generate", head, tokens, media))

    async def score(
        self, tokens: Sequence[int], *, temperature: float = 1.0, media: Sequence[MediaSpan] = ()
    ) -> list[float]:
        _, body = await self._request_on("score", {"temperature": temperature}, tokens, media)
        return unpack_logprobs(body)

    async def _request_on(
        self, operation: str, head: Json, tokens: Sequence[int], media: Sequence[MediaSpan]
    ) -> Frame:
        """A request on a context. Images go by their hashes; those that the engine asks for are sent then.

        An episode shows the same images in every turn, and attempts at a task share theirs.
        """
        packed = pack_tokens(tokens)
        if not media:
            return await self._request(operation, head, packed)
        spans = [[span.sha256, span.start, span.stop] for span in media]
        at_hand = {span.sha256: span.data for span in media}
        sent: dict[str, bytes] = {}
        while True:
            about, body = pack_images(packed, sent)
            reply, found = await self._request(operation, {**head, **about, "media": spans}, body)
            missing = [sha256 for sha256 in reply.get("missing", ()) if sha256 not in sent]
            if not missing:
                return reply, found
            for sha256 in missing:
                data = at_hand[sha256]
                if data is None:
                    raise EngineError(
                        f"the bytes of the image {sha256[:12]} are not at hand", retriable=False
                    )
                sent[sha256] = data

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


def checked(reply: Json) -> Json:
    """A reply of the `ServedEngine`; an error in it is raised as `EngineError`."""
    if (error := reply.get("error")) is not None:
        raise EngineError(error["message"], retriable=error["retriable"])
    return reply
