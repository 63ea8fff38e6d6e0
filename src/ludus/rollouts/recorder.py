"""The recorder: samples actions for one episode within its budgets, and keeps exactly what the model read.

    context   all tokens and images up to a place, and what is appended there: the engine is given nothing else
    sample    an action after a context, within the budgets; timed, with queues apart
    append    segments at a place. What leaves an earlier line becomes a sequence of its own, with a `parent`

`Episode` (one line of messages) and `MessageTree` (whole conversations, several at once) are views of it.
`EngineChatModel` asks the engine without a record: it is never trained on.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from pydantic import Field

from ludus.chat.renderer import Renderer
from ludus.core.config import Config
from ludus.core.failures import EngineError, LudusError
from ludus.core.generation import (
    ChatModel,
    ChatOptions,
    ChatReply,
    Completion,
    Engine,
    FinishReason,
    OnTokens,
    Sampling,
    policy_model,
)
from ludus.core.images import ImageError
from ludus.core.messages import MediaSpan, Message, ToolCall
from ludus.core.random import key
from ludus.core.trajectory import (
    Segment,
    SegmentKind,
    StopReason,
    TokenSequence,
    Trajectory,
    media_spans,
    spans_of,
)
from ludus.envs.world import ExpertMoves, next_move
from ludus.llm import ChatError
from ludus.remote.limits import SamplingGate, current_limit, recorded_wait, under_limit
from ludus.remote.threads import run_sync


class BudgetUsedUp(LudusError):
    """The episode has no turns or tokens left for another action; `stop` is the reason for its end."""

    def __init__(self, message: str, stop: StopReason) -> None:
        super().__init__(message)
        self.stop = stop


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
    """Seconds of wall time; time in queues (for an environment, the engine, a tool's place) is left out, the
    run of a tool is not. An episode over it is an infrastructure failure, not the model's fault."""
    remind: bool = False
    """Whether each observation ends with how many turns are left."""

    def reminder(self, turns_taken: int) -> str:
        """The text that tells the model how many turns are left."""
        left = self.max_turns - turns_taken
        return f"[{left} turn{'' if left == 1 else 's'} left]"

    def check_turns(self, used: int) -> None:
        """Raise `BudgetUsedUp` where no further turn may begin."""
        if used >= self.max_turns:
            message = f"the episode has used up its {self.max_turns} turns (budgets.max_turns)"
            raise BudgetUsedUp(message, StopReason.MAX_TURNS)

    def check_length(self, fewest: int) -> None:
        """Refuse a conversation that cannot fit before it is encoded: encoding takes seconds."""
        if fewest > self.max_tokens:
            raise self._too_long(f"at least {fewest}")

    def turn_room(self, context: int) -> int:
        """How many tokens an action may have after a context of this length; `BudgetUsedUp` if none."""
        if context >= self.max_tokens:
            raise self._too_long(str(context))
        return min(self.max_tokens - context, self.max_turn_tokens)

    def _too_long(self, count: str) -> BudgetUsedUp:
        return BudgetUsedUp(
            f"the conversation has {count} tokens, and a sequence may have {self.max_tokens} "
            "(budgets.max_tokens)",
            StopReason.MAX_TOKENS,
        )


Position = tuple[int, int]
"""(sequence, segment): the place just after that segment."""


@dataclass(frozen=True, slots=True)
class Context:
    """The model's context before an action."""

    tokens: list[int]
    media: list[MediaSpan]


@dataclass(frozen=True, slots=True)
class Sampled:
    """An action that has been sampled and is not recorded yet."""

    completion: Completion
    prompt_tokens: int = 0
    session: str = ""
    started: float = 0.0
    seconds: float = 0.0

    @property
    def is_aborted(self) -> bool:
        return self.completion.finish is FinishReason.ABORTED


class Recorder:
    """The tokens of one episode, in a trajectory that starts empty."""

    def __init__(
        self,
        trajectory: Trajectory,
        *,
        engine: Engine,
        budgets: Budgets,
        sampling: Sampling,
        session: str,
        gate: SamplingGate | None = None,
    ) -> None:
        self.trajectory, self.budgets = trajectory, budgets
        self.sessions = EngineSessions(engine, session)
        self.expert: ExpertMoves | None = None
        """Acts in the model's place: yields actions, and is sent what was observed since the last one."""
        self._engine, self._sampling, self._gate = engine, sampling, gate or SamplingGate()
        self._time_limit = current_limit()
        """The episode's; requests of programs come from other tasks."""
        trajectory.seconds.setdefault("generate", 0.0)

    @property
    def temperature(self) -> float:
        return self._sampling.temperature

    def sibling(self, trajectory: Trajectory, name: str, budgets: Budgets) -> Recorder:
        """A recorder on the same engine, for what is not part of this episode's record."""
        return Recorder(
            trajectory,
            engine=self._engine,
            budgets=budgets,
            sampling=self._sampling,
            session=f"{self.sessions.name}.{name}",
            gate=self._gate,
        )

    def check_turns(self) -> None:
        """Raise `BudgetUsedUp` where no further request may begin; those that are sampled now count."""
        self.budgets.check_turns(self.trajectory.turns + self.sessions.busy)

    # Sampling

    def context(self, after: Position | None, following: Segment | None = None) -> Context:
        """All that the model has read and said up to a place, with what follows there."""
        segments = segments_until(self.trajectory.sequences, after)
        if following is not None:
            segments = [*segments, following]
        tokens = [token for segment in segments for token in segment.tokens]
        return Context(tokens, media_spans(segments))

    async def sample(
        self,
        renderer: Renderer,
        context: Context,
        *,
        seed: int,
        session: str,
        limit: int,
        stop: Sequence[str] = (),
        on_tokens: OnTokens | None = None,
    ) -> Sampled:
        """An action of at most `limit` tokens. `stop` ends it beside what the format and the recipe say."""
        sampling = replace(
            self._sampling,
            max_tokens=limit,
            stop=tuple(dict.fromkeys((*self._sampling.stop, *renderer.format.stops, *stop))),
            stop_tokens=(*self._sampling.stop_tokens, *renderer.stop_tokens),
            seed=seed,
        )
        started = time.perf_counter()
        try:
            with under_limit(self._time_limit):
                await self._gate.passed()
                with recorded_wait() as queued, self._gate.noted(session):
                    completion = await self._engine.generate(
                        context.tokens,
                        sampling,
                        session=session,
                        media=context.media,
                        on_tokens=on_tokens,
                    )
                    queued(completion.queued_seconds)
        finally:
            seconds = time.perf_counter() - started
            self.trajectory.seconds["generate"] += seconds
        return Sampled(completion, len(context.tokens), session, started, seconds)

    # Recording

    @property
    def end(self) -> Position | None:
        """The end of the last sequence; None where it is empty."""
        number = len(self.trajectory.sequences) - 1
        last = len(self.trajectory.sequences[number].segments) - 1
        return None if last < 0 else (number, last)

    def append_action(
        self, sampled: Sampled, calls: Sequence[ToolCall], after: Position
    ) -> tuple[Segment, Position]:
        """Record an action after its context; a second one after the same begins a sequence of its own."""
        done = sampled.completion
        action = Segment(
            SegmentKind.ACTION,
            tokens=list(done.tokens),
            logprobs=list(done.logprobs),
            versions=done.versions,
            finish=done.finish,
            calls=tuple(calls),
            seconds=sampled.seconds,
        )
        if sampled.session:
            self.trajectory.spans += spans_of(
                "generate", sampled.started, sampled.seconds, done.queued_seconds, self.trajectory.turns
            )
        sequences = self.trajectory.sequences
        sequence, _ = after
        if not is_end(sequences, after):
            sequences.append(TokenSequence(parent=after))
            sequence = len(sequences) - 1
        sequences[sequence].segments.append(action)
        self.sessions.holds(sampled.session, sequence)
        return action, (sequence, len(sequences[sequence].segments) - 1)

    def append_context(self, context: Segment, after: Position | None) -> tuple[Position, bool]:
        """Append what the model read before an action: where that ends, and whether it left an earlier line.

        A whole prompt (`after` is None) shares with an earlier sequence what begins with the same tokens.
        """
        sequences = self.trajectory.sequences
        if after is None:
            return _append_prompt(sequences, context), False
        sequence, _ = after
        branched = not is_end(sequences, after)
        if branched:
            sequences.append(TokenSequence(parent=after))
            sequence = len(sequences) - 1
        sequences[sequence].segments.append(context)
        return (sequence, len(sequences[sequence].segments) - 1), branched


def expert_move(expert: ExpertMoves, observed: str) -> Coroutine[Any, Any, str | ToolCall | None]:
    """The expert's next move; in a thread, because a planner may think for seconds."""
    return run_sync(next_move, expert, observed)


def written_action(
    renderer: Renderer, content: str, calls: Sequence[ToolCall] = (), turn: str = ""
) -> Sampled:
    """An action that was not sampled, as the model would have written it: its log-probabilities are 0.

    `turn` is the text of the same turn before it, where turns are inline.
    """
    tokens = renderer.action_tokens(renderer.format.render_action(content, calls), turn)
    ended = renderer.turns == "chat" or (bool(tokens) and tokens[-1] in renderer.stop_tokens)
    finish = FinishReason.STOP_TOKEN if ended else FinishReason.STOP_STRING
    return Sampled(Completion(tokens, [0.0] * len(tokens), finish))


# Sequences that branch off each other


def is_end(sequences: list[TokenSequence], position: Position | None) -> bool:
    """Whether nothing follows that place in its sequence."""
    return position is not None and position[1] == len(sequences[position[0]].segments) - 1


def segments_until(sequences: list[TokenSequence], position: Position | None) -> list[Segment]:
    """All segments up to a place, those of the sequences that it branches from included."""
    if position is None:
        return []
    sequence, segment = position
    own = sequences[sequence]
    return [*segments_until(sequences, own.parent), *own.segments[: segment + 1]]


def _append_prompt(sequences: list[TokenSequence], prompt: Segment) -> Position:
    if not any(sequence.segments for sequence in sequences):
        sequences[0].segments.append(prompt)
        return 0, 0
    parent, shared = _shared_prefix(sequences, prompt)
    if parent is not None and shared == len(prompt.tokens):
        return parent
    kind = SegmentKind.PROMPT if parent is None else SegmentKind.OBSERVATION
    media = tuple(span.moved(-shared) for span in prompt.media if span.start >= shared)
    sequences.append(TokenSequence([Segment(kind, prompt.tokens[shared:], media=media)], parent))
    return len(sequences) - 1, 0


def _shared_prefix(sequences: list[TokenSequence], prompt: Segment) -> tuple[Position | None, int]:
    """The longest run of whole segments, of any sequence, that a prompt begins with, images included."""
    tokens = prompt.tokens
    images = {span.start: span for span in prompt.media}
    ends: list[list[int]] = []
    """For each sequence, how many tokens are shared up to the end of each of its segments."""
    best: Position | None = None
    most = 0
    for number, sequence in enumerate(sequences):
        own: list[int] = []
        ends.append(own)
        position = 0
        if sequence.parent is not None:
            parent, segment = sequence.parent
            if len(ends[parent]) <= segment:
                continue  # it has left these tokens already
            position = ends[parent][segment]
        for index, segment_ in enumerate(sequence.segments):
            stop = position + len(segment_.tokens)
            if tokens[position:stop] != segment_.tokens:
                break
            own_images = [images[at] for at in sorted(images) if position <= at < stop]
            if own_images != [span.moved(position) for span in segment_.media]:
                break
            position = stop
            own.append(position)
            if position > most:
                best, most = (number, index), position
    return best, most


class EngineSessions:
    """A session for each request that runs at once; they are used again."""

    def __init__(self, engine: Engine, name: str) -> None:
        self.name = name
        self._engine = engine
        self._held: dict[str, int | None] = {}
        """The sequence that each session holds the KV of."""
        self._busy: set[str] = set()

    @property
    def busy(self) -> int:
        return len(self._busy)

    async def take(self, sequence: int | None, at_end: bool) -> str:
        """A session for a request: the one that holds its sequence's KV, if it goes on from its end, or a fork.

        `sequence` is None for a new conversation.
        """
        holders = (name for name, held in self._held.items() if held == sequence)
        holder = None if sequence is None else next(holders, None)
        if holder is not None and holder not in self._busy and at_end:
            self._busy.add(holder)
            return holder
        unused = (name for name, held in self._held.items() if held is None)
        name = next((name for name in unused if name not in self._busy), None)
        if name is None:
            name = f"{self.name}.{len(self._held)}" if self._held else self.name
        self._held[name] = None
        self._busy.add(name)
        if holder is not None:
            try:
                await self._engine.fork(holder, name)
            except BaseException:
                self._busy.discard(name)
                raise
        return name

    def give_back(self, name: str) -> None:
        self._busy.discard(name)

    def holds(self, name: str, sequence: int) -> None:
        """Note that the session's tokens are part of this sequence."""
        if name in self._held:
            self._held[name] = sequence

    async def close(self) -> None:
        for name in list(self._held):
            await self._engine.release(name)
        self._held.clear()


_CHAT_SECONDS = 600.0


class EngineChatModel:
    """A `ChatModel` on an engine, such as the policy itself: each question is a request of its own.

    With a temperature above 0 and no seed, the question decides the answer.
    """

    def __init__(
        self,
        engine: Engine,
        renderer: Renderer,
        name: str = "policy",
        *,
        gate: SamplingGate | None = None,
    ) -> None:
        self._engine, self._renderer = engine, renderer
        self._gate = gate or SamplingGate()
        self._name = name

    @property
    def name(self) -> str:
        """With the version of the weights: what another version said is another answer."""
        return f"{self._name}@{self._engine.policy_version}"

    async def chat(self, messages: Sequence[Message], options: ChatOptions = ChatOptions()) -> ChatReply:  # noqa: B008 - frozen
        if self._renderer.images is None and any(message.media for message in messages):
            raise ChatError(f"{self._name} reads text only, and is asked about an image")
        try:
            opening = await run_sync(self._renderer.opening, messages)
        except ImageError as error:
            raise ChatError(f"{self._name} cannot be asked: {error}") from error
        prompt = opening.tokens
        seed = options.seed
        if seed is None:
            seed = key(*prompt, *(one.sha256 for one in opening.media))
        sampling = Sampling(
            max_tokens=options.max_tokens,
            temperature=options.temperature,
            stop_tokens=self._renderer.stop_tokens,
            seed=seed,
        )
        await self._gate.passed()
        try:
            async with asyncio.timeout(_CHAT_SECONDS) as deadline:
                completion = await self._engine.generate(prompt, sampling, media=opening.media)
        except EngineError as error:
            raise ChatError(f"{self._name} cannot be asked: {error}") from error
        except TimeoutError as error:
            if not deadline.expired():
                raise
            raise ChatError(f"{self._name} gave no answer within {_CHAT_SECONDS:g} seconds") from error
        if completion.finish is FinishReason.ABORTED:
            raise ChatError(f"{self._name}: the engine aborted the request")
        return ChatReply(
            self._renderer.text_of(completion),
            prompt_tokens=len(prompt),
            completion_tokens=len(completion.tokens),
            is_cut=completion.finish is FinishReason.LENGTH,
        )

    async def close(self) -> None:
        """Nothing to close: the engine has another owner."""


@contextmanager
def asking_policy(model: ChatModel) -> Iterator[None]:
    """While this is entered, `model = "policy"` is this model."""
    token = policy_model.set(model)
    try:
        yield
    finally:
        policy_model.reset(token)
