"""What all judges share: a model, how it is asked, whose fault no answer is, and what a verdict cost.

A judge that gives no usable answer is either broken, which is our failure and leaves the episode unscored, or
kept from answering by what the episode says. The second is the model's fault and scores the minimum: otherwise
a policy could learn to leave its bad episodes unscored. A control question tells them apart: the same judge,
task and form with a harmless attempt. If that is answered, the judge works. An answer that could not be used
shows that the judge is there; after any other error the episode is asked about once more.
"""

from __future__ import annotations

import logging
import secrets
import struct
import time
import zlib
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from hashlib import sha256
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, Field, TypeAdapter

from ludus.core.chat import ChatModel, ChatOptions
from ludus.core.failures import ConfigError
from ludus.core.messages import Media, Message
from ludus.core.trajectory import StopReason, Trajectory
from ludus.llm import (
    BudgetExceeded,
    ChatError,
    ChatUsage,
    JsonReply,
    UnusableReply,
    ask_json,
    load_chat_model,
)
from ludus.rewards.scores import checked_name, checked_weight

T = TypeVar("T")
log = logging.getLogger(__name__)

UNANSWERED = "judge/unanswered"
_CONTROL_SECONDS = 600.0
"""How long an answered control question holds for a judge that answers, if not usably."""
ModelSpec = str | Mapping[str, Any] | ChatModel
"""An address, a table of `ChatModelConfig`, or a model."""

Unit = Annotated[float, Field(strict=True, ge=0, le=1, allow_inf_nan=False)]
"""A score from 0 to 1."""
OutOfTen = Annotated[float, Field(strict=True, ge=0, le=10, allow_inf_nan=False)]
"""A score from 0 to 10. A text or a boolean is none."""


class CodedVerdict(BaseModel):
    """What a judge answers. `code` names the evidence: a verdict that is planted in it does not know it."""

    code: str


V = TypeVar("V", bound=CodedVerdict)


def coded(kind: type[V], code: str, check: Callable[[V], None] = lambda verdict: None) -> TypeAdapter[V]:
    """The type of a verdict that names this code; `check` raises a `ValueError` for what else is wrong."""

    def checked(verdict: V) -> V:
        if verdict.code != code:
            raise ValueError(f"code must be {code!r}, the code of the marks around the evidence")
        check(verdict)
        return verdict

    return TypeAdapter(Annotated[kind, AfterValidator(checked)])  # type: ignore[arg-type]


class AskingReward:
    """A reward that asks a model. Its verdict is checked; one that cannot be had is a failure, and no score,
    unless it is the episode that keeps the model from answering (`judged`).

    The failure (`ChatError`, at the boundary `chat`) takes the episode out of the loss and the baseline,
    whatever its other rewards are, and is counted as `failure/chat`.
    """

    uses_envs = False
    timeout = None
    """The model has deadlines of its own."""

    def __init__(
        self,
        model: ModelSpec,
        *,
        attempts: int,
        max_tokens: int,
        temperature: float,
        most_chars: int,
        name: str,
        weight: float,
    ) -> None:
        self.name = checked_name(name)
        self.weight = checked_weight(weight, name)
        if attempts < 1 or max_tokens < 1 or most_chars < 1:
            raise ConfigError(f"{name!r}: attempts, max_tokens and most_chars are at least 1")
        self.model = load_chat_model(model)
        self.attempts, self.most_chars = attempts, most_chars
        self.options = ChatOptions(max_tokens=max_tokens, temperature=temperature)
        self._controls: dict[str, float] = {}
        """When the control question about a task was last answered, by the task's id."""

    @property
    def usage(self) -> ChatUsage:
        """What has been asked so far, where the model counts it."""
        found = getattr(self.model, "usage", None)
        return found if isinstance(found, ChatUsage) else ChatUsage()

    async def ask(
        self, messages: Sequence[Message], kind: TypeAdapter[T], judged: Sequence[Trajectory]
    ) -> T:
        """A checked verdict on these episodes, which share its cost."""
        found = await ask_json(self.model, messages, kind, self.options, attempts=self.attempts)
        self._note(found, judged)
        return found.value

    async def judged(
        self, ask: Callable[[Trajectory], Awaitable[T]], trajectory: Trajectory
    ) -> T | None:
        """What `ask` finds out about an episode; None where the episode keeps the judge from answering."""
        try:
            return await ask(trajectory)
        except BudgetExceeded:
            raise
        except ChatError as error:
            await self.check_judge(trajectory, lambda: ask(harmless(trajectory)), error)
            if not isinstance(error, UnusableReply):
                with suppress(ChatError):
                    return await ask(trajectory)
            self.note_unanswered([trajectory], error)
            return None

    async def check_judge(
        self, trajectory: Trajectory, ask: Callable[[], Awaitable[object]], error: ChatError
    ) -> None:
        """Raise `error`, which is ours, unless the judge answers a control question about the task."""
        answered = self._controls.get(trajectory.task.id)
        is_there = isinstance(error, UnusableReply)
        if is_there and answered is not None and time.monotonic() - answered < _CONTROL_SECONDS:
            return
        try:
            await ask()
        except ChatError as again:
            raise error from again
        self._controls[trajectory.task.id] = time.monotonic()

    def note_unanswered(self, judged: Sequence[Trajectory], error: ChatError) -> None:
        """These episodes keep the judge from answering."""
        for trajectory in judged:
            trajectory.counts[UNANSWERED] = trajectory.counts.get(UNANSWERED, 0.0) + 1.0
            log.warning(
                "%r: attempt %d at task %s keeps the judge from answering, which a control question does not, "
                "and scores the minimum: %.300s",
                *(self.name, trajectory.attempt, trajectory.task.id, error),
            )

    def _note(self, found: JsonReply[Any], judged: Sequence[Trajectory]) -> None:
        counted = {
            "judge/calls": len(found.asked),
            "judge/tokens": sum(one.prompt_tokens + one.completion_tokens for one in found.asked),
            "judge/money": sum(one.money for one in found.asked),
        }
        for trajectory in judged:
            for name, value in counted.items():
                trajectory.counts[name] = trajectory.counts.get(name, 0.0) + value / len(judged)

    def state_dict(self) -> dict[str, Any]:
        """What was spent, so that a budget holds for the whole run and not from one resume to the next."""
        return {"usage": self.usage.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """What was spent stays spent: an evaluation that puts back other memories does not give it back."""
        self.usage.raise_to(state.get("usage") or {})


def harmless(trajectory: Trajectory) -> Trajectory:
    """An attempt at the same task that no judge can stumble over: as many turns, and an image where any was.

    Its text is new each time: what a cache remembers does not show that the judge answers now.
    """
    asked = trajectory.task.messages
    text = f"I do not know. ({secrets.token_hex(4)})"
    media = (blank_image(),) if any(message.media for message in trajectory.messages) else ()
    turns = sum(message.role == "assistant" for message in trajectory.messages[len(asked) :])
    messages = [*asked, *[Message("assistant", text, media=media)] * max(1, turns)]
    return replace(trajectory, messages=messages, answer=text, stop=StopReason.ANSWERED)


def blank_image(side: int = 64) -> Media:
    """A white PNG."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)
    pixels = zlib.compress((b"\0" + b"\xff" * side) * side)
    parts = (chunk(b"IHDR", header), chunk(b"IDAT", pixels), chunk(b"IEND", b""))
    data = b"\x89PNG\r\n\x1a\n" + b"".join(parts)
    return Media("image", sha256(data).hexdigest(), data)


def listed(lines: Iterable[str]) -> str:
    """Lines of a list."""
    return "\n".join(f"- {line}" for line in lines)
