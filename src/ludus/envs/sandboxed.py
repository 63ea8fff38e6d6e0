"""An environment whose rules are untrusted Python in a folder: they run in a sandbox session per episode.

`ludus synth astra` writes such folders. `world.json` says which tools there are (a `WorldSpec`); `world.py` has
the rules, as functions over a state that JSON can hold::

    def reset(seed): ...                  # a new state
    def task(state, seed): ...            # {"prompt": ..., "goal": ...}
    def TOOL(state, **arguments): ...     # changes the state; returns what the agent reads
    def check(state, goal, answer): ...   # whether the goal has been reached
    def solve(state, goal): ...           # [{"tool": ..., "arguments": {...}}, ..., {"answer": ...}]

Nothing of it is ever imported here: the tools' schemas are data, and what comes out of the session is checked.
A `ValueError` of a tool is the model's mistake; anything else that goes wrong in there is a failure of the
environment.
"""

from __future__ import annotations

import ast
import inspect
import json
import keyword
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from ludus.core.failures import Boundary, ConfigError, InfraError, ToolFault
from ludus.core.messages import Json, ToolCall
from ludus.core.task import Task
from ludus.core.trajectory import Trajectory
from ludus.envs.env import Env
from ludus.envs.world import ExpertMoves
from ludus.rewards import reward
from ludus.sandbox import Limits, Session, SessionEnded, shared_sandbox
from ludus.tools import FunctionTool
from ludus.tools.calling import text_of

_LIMITS = Limits(wall_seconds=5.0, cpu_seconds=60.0, memory_mb=256, processes=8, disk_mb=16)
_MOST_STATE = 40_000
"""Characters of JSON that a state or an answer of the rules may have."""
_OWN = frozenset({"reset", "task", "check", "solve"})
FUNCTIONS = tuple(sorted(_OWN))
_DRIVER = """
import copy as _copy, json as _json
_world = {"__name__": "world"}
_state, _goal = {}, None
def _ludus(what, *given):
    global _state, _goal
    try:
        if what == "reset":
            _state = _json.loads(_json.dumps(_world["reset"](*given)))
            answer = _state
        elif what == "task":
            answer = _world["task"](_copy.deepcopy(_state), *given)
        elif what == "begin":
            _goal = given[0]
            answer = None
        elif what == "set":
            _state, answer = given[0], None
        elif what == "get":
            answer = _state
        elif what == "call":
            answer = _world[given[0]](_state, **given[1])
        elif what == "check":
            answer = _world["check"](_copy.deepcopy(_state), _copy.deepcopy(_goal), given[0])
        else:
            answer = _world["solve"](_copy.deepcopy(_state), _copy.deepcopy(_goal))
        return _json.dumps({"value": answer})
    except ValueError as error:
        return _json.dumps({"refused": str(error)[:500]})
    except Exception as error:
        return _json.dumps({"raised": type(error).__name__ + ": " + str(error)[:500]})
"""


def _no_keyword(name: str) -> str:
    if keyword.iskeyword(name):
        raise ValueError(f"{name!r} is a word of Python's: choose another name")
    return name


_Name = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,40}$"), AfterValidator(_no_keyword)]
"""Names that a language model may choose: a key of recipes, and functions of the rules."""


class WorldParameter(BaseModel):
    """Something that a tool takes."""

    model_config = ConfigDict(extra="forbid")

    name: _Name
    type: Literal["string", "integer", "number", "boolean", "list"] = "string"
    description: str = Field(min_length=1)
    choices: list[str] | None = None
    required: bool = True


class WorldTool(BaseModel):
    """A tool; its function in the rules has the same name."""

    model_config = ConfigDict(extra="forbid")

    name: _Name
    description: str = Field(min_length=1)
    parameters: list[WorldParameter] = []

    @model_validator(mode="after")
    def _distinct(self) -> Self:
        names = [one.name for one in self.parameters]
        if len(set(names)) < len(names):
            raise ValueError(f"the tool {self.name!r} has two parameters of one name")
        if self.name in _OWN or "state" in names:
            raise ValueError(
                f"the tool {self.name!r}: {', '.join(FUNCTIONS)} and state are names of the rules"
            )
        return self


class WorldSpec(BaseModel):
    """Name and tools of an environment."""

    model_config = ConfigDict(extra="forbid")

    name: _Name
    description: str = Field(min_length=1)
    tools: list[WorldTool] = Field(min_length=1, max_length=32)

    @model_validator(mode="after")
    def _distinct(self) -> Self:
        names = [one.name for one in self.tools]
        if len(set(names)) < len(names):
            raise ValueError("two tools have one name")
        return self


class RulesBroken(InfraError):
    """The rules of an environment raised, hung, ended their session or answered with something else."""

    def __init__(self, message: str) -> None:
        super().__init__(Boundary.ENV, message, retriable=False, replay=False, kind="RulesBroken")


class WorldSession:
    """The rules of one environment, in a sandbox session of their own."""

    def __init__(self, session: Session) -> None:
        self._session = session

    @classmethod
    async def start(cls, rules: str) -> WorldSession:
        """Run the rules' module; `RulesBroken` says why it cannot be."""
        session = await shared_sandbox().session(limits=_LIMITS)
        made = cls(session)
        try:
            program = f"exec(compile({rules!r}, 'world.py', 'exec'), _world)"
            for code in (_DRIVER, program):
                done = await session.python(code)
                if not done.ok:
                    raise RulesBroken(f"world.py cannot be run: {done.text()[-500:]}")
        except SessionEnded as error:
            await made.close()
            raise RulesBroken(f"world.py ended its session: {error}") from error
        except BaseException:
            await made.close()
            raise
        return made

    async def close(self) -> None:
        await self._session.close()

    async def reset(self, seed: int) -> Json:
        """A new state."""
        state = await self._ask("reset", seed)
        if not isinstance(state, dict):
            raise RulesBroken(f"reset returned {type(state).__name__}, not a dictionary")
        return state

    async def task(self, seed: int) -> tuple[str, Any]:
        """A prompt and a goal for the state."""
        made = await self._ask("task", seed)
        prompt = made.get("prompt") if isinstance(made, dict) else None
        if not isinstance(prompt, str) or not prompt.strip() or "goal" not in made:
            raise RulesBroken(f'task returned {made!r:.100}, not {{"prompt": text, "goal": ...}}')
        return prompt, made["goal"]

    async def begin(self, goal: Any) -> None:
        """Take a goal to check against."""
        await self._ask("begin", goal)

    async def call(self, tool: str, arguments: Json) -> Any:
        """Call a tool; `ToolFault` where it refuses."""
        return await self._ask("call", tool, arguments)

    async def check(self, answer: str) -> bool:
        """Whether the goal has been reached."""
        verdict = await self._ask("check", answer)
        if not isinstance(verdict, bool):
            raise RulesBroken(f"check returned {verdict!r:.80}, not True or False")
        return verdict

    async def solve(self) -> list[Json]:
        """The calls that reach the goal from here, the last entry perhaps an answer."""
        plan = await self._ask("solve")
        if not isinstance(plan, list) or not all(isinstance(one, dict) for one in plan):
            raise RulesBroken(f"solve returned {plan!r:.100}, not a list of calls")
        return plan

    async def state(self) -> Any:
        return await self._ask("get")

    async def set_state(self, state: Any) -> None:
        await self._ask("set", state)

    async def _ask(self, what: str, *given: Any) -> Any:
        arguments = json.dumps([what, *given])
        try:
            done = await self._session.python(f"_ludus(*_json.loads({arguments!r}))")
        except SessionEnded as error:
            raise RulesBroken(f"{what}: the rules ended their session: {error}") from error
        if not done.ok or done.value is None:
            raise RulesBroken(f"{_called(what, given)}: {(done.text() or done.outcome)[-500:]}")
        answer = _answer(done.value, _called(what, given))
        if "refused" in answer and what == "call":
            raise ToolFault(str(answer["refused"]) or "refused")
        if "value" not in answer:
            problem = answer.get("raised") or f"ValueError: {answer.get('refused')}"
            raise RulesBroken(f"{_called(what, given)} raised {problem}")
        return answer["value"]


def _called(what: str, given: Sequence[Any]) -> str:
    return str(given[0]) if what == "call" else what


def _answer(value: str, what: str) -> Json:
    """Decode the session's output: the `repr` of JSON text, from code that may say anything."""
    try:
        text = ast.literal_eval(value)
        answer = json.loads(text) if isinstance(text, str) and len(text) <= _MOST_STATE else None
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        answer = None
    if not isinstance(answer, dict):
        raise RulesBroken(f"{what}: the answer is no JSON of at most {_MOST_STATE:,} characters")
    return answer


class SandboxedWorld(Env):
    """The environment of a folder. Subclass it with `folder` set, or give the folder."""

    folder: ClassVar[Path | str | None] = None
    deterministic = True

    def __init__(self, folder: Path | str | None = None) -> None:
        place = folder or self.folder
        if place is None:
            raise ConfigError("a SandboxedWorld needs the folder with its world.json and world.py")
        self.spec, self._rules = read_world(Path(place))
        self._world: WorldSession | None = None

    async def reset(self, task: Task, seed: int = 0) -> None:
        await self.close()
        world = self._world = await WorldSession.start(self._rules)
        await world.reset(seed)
        await world.begin(task.target)

    @property
    def world(self) -> WorldSession:
        if self._world is None:
            raise InfraError(Boundary.ENV, "the environment is used before its reset")
        return self._world

    def tools(self) -> list[FunctionTool[..., Any]]:
        return [_tool(self, one) for one in self.spec.tools]

    async def is_solved(self, answer: str) -> bool:
        """Whether the goal has been reached."""
        return await self.world.check(answer)

    async def snapshot(self) -> Any:
        return await self.world.state()

    async def restore(self, state: Any) -> None:
        await self.world.set_state(state)

    async def close(self) -> None:
        world, self._world = self._world, None
        if world is not None:
            await world.close()


def read_world(folder: Path) -> tuple[WorldSpec, str]:
    """Read an environment's folder: its spec, and the source of its rules."""
    try:
        spec = WorldSpec.model_validate_json((folder / "world.json").read_text())
        return spec, (folder / "world.py").read_text()
    except FileNotFoundError as error:
        raise ConfigError(f"{folder} is no folder of an environment: {error}") from None
    except ValidationError as error:
        raise ConfigError(f"{folder / 'world.json'}: {error}") from None


_TYPES: dict[str, Any] = {
    "string": str,
    "integer": int,
    "number": float,
    "boolean": bool,
    "list": list[str],
}


def _tool(env: SandboxedWorld, spec: WorldTool) -> FunctionTool[..., Any]:
    """A tool with the signature that the spec describes; it runs in the session."""

    async def run(**arguments: Any) -> str:
        return text_of(await env.world.call(spec.name, arguments))

    ordered = sorted(spec.parameters, key=lambda one: not one.required)
    parameters = [
        inspect.Parameter(
            one.name,
            inspect.Parameter.KEYWORD_ONLY,
            annotation=_hint(one),
            default=inspect.Parameter.empty if one.required else None,
        )
        for one in ordered
    ]
    lines = [f"    {one.name}: {' '.join(one.description.split())}" for one in ordered]
    described: Any = run
    described.__signature__ = inspect.Signature(parameters)
    described.__doc__ = "\n".join([spec.description, "", *(["Args:", *lines] if lines else [])])
    return FunctionTool(run, {"name": spec.name, "on_error": "failure"})


def _hint(one: WorldParameter) -> Any:
    kind = _TYPES[one.type]
    if one.choices:
        kind = Literal[tuple(one.choices)]
    return kind if one.required else kind | None


@reward(name="success")
async def solved(trajectory: Trajectory, env: SandboxedWorld) -> float:
    """1 when the environment's own check says that the goal has been reached."""
    return float(await env.is_solved(trajectory.answer or ""))


def recorded_solution(task: Task) -> ExpertMoves:
    """A demonstrator: makes the calls that `solve` has planned when the task was made."""
    answer = "Done."
    for step in task.metadata.get("solution", ()):
        if "tool" in step:
            yield ToolCall(str(step["tool"]), dict(step.get("arguments") or {}))
        elif "answer" in step:
            answer = str(step["answer"])
    yield answer


def world_factory(folder: Path) -> Any:
    """Makes environments of a folder."""
    return partial(SandboxedWorld, folder)
