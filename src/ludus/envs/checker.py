"""A checker for environments: plays one twice and reports what would bite during training."""

from __future__ import annotations

from asyncio import timeout
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from ludus.core.failures import CannotFork, ConfigError, InfraError, LudusError
from ludus.core.messages import ToolCall, ToolContext, ToolSpec
from ludus.core.task import Task
from ludus.core.user_code import error_with_location
from ludus.envs.env import Env, as_env, as_step, call_env, reset_env, takes_text
from ludus.tools import as_toolset, example_of

_SECONDS = 45.0
"""How long making, resetting or closing an instance may take here."""
_STEP_SECONDS = 20.0
"""How long an action may take here. A run has more patience (`step_timeout`), a person has less."""
_TEXT = "look"
"""A plain-text action; whatever a model says, `step` has to take it."""


class Severity(StrEnum):
    """An error breaks episodes; a warning makes them worse than they could be."""

    ERROR = "error"
    WARNING = "warning"


@dataclass(frozen=True, slots=True)
class EnvFinding:
    """One thing that is wrong, and what to do about it."""

    severity: Severity
    problem: str
    fix: str
    """Empty where the problem itself says what to do."""

    def __str__(self) -> str:
        return f"{self.severity}: {self.problem}" + (f"\n  fix: {self.fix}" if self.fix else "")


Action = str | ToolCall


async def check_env(
    factory: Callable[[], Any],
    task: Task | None,
    actions: Sequence[Action] | None = None,
    *,
    name: str = "env",
) -> list[EnvFinding]:
    """Play `actions` (texts for `step`, or tool calls) twice; an empty list means nothing was found.

    Without a task (None) it is reset with an empty one, which many cannot begin with: that is said then.
    Without actions, those that the environment offers are used: the first of `available_actions()`, or each
    tool that needs no arguments; or else calls that its tools' schemas allow, and a text where it has `step`.
    """
    check = _Check(factory, task, list(actions) if actions is not None else None, name)
    await check.run()
    return check.findings


class _Broken(Exception):
    """The check cannot go on; what was found says why."""


class _Check:
    def __init__(
        self, factory: Callable[[], Any], task: Task | None, actions: list[Action] | None, name: str
    ) -> None:
        self._factory, self._actions, self._name = factory, actions, name
        self._task, self._has_task = task or Task.of("check", id="check"), task is not None
        self._guessed: list[ToolCall] = []
        """Calls generated from schemas, which the tools may refuse."""
        self._open: list[Any] = []
        self.findings: list[EnvFinding] = []

    async def run(self) -> None:
        try:
            first = await self._make()
            seen_first = await self._reset(first)
            await self._check_tools(first)
            story = await self._play(first)
            await self._check_isolation(first, seen_first)
            await self._check_second_life(first, seen_first, story)
            await self._check_snapshot(first)
        except _Broken:
            pass  # reported where it happened
        finally:
            for env in self._open:
                await self._close(env)

    async def _make(self) -> Any:
        fix = "every episode needs an instance: a class, or a function that returns a new one without arguments"
        env = await self._try("no instance could be made", fix, self._factory)
        try:
            self._open.append(as_env(env, self._name))
        except ConfigError as error:
            self._error(str(error), fix)
            raise _Broken from error
        return env

    async def _reset(self, env: Any) -> str:
        try:
            return (await reset_env(env, self._task, self._name, timeout=_SECONDS)).text
        except ConfigError as error:
            self._reset_error(str(error), "")
        except TypeError as error:
            self._reset_error(
                f"reset is wrong: {error}", "take the task; return text, an Observation or None"
            )
        except TimeoutError as error:
            self._error(f"reset {_late(error, _SECONDS)}", _LATE_FIX)
        except Exception as error:  # noqa: BLE001 - user code
            self._reset_error(
                f"reset raised {_error_text(error)}", "make it work for every task of the task set"
            )
        raise _Broken

    def _reset_error(self, problem: str, fix: str) -> None:
        if not self._has_task:  # more likely than a mistake in reset
            problem = f"it cannot be reset with an empty task: {problem}"
            fix = "give tasks of its own: --tasks FILE.jsonl, or --tasks module:function"
        self._error(problem, fix)

    async def _check_tools(self, env: Any) -> None:
        for spec in await self._specs(env):
            if not spec.description:
                self._warn(f"the tool {spec.name!r} has no description", "write a docstring for it")
            for parameter, schema in spec.parameters.get("properties", {}).items():
                if not schema.get("description"):
                    self._warn(
                        f"the parameter {parameter!r} of the tool {spec.name!r} has no description",
                        "describe it in the docstring, under Args",
                    )

    async def _specs(self, env: Any) -> Sequence[ToolSpec]:
        tools = await self._try("tools() failed", "return a list of tools", getattr(env, "tools", list))
        try:
            return await as_toolset(tools).list(self._context(env))
        except ConfigError as error:
            self._error(f"its tools cannot be offered: {error}", "correct the tool that is named")
            raise _Broken from error

    async def _play(self, env: Any) -> list[str]:
        """Do the actions; what the agent would have seen."""
        actions = self._actions if self._actions is not None else await self._own_actions(env)
        if not actions and self._actions is None:
            self._warn("it offers nothing to do", "mark methods with @tool, or write step")
        story: list[str] = []
        for action in actions:
            if isinstance(action, ToolCall):
                seen, ended = await self._call(env, action)
            else:
                seen, ended = await self._step(env, action)
            story.append(seen)
            if ended:
                break
        return story

    async def _own_actions(self, env: Any) -> list[Action]:
        offered = getattr(env, "available_actions", None)
        texts = offered and await self._try(
            "available_actions() failed", "return a list of texts, or None", offered
        )
        if texts and takes_text(env):
            return [str(texts[0])]
        specs = await self._specs(env)
        if ready := [ToolCall(spec.name) for spec in specs if not spec.parameters.get("required")]:
            return list(ready)
        self._guessed = [ToolCall(spec.name, example_of(spec.parameters, 0)) for spec in specs]
        return [*self._guessed, *([_TEXT] if takes_text(env) else [])]

    async def _step(self, env: Any, action: str) -> tuple[str, bool]:
        raw = await self._try(
            f"step({action!r}) failed",
            "return a Step for every text",
            env.step,
            action,
            seconds=_STEP_SECONDS,
        )
        try:
            result = as_step(raw).as_result()
        except (TypeError, ValueError) as error:
            self._error(f"step returned something odd: {error}", "return a Step")
            raise _Broken from error
        return result.content, result.terminated

    async def _call(self, env: Any, call: ToolCall) -> tuple[str, bool]:
        context = self._context(env)
        try:
            tools = as_toolset(await call_env(env.tools))
            async with timeout(_STEP_SECONDS):
                result = await tools.call(call, context)
        except TimeoutError as error:
            self._error(f"the tool {call.name!r} {_late(error, _STEP_SECONDS)}", _LATE_FIX)
            raise _Broken from error
        except (InfraError, ConfigError) as error:
            self._error(
                f"the tool {call.name!r} failed: {error}", "raise ToolFault for the model's faults"
            )
            raise _Broken from error
        if result.fault is not None and call not in self._guessed:
            text = (
                f"the tool {call.name!r} answered with the fault {result.fault}: {result.content[:200]}"
            )
            self._warn(text, "if that call should have worked, correct the tool")
        return result.content, result.terminated

    async def _check_isolation(self, first: Any, seen_first: str) -> None:
        """A second instance, after the first was played, must look untouched, and not be the same."""
        second = await self._make()
        if second is first:
            self._open.pop()
            self._error("the factory returned the same object twice", "make a new one at each call")
            return
        shared = [key for key, value in _mutable_state(first) if _mutable_at(second, key) is value]
        for key in shared:
            self._warn(
                f"two instances share the object in {key!r}",
                "make it in __init__ or in reset, unless it is never changed",
            )
        if await self._reset(second) != seen_first:
            self._warn(
                "a new instance starts differently for the same task",
                "draw random numbers from the task (its id or a seed in it), so that attempts compare",
            )

    async def _check_second_life(self, env: Any, seen_first: str, story: list[str]) -> None:
        """After a reset, nothing of the episode before may be left."""
        if await self._reset(env) != seen_first:
            self._warn("a second reset for the same task starts differently", "reset all of the state")
        elif await self._play(env) != story:
            self._warn(
                "the same actions after a reset led to something else",
                "reset all of the state, and draw random numbers from the task",
            )

    async def _check_snapshot(self, env: Any) -> None:
        has_save, has_load = _is_own(env, "snapshot"), _is_own(env, "restore")
        if has_save != has_load:
            self._error("only one of snapshot and restore is there", "write both, or none")
        if not (has_save and has_load):
            return
        await self._reset(env)
        try:
            saved = await self._try("snapshot failed", "return something restore accepts", env.snapshot)
        except CannotFork:
            return  # a stand-in for one without, or a state that cannot be copied: branches are replayed then
        story = await self._play(env)
        await self._reset(env)
        await self._try("restore failed", "accept what snapshot returned", env.restore, saved)
        if await self._play(env) != story:
            self._error(
                "after restore, the same actions led to something else",
                "copy the state in snapshot (copy.deepcopy) and set all of it in restore",
            )

    async def _close(self, env: Any) -> None:
        try:
            await call_env(getattr(env, "close", Env().close), timeout=_SECONDS)
        except Exception as error:  # noqa: BLE001 - user code
            self._error(
                f"close raised {_error_text(error)}", "let close release what there is, and not fail"
            )

    async def _try(
        self,
        problem: str,
        fix: str,
        function: Callable[..., Any],
        *args: Any,
        seconds: float = _SECONDS,
    ) -> Any:
        try:
            return await call_env(function, *args, timeout=seconds)
        except CannotFork:
            raise
        except TimeoutError as error:
            self._error(f"{problem}: it {_late(error, seconds)}", _LATE_FIX)
            raise _Broken from error
        except Exception as error:
            self._error(f"{problem}: {_error_text(error)}", fix)
            raise _Broken from error

    def _context(self, env: Any) -> ToolContext:
        return ToolContext("check", self._task, {self._name: env})

    def _error(self, problem: str, fix: str) -> None:
        self._add(EnvFinding(Severity.ERROR, problem, fix))

    def _warn(self, problem: str, fix: str) -> None:
        self._add(EnvFinding(Severity.WARNING, problem, fix))

    def _add(self, finding: EnvFinding) -> None:
        if finding not in self.findings:
            self.findings.append(finding)


_LATE_FIX = "let it end; a run waits as long as agent.pools.NAME says (step_timeout, reset_timeout)"


def _late(error: TimeoutError, seconds: float) -> str:
    place = getattr(error, "place", None)
    return f"did not return within {seconds:g} s" + (f": it was at {place} then" if place else "")


def _is_own(env: Any, method: str) -> bool:
    """Whether an environment has a method that is not the one that `Env` only declares."""
    found = getattr(type(env), method, None)
    return callable(getattr(env, method, None)) and found is not getattr(Env, method)


def _error_text(error: BaseException) -> str:
    return (str(error) if isinstance(error, LudusError) else error_with_location(error))[:600]


def _mutable_state(env: Any) -> list[tuple[str, Any]]:
    """Attributes that would carry one episode's changes into another: lists, dicts, sets."""
    names = dict.fromkeys([*getattr(env, "__dict__", {}), *vars(type(env))])
    found = [(name, _mutable_at(env, name)) for name in names if not name.startswith("__")]
    return [(name, value) for name, value in found if value is not None]


def _mutable_at(env: Any, name: str) -> Any:
    value = getattr(env, "__dict__", {}).get(name, vars(type(env)).get(name))
    return value if isinstance(value, (list, dict, set, bytearray)) else None
