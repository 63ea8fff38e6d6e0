"""`Replica`: the interface of an engine that has weights of its own, in another process or on another machine.

The embedded engine samples the very module that is trained. A replica holds a copy, and gets new weights as a
folder in Hugging Face format. `ProcessReplica` (here) is an embedded engine in a child process; a vLLM server
and a Ray actor are others. `ReplicatedEngine` makes one engine of several.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from ludus.core.generation import Completion, OnTokens, Sampling
from ludus.core.messages import MediaSpan


class Replica(Protocol):
    """An engine with weights of its own. One event loop calls it; many requests run at once.

    Its life: `start`, then any number of `load_weights`, until `ended` returns or `close` is called; after
    either it can be started again. When it dies, every call that is running raises a retriable `EngineError`.
    A call may be cancelled at any time. Whoever calls has deadlines of his own: there need be none inside.

    The methods that `core.generation.Engine` has, too, mean the same here. The difference: `load_weights` takes
    the place of `update_weights`.
    """

    @property
    def name(self) -> str:
        """What messages call it, such as "engine 2 (process 4711)"."""

    @property
    def policy_version(self) -> int:
        """The version of the weights that the next token is sampled with."""

    async def start(self, folder: Path, version: int) -> None:
        """Return when it can serve with these weights, whose version is `version`.

        `folder` has a model and its tokenizer in Hugging Face format: config.json, model.safetensors and the
        tokenizer's files. It is on this machine, usually in shared memory, and is there until this returns.
        """

    async def load_weights(self, folder: Path, version: int) -> None:
        """Replace the weights: all of them, or an error is raised and it is not used again.

        Requests in flight stop between two tokens and go on with the new weights; no KV of other weights is
        used. Tokens sampled from now on have `version` in their `VersionSpan`s. Paused, it stays paused.
        """

    async def ended(self) -> str:
        """Return when it has died, or does not answer any more, with the reason in words."""

    async def generate(
        self,
        tokens: Sequence[int],
        sampling: Sampling,
        *,
        session: str | None = None,
        media: Sequence[MediaSpan] = (),
        on_tokens: OnTokens | None = None,
    ) -> Completion: ...

    async def score(
        self, tokens: Sequence[int], *, temperature: float = 1.0, media: Sequence[MediaSpan] = ()
    ) -> list[float]:
        """The canary asks this after every load: it must come from the weights that `generate` samples with."""

    async def fork(self, session: str, into: str) -> None: ...

    async def release(self, session: str) -> None: ...

    async def abort(self, session: str) -> None: ...

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def forget(self) -> None:
        """Drop the KV of all requests and sessions; it is computed again where it is needed."""

    async def close(self) -> None:
        """End it, with all that it has started, whatever state it is in; safe more than once."""
