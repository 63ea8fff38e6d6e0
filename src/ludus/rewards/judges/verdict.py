"""What all judges share: a model, how it is asked, and what an episode's verdict cost."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, Field, TypeAdapter

from ludus.core.chat import ChatModel, ChatOptions
from ludus.core.failures import ConfigError
from ludus.core.messages import Message
from ludus.core.trajectory import Trajectory
from ludus.llm import ChatUsage, JsonReply, ask_json, load_chat_model
from ludus.rewards.scores import checked_name, checked_weight

T = TypeVar("T")
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
    """A reward that asks a model. Its verdict is checked; one that cannot be had is a failure, and no score.

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


def listed(lines: Iterable[str]) -> str:
    """Lines of a list."""
    return "\n".join(f"- {line}" for line in lines)
