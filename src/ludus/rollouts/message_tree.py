"""Conversations that arrive as whole lists of messages, kept as a tree with the exact tokens of each.

An agent that talks to a chat API sends its whole conversation with every request, the model's own earlier
replies included, as its client library chose to write them. The tree finds the part that it knows by comparing
messages in a canonical form (`message_key`), takes the tokens of that part as they were read and sampled, and
renders only what is new. What the client echoes of a reply is compared and then forgotten.

A request that does not continue the end of a sequence becomes a sequence of its own: a *branch* where it goes
on from a turn in the middle, or asks for another reply to the same messages; a *restart* where a conversation
that holds replies is not found (a client that rewrites them, or shortens the history). `TokenSequence.parent`
says where the tokens of both agree.

Sampling and recording are two steps: `sample` leaves the tree as it is, `commit` adds the turn. A reply that
never reached its client is not recorded, and is not trained on. Several requests may be sampled at once.
"""

from __future__ import annotations

import json
import time
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

from ludus.core.concurrency import run_sync
from ludus.core.failures import Aborted, ConfigError, Fault, LudusError
from ludus.core.generation import Completion, Engine, FinishReason, Sampling
from ludus.core.messages import MediaSpan, Message, ToolCall, ToolSpec
from ludus.core.random import key
from ludus.core.tokenizer import ImageTokens
from ludus.core.trajectory import (
    Segment,
    SegmentKind,
    StopReason,
    TokenSequence,
    Trajectory,
    media_spans,
)
from ludus.envs.world import ExpertMoves, next_move
from ludus.rollouts.chat_template import tools_key
from ludus.rollouts.formats.base import split_thinking
from ludus.rollouts.renderer import Renderer
from ludus.rollouts.streaming import ReplyView, TokenFeed

MessageKey = tuple[Any, ...]
Position = tuple[int, int]
"""(sequence, segment): the place just after that segment."""


_UNLIMITED = 1_000_000


class BudgetUsedUp(LudusError):
    """The episode has no turns or tokens left for another reply."""

    def __init__(self, message: str, stop: StopReason) -> None:
        super().__init__(message)
        self.stop = stop


@dataclass(frozen=True, slots=True)
class TurnLimits:
    """How much may be sampled: turns in all, tokens of a turn, tokens of a sequence."""

    turns: int
    turn_tokens: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Reply:
    """What was sampled, as a client of a chat API reads it."""

    id: str
    text: str
    """The text outside calls and thinking."""
    thought: str
    calls: tuple[ToolCall, ...]
    """The calls that could be read."""
    message: Message
    """All that was sampled, calls that could not be read included."""
    answer: str


def read_completion(
    renderer: Renderer, completion: Completion, id: str, stop: Sequence[str], parses_calls: bool
) -> Reply:
    """A completion as a reply, which a client's own `stop` ends and is no part of.

    A call that cannot be read stays text, as does any call without tools.
    """
    whole, shown = renderer.text_of(completion), renderer.text_of(completion, before=stop)
    thought, body, closed = split_thinking(shown)
    parsed = renderer.format.parse(shown)
    found = tuple(
        ToolCall(one.name, one.arguments, f"call_{id}_{place}", one.fault, one.problem)
        for place, one in enumerate(parsed.calls if parses_calls else ())
    )
    calls = tuple(call for call in found if call.fault is None)
    text = (parsed.text if calls else body).strip() if closed else ""
    answer = parsed.answer if parsed.answer is not None else whole
    return Reply(id, text, thought, calls, Message("assistant", whole, found), answer)


@dataclass(frozen=True, slots=True)
class SampledTurn:
    """A reply of the model, and where it belongs."""

    reply: Reply
    completion: Completion
    prompt_tokens: int
    seconds: float
    session: str
    spot: _Spot


@dataclass(slots=True)
class _Spot:
    """Where a request stands in the tree, and what it adds."""

    state: int
    """The state after the last known turn; the root of its tools where none is known."""
    messages: Sequence[Message]
    known: int
    """How many of the messages that state covers."""
    after: Position | None
    """The last known turn's action; None for a new conversation."""
    tokens: list[int]
    """What is appended there; a whole prompt where `after` is None."""
    media: tuple[MediaSpan, ...]
    """Which of these stand for pictures."""
    conversation: list[Message]
    """The known messages, replies as they were sampled."""
    digest: blake2b
    """Of all that the model reads."""
    kind: str | None = None
    """What it counts as: a restart, a branch, or neither so far."""

    def context(self) -> Segment:
        """What is appended, as a segment."""
        kind = SegmentKind.PROMPT if self.after is None else SegmentKind.OBSERVATION
        return Segment(kind, self.tokens, media=self.media)


@dataclass(slots=True)
class _KnownTurn:
    """A turn of the tree."""

    position: Position
    conversation: list[Message]
    digest: blake2b
    """Of all tokens up to its end: what follows is added to a copy."""


def _digest(
    tokens: Sequence[int], media: Sequence[MediaSpan] = (), before: blake2b | None = None
) -> blake2b:
    """The digest of these tokens and pictures after those of another: a turn costs what is new in it."""
    found = blake2b(digest_size=8) if before is None else before.copy()
    found.update(array("q", tokens))
    for span in media:
        found.update(span.sha256.encode())
    return found


def message_key(message: Message) -> MessageKey:
    """The same for messages that mean the same.

    A reply's text is compared without the white space around it, and calls by their ids, names and arguments,
    whatever the order of the keys and however numbers are written. Other texts are compared as they are.
    """
    text = message.content.strip() if message.role == "assistant" else message.content
    calls = tuple((call.id, call.name, canonical_json(call.arguments)) for call in message.tool_calls)
    return message.role, text, calls, message.tool_call_id or "", tuple(m.sha256 for m in message.media)


def canonical_json(value: Any) -> str:
    """JSON that is the same for equal values: keys sorted, 2.0 written as 2."""
    return _canonical(_plain(value))


_canonical = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode


def _plain(value: Any) -> Any:
    if isinstance(value, str | int):  # most are
        return value
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict | Mapping):
        return {str(name): _plain(inner) for name, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list | tuple) else value


class MessageTree:
    """The conversations of one episode, in a trajectory that starts empty."""

    def __init__(
        self,
        trajectory: Trajectory,
        *,
        engine: Engine,
        renderer: Renderer,
        limits: TurnLimits,
        sampling: Sampling,
        session: str,
    ) -> None:
        if renderer.turns == "inline":
            raise ConfigError(
                'agent.turns = "inline" goes on in an open turn of the assistant, which a chat API cannot'
            )
        self.trajectory = trajectory
        self.counts = dict.fromkeys(("requests", "conversations", "branches", "restarts"), 0)
        self.expert: ExpertMoves | None = None
        """Replies in the model's place: yields replies or calls, and is sent what was read since the last."""
        self.last: SampledTurn | None = None
        """The turn that was committed last."""
        self._engine, self._renderer = engine, renderer
        self._limits, self._sampling, self._session = limits, sampling, session
        self._next: dict[tuple[int, MessageKey], int] = {}
        """From a state and a message to the state after it."""
        self._states = 0
        self._roots: dict[str, int] = {}
        """The state before the first message, for each list of tools: they stand at the front of a prompt."""
        self._turns: dict[int, _KnownTurn] = {}
        """States that end with a reply."""
        self._contexts: dict[int, Position] = {}
        """States that a reply was sampled from: the segment that ends there."""
        self._actions: dict[str, Segment] = {}
        """Committed actions by the ids of their turns."""
        self._sessions: dict[str, int | None] = {}
        """The engine's sessions, and the sequence that each one holds the KV of."""
        self._busy: set[str] = set()
        self._walked: tuple[int, list[tuple[Message, int]]] = (0, [])
        """The root and the known messages of the request that was located last, with the state after each."""
        self._sampled: dict[int, int] = {}
        """How often each context was sampled from, by its digest."""

    @property
    def images(self) -> ImageTokens | None:
        """How the model is shown pictures; None where it reads text only."""
        return self._renderer.images

    # Sampling

    async def sample(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSpec] = (),
        *,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        parses_calls: bool = True,
        feed: TokenFeed | None = None,
    ) -> SampledTurn:
        """A reply to a conversation. Raises `BudgetUsedUp`, and what the engine and the renderer raise.

        `feed` gets the tokens while they are sampled.
        """
        if len(self._actions) + len(self._busy) >= self._limits.turns:
            message = f"the episode has used up its {self._limits.turns} turns (budgets.max_turns)"
            raise BudgetUsedUp(message, StopReason.MAX_TURNS)
        renderer = self._renderer.bound(tools)
        self._refuse_longer(messages)
        spot = self._locate(renderer, messages, tools)
        known = self._segments_until(spot.after)
        context = [token for segment in known for token in segment.tokens] + spot.tokens
        media = media_spans([*known, spot.context()])
        room = self._limits.tokens - len(context)
        if room < 1:
            message = (
                f"the conversation has {len(context)} tokens, and a sequence may have {self._limits.tokens} "
                "(budgets.max_tokens)"
            )
            raise BudgetUsedUp(message, StopReason.MAX_TOKENS)
        limit = min(room, self._limits.turn_tokens, max_tokens or room)
        digest = int.from_bytes(spot.digest.digest(), "big")
        self._sampled[digest] = number = self._sampled.get(digest, -1) + 1
        seed = key(self.trajectory.seed, digest, number)
        sampling = replace(
            self._sampling,
            max_tokens=limit,
            stop=tuple(dict.fromkeys((*self._sampling.stop, *renderer.format.stops, *stop))),
            stop_tokens=(*self._sampling.stop_tokens, *renderer.tokenizer.stop_tokens),
            seed=seed,
        )
        id, parses = f"{seed:016x}", bool(tools) and parses_calls
        session = await self._take_session(spot)
        if feed is not None:
            feed.open(id, len(context), lambda: ReplyView(renderer, stop, parses))
        on_tokens = None if feed is None else feed.push
        started = time.perf_counter()
        try:
            if self.expert is not None:
                completion = await self._demonstrated(renderer, spot, self.expert)
            else:
                completion = await self._engine.generate(
                    context, sampling, session=session, media=media, on_tokens=on_tokens
                )
        finally:
            self._busy.discard(session)
            seconds = time.perf_counter() - started
            spent = self.trajectory.seconds
            spent["generate"] = spent.get("generate", 0.0) + seconds
        if completion.finish is FinishReason.ABORTED:
            raise Aborted("the engine aborted the request")
        read = read_completion(renderer, completion, id, stop, parses)
        return SampledTurn(read, completion, len(context), seconds, session, spot)

    def _refuse_longer(self, messages: Sequence[Message]) -> None:
        """Refuse what cannot fit before it is encoded: that takes seconds, in which no episode goes on."""
        fewest = self._renderer.fewest_tokens(messages)
        if fewest > self._limits.tokens:
            raise BudgetUsedUp(
                f"the conversation has at least {fewest} tokens, and a sequence may have {self._limits.tokens} "
                "(budgets.max_tokens)",
                StopReason.MAX_TOKENS,
            )

    async def _demonstrated(self, renderer: Renderer, spot: _Spot, expert: ExpertMoves) -> Completion:
        """What an expert replies in the model's place; its log-probabilities are 0, it was not sampled."""
        observed = "\n".join(message.content for message in spot.messages[spot.known :])
        move = await run_sync(next_move, expert, observed)
        if move is None:
            raise BudgetUsedUp("the expert has ended", StopReason.TERMINATED)
        text, calls = (move, ()) if isinstance(move, str) else ("", (move,))
        tokens = renderer.action_tokens(renderer.format.render_action(text, calls))
        return Completion(tokens, [0.0] * len(tokens), FinishReason.STOP_TOKEN)

    def _locate(
        self, renderer: Renderer, messages: Sequence[Message], tools: Sequence[ToolSpec]
    ) -> _Spot:
        name = tools_key(tools)
        if name not in self._roots:
            self._roots[name] = self._new_state()
        root = self._roots[name]
        known, last = 0, root
        for number, state in enumerate(self._walk(root, messages), start=1):
            if state in self._turns:
                known, last = number, state
        has_replies = any(message.role == "assistant" for message in messages[known:])
        if last == root:
            opening = renderer.opening(messages, tools)
            kind = "restarts" if has_replies and self._actions else None
            digest = _digest(opening.tokens, opening.media)
            return _Spot(root, messages, 0, None, opening.tokens, opening.media, [], digest, kind)
        turn = self._turns[last]
        new, conversation = messages[known:], turn.conversation
        action = self.trajectory.sequences[turn.position[0]].segments[turn.position[1]]
        step = renderer.next_context(TokenSequence([action]), conversation, new, tools)
        if step.restart:
            # the template rewrites earlier turns, and history = "split"
            digest = _digest(step.tokens, step.media)
            return _Spot(
                last, messages, known, None, step.tokens, step.media, conversation, digest, "restarts"
            )
        kind = "branches" if has_replies else None
        digest = _digest(step.tokens, step.media, turn.digest)
        return _Spot(
            last, messages, known, turn.position, step.tokens, step.media, conversation, digest, kind
        )

    def _walk(self, root: int, messages: Sequence[Message]) -> list[int]:
        """The states after these messages, as far as they are known.

        Messages that are the very objects of the last walk are not compared again.
        """
        known_root, known = self._walked
        path: list[tuple[Message, int]] = []
        state, is_same = root, known_root == root
        for number, message in enumerate(messages):
            is_same = is_same and number < len(known) and known[number][0] is message
            found = known[number][1] if is_same else self._next.get((state, message_key(message)))
            if found is None:
                break
            state = found
            path.append((message, state))
        self._walked = root, path
        return [state for _, state in path]

    async def _take_session(self, spot: _Spot) -> str:
        """A session of the engine for a request: the one that holds its sequence's KV, or a fork of it."""
        own = None if spot.after is None else spot.after[0]
        holder = next((name for name, held in self._sessions.items() if held == own), None)
        if holder is not None and holder not in self._busy and self._is_end(spot.after):
            self._busy.add(holder)
            return holder
        unused = (name for name, held in self._sessions.items() if held is None)
        name = next((name for name in unused if name not in self._busy), None)
        if name is None:
            count = len(self._sessions)
            name = f"{self._session}.{count}" if count else self._session
        self._sessions[name] = None
        self._busy.add(name)
        if holder is not None:
            try:
                await self._engine.fork(holder, name)
            except BaseException:
                self._busy.discard(name)
                raise
        return name

    def _is_end(self, position: Position | None) -> bool:
        """Whether nothing follows that place in its sequence."""
        if position is None:
            return False
        return position[1] == len(self.trajectory.sequences[position[0]].segments) - 1

    def sibling(self, trajectory: Trajectory, name: str) -> MessageTree:
        """A tree of its own beside this one, with the same model: for what is not recorded here."""
        return MessageTree(
            trajectory,
            engine=self._engine,
            renderer=self._renderer,
            limits=replace(self._limits, turns=_UNLIMITED),
            sampling=self._sampling,
            session=f"{self._session}.{name}",
        )

    def count_tokens(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> int:
        """How many tokens the model would read before it replies."""
        self._refuse_longer(messages)
        spot = self._locate(self._renderer.bound(tools), messages, tools)
        known = self._segments_until(spot.after)
        return sum(len(segment.tokens) for segment in known) + len(spot.tokens)

    async def close(self) -> None:
        """Release the engine's sessions."""
        for name in list(self._sessions):
            await self._engine.release(name)
        self._sessions.clear()

    # Recording

    def commit(self, turn: SampledTurn) -> None:
        """Record a turn: its reply has reached the client."""
        spot, sequences = turn.spot, self.trajectory.sequences
        state, is_new = self._enter(spot)
        position = self._contexts.get(state)
        kind = spot.kind
        if position is None:
            position, branched = self._append_context(spot)
            self._contexts[state] = position
            if branched and kind is None:
                kind = "branches"
        elif kind is None:
            kind = "branches"  # another reply to the same messages
        sequence, segment = position
        if segment != len(sequences[sequence].segments) - 1:
            sequences.append(TokenSequence(parent=position))
            sequence = len(sequences) - 1
        faults = [call for call in turn.reply.message.tool_calls if call.fault is not None]
        action = Segment(
            SegmentKind.ACTION,
            tokens=list(turn.completion.tokens),
            logprobs=list(turn.completion.logprobs),
            versions=turn.completion.versions,
            finish=turn.completion.finish,
            calls=turn.reply.message.tool_calls,
            faults=tuple(call.fault or Fault.MALFORMED_CALL for call in faults),
            faulted=tuple(call.name for call in faults),
            seconds=turn.seconds,
        )
        sequences[sequence].segments.append(action)
        self._actions[turn.reply.id] = action
        if turn.session in self._sessions:
            self._sessions[turn.session] = sequence
        end = self._new_state()
        conversation = [*spot.conversation, *spot.messages[spot.known :], turn.reply.message]
        self._turns[end] = _KnownTurn(
            (sequence, len(sequences[sequence].segments) - 1),
            conversation,
            _digest(action.tokens, before=spot.digest),
        )
        # as clients echo it: with its text, or with its calls alone
        echoed = Message("assistant", turn.reply.text, turn.reply.calls)
        step = (state, message_key(echoed))
        if step in self._next:
            self._walked = (0, [])  # from now on the same words mean this turn
        self._next[step] = end
        if turn.reply.calls and turn.reply.text:
            self._next[state, message_key(replace(echoed, content=""))] = end
        self.trajectory.messages = conversation
        self.last = turn
        self.counts["requests"] += 1
        if is_new and kind is None and spot.after is None:
            kind = "conversations"
        if kind is not None:
            self.counts[kind] += 1

    def _enter(self, spot: _Spot) -> tuple[int, bool]:
        """The state after all messages of a request, and whether it was not known before."""
        state, is_new = spot.state, False
        for message in spot.messages[spot.known :]:
            step = (state, message_key(message))
            if step not in self._next:
                self._next[step], is_new = self._new_state(), True
            state = self._next[step]
        return state, is_new

    def _append_context(self, spot: _Spot) -> tuple[Position, bool]:
        """Append what the model read before a turn; where that ends, and whether it left an earlier line."""
        sequences = self.trajectory.sequences
        if spot.after is None:
            return self._append_prompt(spot.context()), False
        sequence, segment = spot.after
        branched = segment != len(sequences[sequence].segments) - 1
        if branched:
            sequences.append(TokenSequence(parent=spot.after))
            sequence = len(sequences) - 1
        sequences[sequence].segments.append(spot.context())
        return (sequence, len(sequences[sequence].segments) - 1), branched

    def _append_prompt(self, prompt: Segment) -> Position:
        """A whole prompt: a new sequence, which shares with an earlier one what begins with the same tokens."""
        sequences = self.trajectory.sequences
        if not any(sequence.segments for sequence in sequences):
            sequences[0].segments.append(prompt)
            return 0, 0
        parent, shared = self._shared_prefix(prompt)
        if parent is not None and shared == len(prompt.tokens):
            return parent
        kind = SegmentKind.PROMPT if parent is None else SegmentKind.OBSERVATION
        media = tuple(span.moved(-shared) for span in prompt.media if span.start >= shared)
        sequences.append(TokenSequence([Segment(kind, prompt.tokens[shared:], media=media)], parent))
        return len(sequences) - 1, 0

    def _shared_prefix(self, prompt: Segment) -> tuple[Position | None, int]:
        """The longest run of whole segments, of any sequence, that a prompt begins with, pictures included."""
        sequences, tokens = self.trajectory.sequences, prompt.tokens
        pictures = {span.start: span for span in prompt.media}
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
                own_pictures = [pictures[at] for at in sorted(pictures) if position <= at < stop]
                if own_pictures != [span.moved(position) for span in segment_.media]:
                    break
                position = stop
                own.append(position)
                if position > most:
                    best, most = (number, index), position
        return best, most

    # Rewards and the record

    def reward(self, value: float, turn: str | None = None) -> None:
        """Add to the reward of a turn, by its id; of the last one when left out. `KeyError`: no such turn."""
        if turn is None and self.last is None:
            raise KeyError("no turn has been recorded yet")
        action = self._actions[turn if turn is not None else self.last.reply.id]  # type: ignore[union-attr]
        action.reward = (action.reward or 0.0) + value

    def has_turn(self, id: str) -> bool:
        return id in self._actions

    def last_turn_of(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> str | None:
        """The id of the reply that a conversation goes on from."""
        root = self._roots.get(tools_key(tools))
        states = [] if root is None else self._walk(root, messages)
        found = next((self._turns[one] for one in reversed(states) if one in self._turns), None)
        if found is None:
            return None
        sequence, place = found.position
        segment = self.trajectory.sequences[sequence].segments[place]
        return next(id for id, action in self._actions.items() if action is segment)

    def _segments_until(self, position: Position | None) -> list[Segment]:
        """All segments up to a place, those of the sequences that it branches from included."""
        if position is None:
            return []
        sequence, segment = position
        own = self.trajectory.sequences[sequence]
        return [*self._segments_until(own.parent), *own.segments[: segment + 1]]

    def _new_state(self) -> int:
        self._states += 1
        return self._states
