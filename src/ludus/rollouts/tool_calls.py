"""The tool calls of one episode: run at once within its budgets, timed, audited, and paid."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

from ludus.core.failures import Fault, InfraError
from ludus.core.messages import ToolCall, ToolContext, ToolResult, ToolSet, ToolSpec
from ludus.core.trajectory import Audit, AuditRecord, Trajectory, legality_of, spans_of
from ludus.remote.limits import recorded_wait, run_all
from ludus.remote.threads import run_sync
from ludus.rollouts.recorder import Budgets
from ludus.tools import OutputLimits, changed_tools, tools_changed

_LONG_RESULT = 4_000
"""Characters from which a result is cut in a thread."""

StepRewards = Literal["sum", "max", "last"]
"""An episode's reward from its calls: the sum of their rewards, the highest, or the last one."""


class ToolCalls:
    """Runs an episode's calls, and notes on its actions what came of them."""

    def __init__(
        self,
        trajectory: Trajectory,
        tools: ToolSet,
        specs: Sequence[ToolSpec],
        context: ToolContext,
        *,
        budgets: Budgets,
        encode: Callable[[str], list[int]],
        step_rewards: StepRewards,
        audit: Audit | None,
    ) -> None:
        self.specs = list(specs)
        """The tools in the model's context; another list once tools have come or gone."""
        self._trajectory = trajectory
        self._tools = tools
        self._context = context
        self._budgets = budgets
        self._encode = encode
        self._step_rewards = step_rewards
        self._audit = audit
        self._level: float | None = None
        """The highest or the last reward of a call so far."""

    async def run(self, calls: Sequence[ToolCall]) -> list[tuple[ToolCall, ToolResult]]:
        """Run these calls concurrently; each comes back with its result, the model's mistakes included."""
        started = time.perf_counter()
        allowed, refused = calls[: self._budgets.max_calls], calls[self._budgets.max_calls :]
        ran: list[tuple[float, float]] = []
        try:
            with recorded_wait() as queued:
                results = await run_all([self._run_one(call, ran) for call in allowed])
                queued(time.perf_counter() - started - covered(ran))
        finally:
            self._trajectory.seconds["tools"] += time.perf_counter() - started
        refusal = ToolResult(
            f"not run: one turn may hold at most {self._budgets.max_calls} calls", fault=Fault.LIMIT
        )
        for call in refused:
            self._note(call, refusal, 0.0, was_run=False)
        truncated = [await self._truncated(result) for result in results]
        if truncated and (notice := await self._changed_tools()):
            truncated[-1] = replace(truncated[-1], content=f"{truncated[-1].content}\n\n{notice}")
        return [*zip(allowed, truncated, strict=True), *((call, refusal) for call in refused)]

    async def _run_one(self, call: ToolCall, times: list[tuple[float, float]]) -> ToolResult:
        """One call, and its line in the audit log; adds to `times` from when to when it ran."""
        started = time.perf_counter()
        try:
            result = await self._tools.call(call, self._context)
        except InfraError as failure:
            self._note(call, None, time.perf_counter() - started, failure=str(failure))
            raise
        except asyncio.CancelledError:
            self._note(call, None, time.perf_counter() - started, failure="cancelled")
            raise
        seconds = time.perf_counter() - started
        ran = result.seconds or seconds  # tools that do not say are taken to have run all the time
        turn, queued = self._trajectory.turns - 1, max(0.0, seconds - ran)
        times.append((started + queued, started + seconds))
        self._trajectory.spans += spans_of("tool", started, seconds, queued, turn, call.name)
        self._note(call, result, seconds)
        return result

    def _note(
        self,
        call: ToolCall,
        result: ToolResult | None,
        seconds: float,
        *,
        failure: str | None = None,
        was_run: bool = True,
    ) -> None:
        if self._audit is None:
            return
        fault = result.fault if result is not None else None
        record = AuditRecord(
            episode=self._context.episode,
            task=self._trajectory.task.id,
            attempt=self._trajectory.attempt,
            turn=self._trajectory.turns,
            call=call.id,
            tool=call.name,
            arguments=call.arguments,
            offered=tuple(spec.name for spec in self.specs),
            legality=legality_of(fault, was_run=was_run),
            seconds=seconds,
            fault=fault,
            failure=failure,
            chars=len(result.content) if result is not None else 0,
            media=len(result.media) if result is not None else 0,
        )
        self._audit(record)

    async def _truncated(self, result: ToolResult) -> ToolResult:
        """The result, cut to its budget of tokens; a long one in a thread, since that takes a while."""
        limits = self._limits(result.content)
        if len(result.content) <= _LONG_RESULT:
            content = limits.apply(result.content)
        else:
            content = await run_sync(limits.apply, result.content)
        return result if content == result.content else replace(result, content=content)

    async def _changed_tools(self) -> str:
        """Message to the model about tools that have come or gone; the prompt, which it has read, stays."""
        if not await tools_changed(self._tools, self._context):
            return ""
        before, self.specs = self.specs, list(await self._tools.list(self._context))
        notice = changed_tools(before, self.specs)
        return self._limits(notice).apply(notice)

    def _limits(self, text: str) -> OutputLimits:
        return OutputLimits(len(text), self._budgets.max_observation_tokens, self._encode)

    def record(self, pairs: Sequence[tuple[ToolCall, ToolResult]], *, is_shared: bool) -> None:
        """Note faults and per-call rewards on the actions that made the calls.

        Of an action that a branch shares with another attempt (`is_shared`), all was noted when it was played.
        """
        actions = self._trajectory.actions
        makers = {call.id: action for action in actions for call in action.calls}
        for call, result in pairs:
            # a call that the agent made itself is attributed to the last action, if any
            action = makers.get(call.id, actions[-1] if actions else None)
            if action is None:
                continue
            gain = self._gain(result.reward) if result.reward is not None else None
            if is_shared:
                continue
            if result.fault is not None:
                action.faults = (*action.faults, result.fault)
                action.faulted = (*action.faulted, call.name)
            if gain is not None:
                action.reward = (action.reward or 0.0) + gain

    def _gain(self, reward: float) -> float:
        """What a call's reward adds to the episode's reward, which is the sum of all gains.

        An environment that reports a score rather than a step's reward counts with its highest or its last
        one; each action's gain is then the change of the score.
        """
        if self._step_rewards == "sum":
            return reward
        before, new = self._level, reward
        if before is not None and self._step_rewards == "max":
            new = max(before, reward)
        self._level = new
        return new - (before or 0.0)


def covered(times: Sequence[tuple[float, float]]) -> float:
    """How long at least one of these intervals lasted."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted(times):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total
