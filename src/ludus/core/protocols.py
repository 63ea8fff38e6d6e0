"""The seams: what one room asks of another without knowing which implementation it got."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

from ludus.core.generation import Completion, Sampling
from ludus.core.messages import Json, Media
from ludus.core.task import Task
from ludus.core.trajectory import Group, Trajectory

T = TypeVar("T")


@runtime_checkable
class Engine(Protocol):
    """Something that generates tokens with a policy whose version it knows."""

    @property
    def policy_version(self) -> int:
        """Counts the weight updates; cached KV of another version is never used."""

    async def generate(
        self,
        tokens: Sequence[int],
        sampling: Sampling,
        *,
        session: str | None = None,
        media: Sequence[Media] = (),
    ) -> Completion:
        """Continue `tokens`. A session keeps its KV for the next call whose tokens extend these."""

    async def score(self, tokens: Sequence[int], *, temperature: float = 1.0) -> list[float]:
        """The log-probability of each token given those before it; the first one's is 0."""

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

    async def update_weights(self) -> int:
        """The weights have changed: drop what was cached, count one up, return the new version."""

    async def close(self) -> None:
        """Stop; requests still waiting fail with `EngineError`."""


class Tokenizer(Protocol):
    """Text to tokens and back. Only new text is ever encoded, and decoding is for people and parsers."""

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """The tokens that end a turn."""

    @property
    def vocabulary_size(self) -> int:
        """How many ids there are."""

    @property
    def controls(self) -> Mapping[str, int]:
        """The special tokens by their text. Templates write them; content must not be able to."""

    def encode(self, text: str) -> list[int]:
        """Ids for `text`, special tokens recognised, nothing added at either end."""

    def encode_text(self, text: str) -> list[int]:
        """Ids for `text` in which nothing is special: a control token's text stays text."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Text for ids, special tokens included; never raises on an incomplete character."""

    def apply_chat_template(
        self, messages: Sequence[Json], tools: Sequence[Json] | None, add_generation_prompt: bool
    ) -> str:
        """The conversation as one text."""


class Reward(Protocol):
    """Scores one episode. A reward may read the episode's environments before they are released."""

    @property
    def name(self) -> str: ...

    async def score(
        self, trajectory: Trajectory, task: Task, envs: Mapping[str, Any]
    ) -> dict[str, float]:
        """Parts by name; the part called like the reward itself is the one that counts."""


class GroupReward(Protocol):
    """Scores all attempts at a task together."""

    @property
    def name(self) -> str: ...

    async def score_group(self, group: Group) -> list[float]:
        """One number for each trajectory of the group."""


class RolloutSource(Protocol):
    """Where the trainer gets its groups from; it does not know who plays the episodes."""

    def groups(self, tasks: Sequence[Task], seed: int) -> AsyncIterator[Group]:
        """One group for each task, in the order they finish. `seed` and the task decide the randomness."""


class Executor(Protocol):
    """Runs sync functions somewhere that blocks nobody: threads, processes, a cluster."""

    def run(
        self, function: Callable[..., T], *args: Any, timeout: float | None = None, **kwargs: Any
    ) -> Coroutine[Any, Any, T]:
        """The function's result; `TimeoutError` when it takes longer."""

    async def close(self) -> None:
        """Stop the workers."""
