"""One episode as an agent sees it: generate, call, observe, answer.

Behind these four methods a `Recorder` keeps the exact tokens. New messages are pending until the next
`generate`, which renders them on their own, appends them as an observation, and asks the engine to
continue. An action's tokens are appended as sampled. The engine is always given the concatenation of the
segments recorded so far, so the record cannot differ from what the model read.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from ludus.chat.renderer import Renderer, warn_of_unseen
from ludus.core.failures import Aborted, ConfigError
from ludus.core.generation import FinishReason
from ludus.core.images import ImageError
from ludus.core.messages import Media, Message, ToolCall, ToolContext, ToolResult, ToolSet, ToolSpec
from ludus.core.random import key
from ludus.core.task import Task
from ludus.core.trajectory import (
    TURN_CUT,
    Audit,
    EnvRender,
    Segment,
    SegmentKind,
    StopReason,
    TokenSequence,
)
from ludus.envs.world import ExpertMoves
from ludus.remote.threads import run_sync
from ludus.rollouts.branching import EpisodeRecord, check_results
from ludus.rollouts.message_tree import MessageTree
from ludus.rollouts.recorder import BudgetUsedUp, Recorder, Sampled, expert_move, written_action
from ludus.rollouts.tool_calls import StepRewards, ToolCalls

log = logging.getLogger(__name__)

RenderEnvs = Callable[[int], Awaitable[list[EnvRender]]]
"""Renders of the episode's environments before a turn."""


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
        recorder: Recorder,
        *,
        renderer: Renderer,
        tools: ToolSet,
        specs: Sequence[ToolSpec],
        context: ToolContext,
        opening: Sequence[Message],
        step_rewards: StepRewards = "sum",
        record: EpisodeRecord | None = None,
        audit: Audit | None = None,
        render: RenderEnvs | None = None,
        has_rewards: bool = False,
    ) -> None:
        self.trajectory = trajectory = recorder.trajectory
        self.has_rewards = has_rewards
        """Whether reward functions score it; else what tools, environments and the agent report is all."""
        self._render = render
        """Shows the environments to people; None where that is not recorded."""
        self.budgets = recorder.budgets
        self.context = context
        self._recorder = recorder
        self._unbound = renderer
        self._renderer = renderer.bound(specs)
        self._calls = ToolCalls(
            trajectory,
            tools,
            specs,
            context,
            budgets=recorder.budgets,
            encode=renderer.tokenizer.encode_text,
            step_rewards=step_rewards,
            audit=audit,
        )
        self._pending: list[Message] = list(opening)
        self._stop: StopReason | None = None
        self._history = record
        """What was said and called, where others may branch off; and what a branch shares."""
        self._turn = ""
        """The text of the assistant's turn that is still open; only inline turns stay open."""
        trajectory.seconds["tools"] = 0.0

    @property
    def task(self) -> Task:
        return self.trajectory.task

    @property
    def messages(self) -> list[Message]:
        """The conversation so far, pending messages included."""
        return [*self.trajectory.messages, *self._pending]

    @property
    def specs(self) -> list[ToolSpec]:
        """The tools in the model's prompt."""
        return list(self._calls.specs)

    @property
    def over(self) -> bool:
        return self._stop is not None

    @property
    def has_ended(self) -> bool:
        """Whether it came to an end of its own, rather than being held before a turn."""
        return self._stop is not StopReason.ABORTED

    @property
    def temperature(self) -> float:
        return self._recorder.temperature

    @property
    def expert(self) -> ExpertMoves | None:
        """Acts in the model's place: yields actions, and is sent what was observed since the last one."""
        return self._recorder.expert

    @expert.setter
    def expert(self, expert: ExpertMoves) -> None:
        self._recorder.expert = expert

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
        await self._read_images()
        if self.expert is not None:
            return await self._expert_turn(self.expert)
        if self._history is not None:
            recorded = await self._history.next_turn(self.trajectory.turns)
            if recorded is not None:
                return self._act_again(recorded, self._history)
        self._append_pending()
        if self._history is not None and self._history.hold == self.trajectory.turns:
            self._end(StopReason.ABORTED)
        context = self._recorder.context(self._recorder.end)
        budget = self.budgets.turn_room(len(context.tokens))
        limit = budget if max_tokens is None else min(budget, max_tokens)
        seed = key(self.trajectory.seed, self.trajectory.turns)
        sampled = await self._recorder.sample(
            self._renderer, context, seed=seed, session=self.context.episode, limit=limit
        )
        turn = self._act(sampled, may_be_cut=limit < budget)
        if self._history is not None:
            self._history.turns.append(turn)
        return turn

    async def _read_images(self) -> None:
        """Decode the images of pending messages, in a thread; one that cannot be read is told in words.

        A model that reads text only is shown none: they are counted, so that blind training is noticed.
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
                except ImageError as error:
                    if not self.trajectory.messages:  # it is the task's own
                        raise ConfigError(f"task {self.task.id}: {media.named(error)}") from None
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
        return self._act(written_action(self._renderer, content, calls, self._turn))

    async def _expert_turn(self, expert: ExpertMoves) -> Turn:
        observed = "\n".join(message.content for message in self._pending)
        move = await expert_move(expert, observed)
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

    def _act(self, sampled: Sampled, *, may_be_cut: bool = False) -> Turn:
        """Append an action's tokens as they were sampled, and parse them."""
        completion, after = sampled.completion, self._recorder.end
        assert after is not None, "an action follows what the model has read"
        text = self._renderer.text_of(completion, continues_turn=bool(self._turn))
        self._turn += text
        parsed = self._renderer.format.parse(text)
        calls = tuple(
            replace(call, id=call.id or self._call_id(i)) for i, call in enumerate(parsed.calls)
        )
        self._recorder.append_action(sampled, calls, after)
        self.trajectory.messages.append(Message("assistant", text, calls))
        if sampled.is_aborted:
            raise Aborted("the engine aborted the request")
        is_cut = completion.finish is FinishReason.LENGTH and not may_be_cut
        if is_cut and all(call.fault is not None for call in calls):
            if len(completion.tokens) >= self.budgets.max_turn_tokens:
                self.trajectory.counts[TURN_CUT] = 1.0
            self._end(StopReason.MAX_TOKENS)  # the rest of the action is unknown
        answer = parsed.answer if parsed.answer is not None else text
        return Turn(text, calls, answer, completion.finish)

    def conversations(self) -> MessageTree:
        """For an agent outside Ludus, whose requests are whole conversations: what it says is recorded there.

        Such an agent calls tools of its own, and begins its conversations itself: `messages` are not shown.
        """
        self._pending.clear()
        return MessageTree(self._recorder, self._unbound)

    async def call(self, calls: Sequence[ToolCall]) -> list[tuple[ToolCall, ToolResult]]:
        """Run these calls concurrently; each comes back with its result, the model's mistakes included."""
        if self._history is None:
            return await self._run(calls)
        place, recorded = self._history.next_calls(calls)
        if recorded is None or not self._history.is_restored:
            found = await self._run(calls)
            if recorded is not None:
                check_results(recorded, found)
            recorded = found
        self._history.calls[place] = recorded
        return recorded

    async def _run(self, calls: Sequence[ToolCall]) -> list[tuple[ToolCall, ToolResult]]:
        known = self._calls.specs
        results = await self._calls.run(calls)
        if self._calls.specs is not known:
            self._renderer = self._unbound.bound(self._calls.specs)
        return results

    def observe(self, what: str | Message | Sequence[tuple[ToolCall, ToolResult]]) -> None:
        """Show the model this before its next action: results of `call`, a message, or a text."""
        if isinstance(what, str):
            self._pending.append(Message("user", what))
        elif isinstance(what, Message):
            self._pending.append(what)
        else:
            is_shared = self._history is not None and self._history.is_shared(self.trajectory.turns - 1)
            self._calls.record(what, is_shared=is_shared)
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
        try:
            self._recorder.check_turns()
        except BudgetUsedUp as used:
            self._end(used.stop)

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
            step = self._renderer.next_context(self._sequence, conversation, new, self._calls.specs)
        else:
            step = self._renderer.opening(new, self._calls.specs)
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

    def _reminded(self, new: list[Message]) -> list[Message]:
        """These messages; the last one says how many turns are left, where that is asked for."""
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
