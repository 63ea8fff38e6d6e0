"""The interfaces of models: `Engine` continues tokens, `ChatModel` answers messages with text."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import StrEnum
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from ludus.core.failures import EngineError
from ludus.core.messages import MediaSpan, Message

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


class FinishReason(StrEnum):
    """Why a generation ended."""

    STOP_TOKEN = "stop_token"
    STOP_STRING = "stop_string"
    LENGTH = "length"
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """From token `start` of an action on, the policy had this version."""

    start: int
    version: int


COLDEST, HOTTEST = 1e-30, 1e6
"""The temperatures that float32 can divide logits by, beside 0, which is greedy."""
_LARGEST = 2**31 - 1
_LONGEST_STOP = 4096
_ALLOWED = {
    "max_tokens": f"1 to {_LARGEST}",
    "temperature": f"0, or {COLDEST:g} to {HOTTEST:g}",
    "top_p": "above 0, to 1",
    "top_k": f"0 to {_LARGEST}, and 0 is all tokens",
    "min_p": "0 to 1",
    "repetition_penalty": "0.001 to 1000",
    "stop": f"texts of 1 to {_LONGEST_STOP} characters",
    "seed": "a whole number of 64 bits",
}


def _is_whole(value: object, least: int, most: int) -> bool:
    return isinstance(value, Integral) and least <= int(value) <= most


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to draw tokens. `seed` is the request's own key: the same request draws the same tokens.

    A temperature of 0 is greedy. Log-probabilities are those of the full distribution at `temperature`
    (at 1 when greedy): the distribution that is trained on. Truncation and the repetition penalty
    change what is drawn and not what is reported.
    """

    max_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    stop_tokens: tuple[int, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse what a row cannot be sampled by: it would share its batch with other callers' rows."""
        checks = {
            "max_tokens": _is_whole(self.max_tokens, 1, _LARGEST),
            "temperature": self.temperature == 0 or COLDEST <= self.temperature <= HOTTEST,
            "top_p": 0 < self.top_p <= 1,
            "top_k": _is_whole(self.top_k, 0, _LARGEST),
            "min_p": 0 <= self.min_p <= 1,
            "repetition_penalty": 0.001 <= self.repetition_penalty <= 1000,
            "stop": all(0 < len(stop) <= _LONGEST_STOP for stop in self.stop),
            "seed": _is_whole(self.seed, -(2**63), 2**64 - 1),
        }
        for name, good in checks.items():
            if not good:
                value = getattr(self, name)
                raise ValueError(f"sampling.{name} cannot be {value!r:.60}; it can be {_ALLOWED[name]}")

    @property
    def is_truncated(self) -> bool:
        """Whether tokens are drawn from another distribution than the one reported."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0 or self.repetition_penalty != 1


@dataclass(frozen=True, slots=True)
class Completion:
    """The result of a generation. `tokens` are exactly as sampled, the stop token included."""

    tokens: list[int]
    logprobs: list[float]
    finish: FinishReason
    versions: tuple[VersionSpan, ...] = (VersionSpan(0, 0),)
    stop: str | None = None
    """The stop string that was met; it may have ended inside the last token."""
    cached_tokens: int = 0
    """How many tokens of the context did not have to be computed."""
    queued_seconds: float = field(default=0.0, compare=False)
    """How long the request waited before anything was computed for it."""


def first_stop(text: str, stops: Sequence[str]) -> tuple[int, str] | None:
    """Where the stop string begins that is complete first in `text`, and which it is.

    Of two that end together it is the longer one. So tokens decide nothing: a model that writes letter by
    letter is stopped by the same.
    """
    starts = ((text.find(stop), stop) for stop in stops)
    found = [(start + len(stop), start, stop) for start, stop in starts if start >= 0]
    return min(found)[1:] if found else None


def checked_context(tokens: Sequence[int], vocabulary: int | None = None) -> npt.NDArray[np.int64]:
    """The tokens of a request, or an `EngineError` where a model with so many tokens cannot read them."""
    import numpy as np  # here, because most rooms import this module and send no tokens

    array = np.asarray(tokens)
    if array.ndim != 1 or array.size == 0 or array.dtype.kind not in "iu":
        raise EngineError("a context must be a non-empty list of token ids", retriable=False)
    if array.min() < 0 or array.max() >= (vocabulary or 1 << 31):
        wrong = int(array.min()) if array.min() < 0 else int(array.max())
        size = f" of {vocabulary}" if vocabulary else ""
        raise EngineError(f"token {wrong} is not in the model's vocabulary{size}", retriable=False)
    return array


OnTokens = Callable[[Sequence[int]], None]
"""Is given the tokens of a generation while it goes on: those since the last call, on the caller's loop."""


class Engine(ABC):
    """Generates tokens with a policy whose version it knows. Only `generate` has to be written.

    Subclass it: every other method has a default, which is that of an engine without sessions of its own and
    whose weights never change. There are two ways to follow a trainer:

    - `shares_weights`: the engine samples the trainer's own module. It is paused while that changes, and is
      notified by `update_weights`.
    - weights of its own: `start` and `load_weights` read them from a folder in Hugging Face format. Several
      such engines make one (`engine.replicas.ReplicatedEngine`), which watches them, keeps sessions where
      their KV is, and compares each with the trainer after every update. One event loop calls such an engine,
      with many requests at once, and cancels calls at any time. The caller has the deadlines: calls need none
      of their own. When the engine dies, every running call raises a retriable `EngineError`.
    """

    @property
    def name(self) -> str:
        """Name in messages, such as "engine 2 (process 4711)"."""
        return type(self).__name__

    @property
    def policy_version(self) -> int:
        """Counts the weight updates: the version that the next token is sampled with."""
        return 0

    @property
    def shares_weights(self) -> bool:
        """Whether it samples the trainer's own module."""
        return False

    @property
    def takes_images(self) -> bool:
        """Whether `generate` and `score` take `media`."""
        return True

    @abstractmethod
    async def generate(
        self,
        tokens: Sequence[int],
        sampling: Sampling,
        *,
        session: str | None = None,
        media: Sequence[MediaSpan] = (),
        on_tokens: OnTokens | None = None,
    ) -> Completion:
        """Continue `tokens`. A session keeps its KV for the next call whose tokens extend these.

        `media` says which tokens stand for images, with their bytes; engines that read text only refuse it.
        `on_tokens` sees tokens early and decides nothing: the completion has all of them again. The token that
        ends the generation is not reported, and an engine that learns of tokens only at the end reports none.
        It must not raise.
        """

    async def score(self, tokens: Sequence[int], *, media: Sequence[MediaSpan] = ()) -> list[float]:
        """The log-probability of each token given those before it, at a temperature of 1; the first one's is 0.

        The canary asks an engine with weights of its own after every load: scores must come from the weights
        that `generate` samples with.
        """
        raise EngineError(f"{self.name} gives no log-probabilities of given tokens", retriable=False)

    async def fork(self, session: str, into: str) -> None:
        """Make session `into` share everything that `session` has computed so far."""

    async def release(self, session: str) -> None:
        """Forget a session; unknown names are ignored, so that clean-up is always safe."""

    async def abort(self, session: str) -> None:
        """End the session's running request now; its caller gets what there is, as ABORTED."""

    async def pause(self) -> None:
        """Return when nothing is being computed; requests wait until `resume`."""

    async def resume(self) -> None:
        """Go on after `pause`."""

    async def forget(self) -> None:
        """Drop the KV of all requests and sessions; it is computed again where it is needed."""

    async def update_weights(self, count: int = 1) -> int:
        """The trainer's weights have changed `count` times: sample the new ones, and return their version.

        KV of older weights is not used.
        """
        raise EngineError(
            f"{self.name} has weights of its own: they are replaced by load_weights(folder, version)",
            retriable=False,
        )

    async def start(self, folder: Path, version: int) -> None:
        """Return when it can serve with these weights. After it has ended it can be started again.

        `folder` has a model and its tokenizer in Hugging Face format: config.json, model.safetensors and the
        tokenizer's files. It is on this machine, usually in shared memory, and is there until this returns.
        """
        await self.load_weights(folder, version)

    async def load_weights(self, folder: Path, version: int) -> None:
        """Replace the weights: all of them, or an error is raised and the engine is not used again.

        Requests in flight stop between two tokens and go on with the new weights; no KV of other weights is
        used. Tokens sampled from now on have `version` in their `VersionSpan`s. Paused, it stays paused.
        """
        raise EngineError(f"{self.name} cannot be given new weights", retriable=False)

    async def ended(self) -> str:
        """Return when it has died, or does not answer any more, with the reason in words."""
        never: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        return await never

    def metrics(self) -> dict[str, float]:
        """Metrics of the engine that each training step logs."""
        return {}

    async def close(self) -> None:
        """End it, with all that it has started; requests still waiting fail with `EngineError`.

        Safe more than once.
        """


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """How to answer."""

    max_tokens: int = 1024
    temperature: float = 0.0
    seed: int | None = None
    wants_json: bool = False
    """Ask the server for a JSON object where it can promise one; the answer is checked all the same."""


@dataclass(frozen=True, slots=True)
class ChatReply:
    """An answer, and what it took."""

    text: str
    prompt_tokens: int = 0
    completion_tokens: int = 0
    money: float = 0.0
    """By the prices that were given."""
    is_cut: bool = False
    """Whether it ended at `max_tokens`."""
    is_cached: bool = False
    """Whether it was found instead of asked for, and cost nothing."""


@runtime_checkable
class ChatModel(Protocol):
    """Something that answers messages in text: what judges, synthesis and simulated users ask.

    It is behind an address (`ludus.llm`), or the policy itself (`EngineChatModel`). Nothing is trained on it.
    """

    @property
    def name(self) -> str:
        """Name of the model in reports, logs and cache keys."""

    async def chat(self, messages: Sequence[Message], options: ChatOptions = ...) -> ChatReply:
        """Answer; raises `InfraError` where no answer can be had."""

    async def close(self) -> None:
        """Release connections; safe to call twice."""


policy_model: ContextVar[ChatModel | None] = ContextVar("policy_model", default=None)
"""The model that is trained or evaluated, while its episodes are scored; None outside of a run."""
