"""What tests of synthesis share: safes that are opened by a script, and language models that answer by one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ludus.chat import Renderer, load_format
from ludus.core import ByteTokenizer, Message, Task, ToolCall, Trajectory
from ludus.core.generation import ChatOptions, ChatReply
from ludus.engine import FakeEngine
from ludus.envs import EnvPool
from ludus.rewards import Scorer
from ludus.rollouts import Budgets, Rollout
from ludus.synth import SynthContext, SynthFolder
from ludus.tools import as_toolset
from ludus.worlds.safe import Safe, found, opened

HERMES = load_format("hermes")
Action = str | ToolCall | tuple[str, ToolCall]
Plan = Callable[[str, int], Sequence[Action]]
"""What is done at (task, attempt), turn by turn."""


def turn(dial: str, to: int, thought: str = "I turn it.") -> Action:
    return thought, ToolCall("turn", {"dial": dial, "to": to})


def open_door(thought: str = "All three have clicked.") -> Action:
    return thought, ToolCall("open", {})


def written(action: Action) -> str:
    """An action as the model writes it."""
    if isinstance(action, str):
        return action
    thought, call = action if isinstance(action, tuple) else ("", action)
    return HERMES.render_action(thought, [call])


def scripted(plan: Plan) -> Callable[..., str]:
    """What an engine says: the plan of the episode that asks, turn by turn."""
    turns: defaultdict[str, int] = defaultdict(int)

    def script(tokens: list[int], sampling: Any, session: str | None) -> str:
        assert session is not None
        _, task, attempt, _ = session.rsplit("/", 3)
        number = turns[session]
        turns[session] += 1
        return written(plan(task, int(attempt))[number])

    return script


def safe_task(name: str, combination: Sequence[int] = (1, 2, 3), **metadata: Any) -> Task:
    envs = {"safe": {"combination": list(combination)}}
    return Task.of("Open the safe.", id=name, envs=envs, metadata=metadata)


def rollout(plan: Plan, **settings: Any) -> Rollout:
    """A rollout on safes, which a script opens."""
    renderer = Renderer(ByteTokenizer(), HERMES)
    return Rollout(
        engine=FakeEngine(scripted(plan), renderer.tokenizer),
        renderer=renderer,
        scorer=Scorer([opened, found]),
        tools=as_toolset(()),
        pools={"safe": EnvPool(Safe, name="safe")},
        budgets=Budgets.parse({"max_turns": 14, "max_turn_tokens": 300, "max_tokens": 20_000}),
        **settings,
    )


@dataclass
class Source:
    """Tasks, and what plays them."""

    tasks: Sequence[Task]
    rollout: Rollout
    held_out: Sequence[Task] = ()
    name: str = "tasks"


@dataclass
class ScriptedChat:
    """A language model that answers by a function of what it is asked, and remembers it."""

    answer: Callable[[str], str]
    name: str = "scripted"
    asked: list[str] = field(default_factory=list)
    options: list[ChatOptions] = field(default_factory=list)

    async def chat(self, messages: Sequence[Message], options: ChatOptions = ChatOptions()) -> ChatReply:  # noqa: B008
        text = "\n".join(f"{message.role}: {message.content}" for message in messages)
        self.asked.append(text)
        self.options.append(options)
        return ChatReply(self.answer(text), prompt_tokens=len(text), completion_tokens=7)

    async def close(self) -> None:
        """Nothing to release."""


def context(
    folder: Path, *sources: Source, models: dict[str, ScriptedChat] | None = None
) -> SynthContext:
    known = models or {}

    async def open_model(spec: Any) -> ScriptedChat:
        return known[spec]

    return SynthContext(sources, SynthFolder(folder, {"format": 1}), open_model=open_model)


def attempts(trajectories: Sequence[Trajectory]) -> list[tuple[str, int]]:
    return [(one.task.id, one.attempt) for one in trajectories]
