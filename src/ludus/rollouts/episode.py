"""One episode as an agent sees it: generate, call, observe, answer.

Behind these four methods the episode keeps the exact tokens. New messages are pending until the next
`generate`, which renders them on their own, appends them as an observation, and asks the engine to
continue. An action's tokens are appended as sampled. The engine is always given the concatenation of the
segments recorded so far, so the record cannot differ from what the model read.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

from pydantic import Field

from ludus.core.audit import Audit, AuditRecord, legality_of
from ludus.core.concurrency import run_sync
from ludus.core.config import Config
from ludus.core.failures import Aborted, ConfigError, Fault, InfraError
from ludus.core.generation import Completion, Engine, FinishReason, Sampling
from ludus.core.messages import (
    Media,
    Message,
    ToolCall,
    ToolContext,
    ToolResult,
    ToolSet,
    ToolSpec,
)
from ludus.core.pictures import PictureError
from ludus.core.random import key
from ludus.core.task import Task
from ludus.core.trajectory import (
    EnvRender,
    Segment,
    SegmentKind,
    StopReason,
    TimeSpan,
    TokenSequence,
    Trajectory,
)
from ludus.envs.world import ExpertMoves, next_move
from ludus.rollouts.branching import EpisodeRecord, check_results
from ludus.rollouts.message_tree import MessageTree, TurnLimits
from ludus.rollouts.renderer import Renderer, warn_of_unseen
from ludus.tools import OutputLimits, changed_tools, tools_changed

log = logging.getLogger(__name__)

_LONG_RESULT = 4_000
"""Characters from which a result is cut in a thread."""

_SHORTEST_WAIT = 1e-3
"""Seconds from which a wait is told apart from what was waited for."""

StepRewards = Literal["sum", "max", "last"]
"""An episode's reward from its calls: the sum of their rewards, the highest, or the last one."""


class Budgets(Config):
    """Limits on one episode."""

    max_turns: int = Field(default=8, ge=1)
    """Actions the model may take."""
    max_turn_tokens: int = Field(default=512, ge=1)
    """Tokens of one action; an action cut here that holds no complete call ends the episode."""
    max_observation_tokens: int = Field(default=1024, ge=16)
    """Tokens of one tool result; a longer one is cut in the middle, and says so."""
    max_tokens: int = Field(default=8192, ge=2)
    """Tokens of the whole episode, the prompt included."""
    max_calls: int = Field(default=16, ge=1)
    """Tool calls in one action; those beyond are refused with an observation."""
    max_seconds: float = Field(default=600.0, gt=0)
    """Seconds of wall time. An episode over it is an infrastructure failure, not the model's fault."""
    remind: bool = False
    """Whether each observation ends with how many turns are left."""

    def reminder(self, turns_taken: int) -> str:
        """The text that tells the model how many turns are left."""
        left = self.max_turns - turns_taken
        return f"[{left} turn{'' if left == 1 else 's'} left]"


RenderEnvs = Callable[[int], Awaitable[list[EnvRender]]]
"""What the episode's environments look like before this turn."""


class EpisodeOver(Exception):
    """Raised by `generate` when the episode is over; ends the agent's loop, and is no error."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One action as an agent reads it."""

    text: str
    calls: tuple[ToolCall, ...]
    answer: str
    """The final answer when there are no calls."""
    finish: FinishReason


class Episode:
    """One attempt at a task."""

    def __init__(
        self,
        trajectory: Trajectory,
        *,
        engine: Engine,
        renderer: Renderer,
        tools: ToolSet,
        specs: Sequence[ToolSpec],
        context: ToolContext,
        budgets: Budgets,
        sampling: Sampling,
        opening: Sequence[Message],
        step_rewards: StepRewards = "sum",
        record: EpisodeRecord | None = None,
        audit: Audit | None = None,
        render: RenderEnvs | None = None,
    ) -> None:
        self.trajectory = trajectory
        self._render = render
        """Shows the environments to people; None where that is not recorded."""
        self.budgets = budgets
        self.context = context
        self._engine = engine
        self._unbound = renderer
        self._renderer = renderer.bound(specs)
        self._tools = tools
        self._specs = list(specs)
        self._sampling = sampling
        self._pending: list[Message] = list(opening)
        self._stop: StopReason | None = None
        self._step_rewards = step_rewards
        self._audit = audit
        self._history = record
        """What was said and called, where others may branch off; and what a branch shares."""
        self._level: float | None = None
        """The highest or the last reward of a call so far."""
        self.expert: ExpertMoves | None = None
        """Acts in the model's place: yields actions, and is sent what was observed since the last one."""
        self._turn = ""
        """The text of the assistant's turn that is still open; only inline turns stay open."""
        trajectory.seconds.update(generate=0.0, tools=0.0)

    @property
    def task(self) -> Task:
        return self.trajectory.task

    @property
    def messages(self) -> list[Message]:
        """The conversation so far, pending messages included."""
        return [*self.trajectory.messages, *self._pending]

    @property
    def specs(self) -> list[ToolSpec]:
        """The tools that the model was told of."""
        return list(self._specs)

    @property
    def over(self) -> bool:
        return self._stop is not None

    @property
    def has_ended(self) -> bool:
        """Whether it came to an end of its own, rather than being held before a turn."""
        return self._stop is not StopReason.ABORTED

    @property
    def temperature(self) -> float:
        return self._sampling.temperature

    @property
    def turns_left(self) -> int:
        return self.budgets.max_turns - self.trajectory.turns

    async def generate(self, *, max_tokens: int | None = None) -> Turn:
        """The model's next action, given everything observed so far. Raises `EpisodeOver` at the end.

        An action cut at `max_tokens`, the agent's own limit, is for the agent to handle (`turn.finish`); one
        cut at a budget, with no complete call in it, ends the episode.
        """
        self._check_turns()
        await self.note_renders()
        await self._read_pictures()
        if self.expert is not None:
            return await self._expert_turn(self.expert)
        if self._history is not None:
            recorded = await self._history.next_turn(self.trajectory.turns)
            if recorded is not None:
                return self._act_again(recorded, self._history)
        self._append_pending()
        if self._history is not None and self._history.hold == self.trajectory.turns:
            self._end(StopReason.ABORTED)
        context = self._sequence.tokens
        room = self.budgets.max_tokens - len(context)
        budget = min(room, self.budgets.max_turn_tokens)
        limit = budget if max_tokens is None else min(budget, max_tokens)
        sampling = replace(
            self._sampling,
            max_tokens=limit,
            stop=(*self._sampling.stop, *self._renderer.format.stops),
            stop_tokens=(*self._sampling.stop_tokens, *self._renderer.tokenizer.stop_tokens),
            seed=key(self.trajectory.seed, self.trajectory.turns),
        )
        started = time.perf_counter()
        completion = await self._engine.generate(
            context, sampling, session=self.context.episode, media=self._sequence.media
        )
        seconds = time.perf_counter() - started
        self._add_span("generate", started, seconds, completion.queued_seconds)
        self.trajectory.seconds["generate"] += seconds
        turn = self._act(completion, seconds, may_be_cut=limit < budget)
        if self._history is not None:
            self._history.turns.append(turn)
        return turn

    async def _read_pictures(self) -> None:
        """Decode the pictures of pending messages, in a thread; one that cannot be read is told in words.

        A model that reads text only is shown none: they are counted, so that nobody trains blind unknowingly.
        """
        if not any(message.media for message in self._pending):
            return
        images = self._renderer.images
        if images is None:
            self._count_unseen(sum(len(message.media) for message in self._pending))
            return
        for place, message in enumerate(self._pending):
            kept: list[Media] = []
            problems: list[str] = []
            for media in message.media:
                try:
                    if media.is_image:
                        await run_sync(images.tokens, media)
                    else:
                        self._count_unseen(1)
                except PictureError as error:
                    if not self.trajectory.messages:  # it is the task's own, and nobody's action
                        raise ConfigError(f"task {self.task.id}: {error}") from None
                    problems.append(f"[image not shown: {error}]")
                    self._count_unseen(1)
                else:
                    kept.append(media)
            if problems:
                text = "\n".join([message.content, *problems])
                self._pending[place] = replace(message, content=text, media=tuple(kept))

    def _count_unseen(self, count: int) -> None:
        counts = self.trajectory.counts
        counts[UNSEEN_IMAGES] = counts.get(UNSEEN_IMAGES, 0.0) + count
        warn_of_unseen()

    async def note_renders(self) -> None:
        """Record what the environments look like now, where that is asked for."""
        if self._render is not None:
            self.trajectory.renders += await self._render(self.trajectory.turns)

    def _act_again(self, turn: Turn, history: EpisodeRecord) -> Turn:
        """An action that a branch shares with the attempt that it branched off."""
        self._append_pending()
        history.turns.append(turn)
        self._turn += turn.text
        self._sequence.segments.append(history.action(len(self._sequence.segments)))
        self.trajectory.messages.append(Message("assistant", turn.text, turn.calls))
        return turn

    def demonstrate(self, content: str = "", calls: Sequence[ToolCall] = ()) -> Turn:
        """An action that an expert takes in the model's place: recorded like the model's own.

        Its log-probabilities are 0, because it was not sampled: such an episode is for imitation.
        """
        self._check_turns()
        self._append_pending()
        written = self._renderer.format.render_action(content, calls)
        tokens = self._renderer.action_tokens(written, self._turn)
        ended = self._renderer.turns == "chat" or tokens[-1:] == [self._renderer.end_of_turn]
        finish = FinishReason.STOP_TOKEN if ended else FinishReason.STOP_STRING
        return self._act(Completion(tokens, [0.0] * len(tokens), finish), 0.0)

    async def _expert_turn(self, expert: ExpertMoves) -> Turn:
        observed = "\n".join(message.content for message in self._pending)
        # in a thread: a planner may think for seconds
        move = await run_sync(next_move, expert, observed)
        if move is None:
            raise EpisodeOver
        if isinstance(move, str):
            return self.demonstrate(move)
        turn = self.demonstrate(calls=[move])
        if not turn.calls:
            raise ConfigError(
                f"the expert calls {move.name!r}, which the action format has no way to write; choose "
                "another format, or tell it about that tool"
            )
        return turn

    def _act(self, completion: Completion, seconds: float, *, may_be_cut: bool = False) -> Turn:
        """Append an action's tokens as they were sampled, and parse them."""
        text = self._renderer.text_of(completion, continues_turn=bool(self._turn))
        self._turn += text
        parsed = self._renderer.format.parse(text)
        calls = tuple(
            replace(call, id=call.id or self._call_id(i)) for i, call in enumerate(parsed.calls)
        )
        self._sequence.segments.append(
            Segment(
                SegmentKind.ACTION,
                tokens=list(completion.tokens),
                logprobs=list(completion.logprobs),
                versions=completion.versions,
                finish=completion.finish,
                calls=calls,
                seconds=seconds,
            )
        )
        self.trajectory.messages.append(Message("assistant", text, calls))
        if completion.finish is FinishReason.ABORTED:
            raise Aborted("the engine aborted the request")
        is_cut = completion.finish is FinishReason.LENGTH and not may_be_cut
        if is_cut and all(call.fault is not None for call in calls):
            self._end(StopReason.MAX_TOKENS)  # the rest of the action is unknown
        answer = parsed.answer if parsed.answer is not None else text
        return Turn(text, calls, answer, completion.finish)

    def conversations(self) -> MessageTree:
        """For an agent outside Ludus, whose requests are whole conversations: what it says is recorded there.

        Such an agent calls tools of its own, and begins its conversations itself: `messages` are not shown.
        """
        self._pending.clear()
        budgets = self.budgets
        return MessageTree(
            self.trajectory,
            engine=self._engine,
            renderer=self._unbound,
            limits=TurnLimits(budgets.max_turns, budgets.max_turn_tokens, budgets.max_tokens),
            sampling=self._sampling,
            session=self.context.episode,
        )

    async def call(self, calls: Sequence[ToolCall]) -> list[tuple[ToolCall, ToolResult]]:
        """Run these calls concurrently; each comes back with its result, the model's mistakes included."""
        if self._history is None:
            return await self._call(calls)
        place, recorded = self._history.next_calls(calls)
        if recorded is None or not self._history.is_restored:
            found = await self._call(calls)
            if recorded is not None:
                check_results(recorded, found)
            recorded = found
        self._history.calls[place] = recorded
        return recorded

    async def _call(self, calls: Sequence[ToolCall]) -> list[tuple[ToolCall, ToolResult]]:
        started = time.perf_counter()
        allowed, refused = calls[: self.budgets.max_calls], calls[self.budgets.max_calls :]
        try:
            results = await _gather([self._one_call(call) for call in allowed])
        finally:
            self.trajectory.seconds["tools"] += time.perf_counter() - started
        refusal = ToolResult(
            f"not run: one turn may hold at most {self.budgets.max_calls} calls", fault=Fault.LIMIT
        )
        for call in refused:
            self._note(call, refusal, 0.0, was_run=False)
        truncated = [await self._truncated(result) for result in results]
        if truncated and (notice := await self._changed_tools()):
            truncated[-1] = replace(truncated[-1], content=f"{truncated[-1].content}\n\n{notice}")
        return [*zip(allowed, truncated, strict=True), *((call, refusal) for call in refused)]

    async def _one_call(self, call: ToolCall) -> ToolResult:
        """One call, and its line in the audit log."""
        started = time.perf_counter()
        try:
            result = await self._tools.call(call, self.context)
        except InfraError as failure:
            self._note(call, None, time.perf_counter() - started, failure=str(failure))
            raise
        except asyncio.CancelledError:
            self._note(call, None, time.perf_counter() - started, failure="cancelled")
            raise
        seconds = time.perf_counter() - started
        ran = result.seconds or seconds  # tools that do not say are taken to have run all the time
        self._add_span("tool", started, seconds, max(0.0, seconds - ran), call.name)
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
            episode=self.context.episode,
            task=self.task.id,
            attempt=self.trajectory.attempt,
            turn=self.trajectory.turns,
            call=call.id,
            tool=call.name,
            arguments=call.arguments,
            offered=tuple(spec.name for spec in self._specs),
            legality=legality_of(fault, was_run=was_run),
            seconds=seconds,
            fault=fault,
            failure=failure,
            chars=len(result.content) if result is not None else 0,
            media=len(result.media) if result is not None else 0,
        )
        self._audit(record)

    async def _changed_tools(self) -> str:
        """What to tell the model of tools that have come or gone; the prompt, which it has read, stays."""
        if not await tools_changed(self._tools, self.context):
            return ""
        before, self._specs = self._specs, list(await self._tools.list(self.context))
        notice = changed_tools(before, self._specs)
        if notice:
            self._renderer = self._unbound.bound(self._specs)
        limit, encode = self.budgets.max_observation_tokens, self._renderer.tokenizer.encode_text
        return OutputLimits(len(notice), limit, encode).apply(notice)

    def _add_span(
        self,
        kind: Literal["generate", "tool"],
        started: float,
        seconds: float,
        queued: float,
        name: str = "",
    ) -> None:
        """Add to the waterfall: what was waited for, and what was done."""
        spans, turn = self.trajectory.spans, self.trajectory.turns - (kind == "tool")
        queued = queued if queued >= _SHORTEST_WAIT else 0.0
        if queued:
            spans.append(TimeSpan("queue", started, queued, name, turn))
        spans.append(TimeSpan(kind, started + queued, seconds - queued, name, turn))

    def observe(self, what: str | Message | Sequence[tuple[ToolCall, ToolResult]]) -> None:
        """Show the model this before its next action: results of `call`, a message, or a text."""
        if isinstance(what, str):
            self._pending.append(Message("user", what))
        elif isinstance(what, Message):
            self._pending.append(what)
        else:
            self._record(what)
            self._pending.extend(self._renderer.format.render_result(*pair) for pair in what)
            if any(result.terminated for _, result in what):
                self._stop = StopReason.TERMINATED

    def answer(self, text: str) -> None:
        """End the episode with this answer."""
        self.trajectory.answer = text
        self._stop = StopReason.ANSWERED

    def end(self, reason: StopReason) -> None:
        """End the episode for this reason."""
        self._stop = reason

    def finish(self) -> None:
        """Record how it ended. An agent that returns without an answer has terminated it."""
        self.trajectory.messages.extend(self._pending)
        self._pending.clear()
        self.trajectory.stop = self._stop or StopReason.TERMINATED

    @property
    def _sequence(self) -> TokenSequence:
        return self.trajectory.sequences[-1]

    def _call_id(self, index: int) -> str:
        return f"call_{self.trajectory.turns}_{index}"

    def _check_turns(self) -> None:
        if self._stop is not None:
            raise EpisodeOver
        if self.turns_left < 1:
            self._end(StopReason.MAX_TURNS)

    def _end(self, reason: StopReason) -> None:
        self._stop = reason
        raise EpisodeOver

    def _append_pending(self) -> None:
        """Render the pending messages, and append them: as the prompt first, as observations afterwards.

        What leaves no room for an action is not appended: the model would never read it.
        """
        new, self._pending = self._reminded(self._pending), []
        conversation = self.trajectory.messages
        if self._sequence.segments:
            step = self._renderer.next_context(self._sequence, conversation, new, self._specs)
        else:
            step = self._renderer.opening(new, self._specs)
        conversation.extend(new)
        before = 0 if step.restart else len(self._sequence)
        if before + len(step.tokens) >= self.budgets.max_tokens:
            if not self.trajectory.turns:
                _warn_of_long_prompt(self.task.id, len(step.tokens), self.budgets.max_tokens)
            self._end(StopReason.MAX_TOKENS)
        if step.restart and self._sequence.segments:
            self.trajectory.sequences.append(TokenSequence())
        if not step.continues_turn:
            self._turn = ""
        kind = SegmentKind.PROMPT if step.restart else SegmentKind.OBSERVATION
        self._sequence.segments.append(Segment(kind, step.tokens, media=step.media))
        if self._history is not None:
            self._history.share(self.trajectory)

    async def _truncated(self, result: ToolResult) -> ToolResult:
        """The result, cut to its budget of tokens; a long one in a thread, since that takes a while."""
        limit, encode = self.budgets.max_observation_tokens, self._renderer.tokenizer.encode_text
        limits = OutputLimits(len(result.content), limit, encode)
        if len(result.content) <= _LONG_RESULT:
            content = limits.apply(result.content)
        else:
            content = await run_sync(limits.apply, result.content)
        return result if content == result.content else replace(result, content=content)

    def _record(self, pairs: Sequence[tuple[ToolCall, ToolResult]]) -> None:
        """Note faults and per-call rewards on the actions that made the calls."""
        actions = self.trajectory.actions
        makers = {call.id: action for action in actions for call in action.calls}
        for call, result in pairs:
            # a call that the agent made itself is attributed to the last action, if any
            action = makers.get(call.id, actions[-1] if actions else None)
            if action is None:
                continue
            if self._history is not None and self._history.is_shared(self.trajectory.turns - 1):
                if result.reward is not None:
                    self._gain(result.reward)  # noted when it was played; the level goes on from there
                continue
            if result.fault is not None:
                action.faults = (*action.faults, result.fault)
                action.faulted = (*action.faulted, call.name)
            if result.reward is not None:
                action.reward = (action.reward or 0.0) + self._gain(result.reward)

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

    def _reminded(self, new: list[Message]) -> list[Message]:
        """The same messages, the last one ending with how many turns are left, where that is asked for."""
        if not (self.budgets.remind and new):
            return new
        text = f"{new[-1].content}\n{self.budgets.reminder(self.trajectory.turns)}"
        return [*new[:-1], replace(new[-1], content=text)]


UNSEEN_IMAGES = "images_unseen"


@lru_cache(maxsize=1024)
def _warn_of_long_prompt(task: str, tokens: int, limit: int) -> None:
    """Once for each task: it is not the model's fault."""
    log.warning(
        "the prompt of task %s has %d tokens and budgets.max_tokens = %d, so its episodes end before the first "
        "action, and count as failed: raise the budget, or leave the task out",
        task,
        tokens,
        limit,
    )


async def _gather(running: Sequence[Coroutine[Any, Any, ToolResult]]) -> list[ToolResult]:
    """The results of all; when one fails, or the caller is cancelled, all the others are stopped first."""
    pending = [asyncio.ensure_future(one) for one in running]
    try:
        # A task even for a single call: it may turn a cancellation into a result, its caller must not.
        return await asyncio.gather(*pending)
    finally:
        if not all(task.done() for task in pending):
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)
