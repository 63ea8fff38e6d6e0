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
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any, TypeVar

from ludus.chat.chat_template import tools_key
from ludus.chat.renderer import Renderer
from ludus.chat.streaming import Reply, ReplyView, TokenFeed, read_completion
from ludus.core.failures import Aborted, ConfigError, Fault
from ludus.core.messages import MediaSpan, Message, ToolSpec
from ludus.core.random import key
from ludus.core.tokenizer import ImageTokens
from ludus.core.trajectory import Segment, SegmentKind, StopReason, TokenSequence, Trajectory
from ludus.remote.threads import run_sync
from ludus.rollouts.recorder import (
    BudgetUsedUp,
    Position,
    Recorder,
    Sampled,
    expert_move,
    is_end,
    written_action,
)

T = TypeVar("T")
MessageKey = tuple[Any, ...]

_UNLIMITED = 1_000_000


@dataclass(frozen=True, slots=True)
class SampledTurn:
    """A reply of the model, and where it belongs."""

    reply: Reply
    sampled: Sampled
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
    """Tokens to append there; a whole prompt where `after` is None."""
    media: tuple[MediaSpan, ...]
    """Which of these stand for images."""
    conversation: list[Message]
    """The known messages, replies as they were sampled."""
    digest: blake2b
    """Digest of all tokens of the context."""
    kind: str | None = None
    """Kind of the sequence for counters: a restart, a branch, or neither so far."""

    def context(self) -> Segment:
        """The appended tokens as a segment."""
        kind = SegmentKind.PROMPT if self.after is None else SegmentKind.OBSERVATION
        return Segment(kind, self.tokens, media=self.media)


@dataclass(slots=True)
class _KnownTurn:
    """A turn of the tree."""

    position: Position
    conversation: list[Message]
    digest: blake2b
    """Digest of all tokens up to its end; children extend a copy of it."""


def _digest(
    tokens: Sequence[int], media: Sequence[MediaSpan] = (), before: blake2b | None = None
) -> blake2b:
    """The digest of these tokens and images after those of another: a turn costs what is new in it."""
    found = blake2b(digest_size=8) if before is None else before.copy()
    found.update(array("q", tokens))
    for span in media:
        found.update(span.sha256.encode())
    return found


class MessageTree:
    """The conversations of one episode, in a trajectory that starts empty."""

    def __init__(self, recorder: Recorder, renderer: Renderer) -> None:
        if renderer.turns == "inline":
            raise ConfigError(
                'agent.turns = "inline" goes on in an open turn of the assistant, which a chat API cannot'
            )
        self.trajectory = recorder.trajectory
        self.counts = dict.fromkeys(("requests", "conversations", "branches", "restarts"), 0)
        self.last: SampledTurn | None = None
        """The turn that was committed last."""
        self._recorder, self._renderer = recorder, renderer
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
        self._walked: tuple[int, list[tuple[Message, int]]] = (0, [])
        """The root and the known messages of the request that was located last, with the state after each."""
        self._sampled: dict[int, int] = {}
        """How often each context was sampled from, by its digest."""

    @property
    def images(self) -> ImageTokens | None:
        """How the model is shown images; None where it reads text only."""
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
        is_long: bool = False,
    ) -> SampledTurn:
        """A reply to a conversation. Raises `BudgetUsedUp`, and what the engine and the renderer raise.

        `feed` gets the tokens while they are sampled. What is long is rendered in a thread.
        """
        recorder, sessions = self._recorder, self._recorder.sessions
        recorder.check_turns()
        renderer, spot = await self._located(messages, tools, is_long)
        recorder.check_turns()  # others went on meanwhile
        context = recorder.context(spot.after, spot.context())
        room = recorder.budgets.turn_room(len(context.tokens))
        digest = int.from_bytes(spot.digest.digest(), "big")
        self._sampled[digest] = number = self._sampled.get(digest, -1) + 1
        seed = key(self.trajectory.seed, digest, number)
        id, parses = f"{seed:016x}", bool(tools) and parses_calls
        own = None if spot.after is None else spot.after[0]
        session = await sessions.take(own, is_end(self.trajectory.sequences, spot.after))
        if feed is not None:
            feed.open(id, len(context.tokens), lambda: ReplyView(renderer, stop, parses))
        try:
            if recorder.expert is not None:
                sampled = await self._demonstrated(renderer, spot, len(context.tokens))
            else:
                sampled = await recorder.sample(
                    renderer,
                    context,
                    seed=seed,
                    session=session,
                    limit=min(room, max_tokens or room),
                    stop=stop,
                    on_tokens=None if feed is None else feed.push,
                )
        finally:
            sessions.give_back(session)
        if sampled.is_aborted:
            raise Aborted("the engine aborted the request")
        return SampledTurn(
            read_completion(renderer, sampled.completion, id, stop, parses), sampled, spot
        )

    async def _demonstrated(self, renderer: Renderer, spot: _Spot, prompt_tokens: int) -> Sampled:
        """An expert's reply in the model's place."""
        assert self._recorder.expert is not None
        observed = "\n".join(message.content for message in spot.messages[spot.known :])
        move = await expert_move(self._recorder.expert, observed)
        if move is None:
            raise BudgetUsedUp("the expert has ended", StopReason.TERMINATED)
        text, calls = (move, ()) if isinstance(move, str) else ("", (move,))
        return replace(written_action(renderer, text, calls), prompt_tokens=prompt_tokens)

    async def _located(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], is_long: bool
    ) -> tuple[Renderer, _Spot]:
        """The renderer for these tools, and where the request stands."""

        async def run(function: Callable[..., T], *args: Any) -> T:
            return await run_sync(function, *args) if is_long else function(*args)

        self._recorder.budgets.check_length(self._renderer.fewest_tokens(messages, tools))
        renderer = await run(self._renderer.bound, tools)
        name = await run(tools_key, tools)
        if name not in self._roots:
            self._roots[name] = self._new_state()
        root = self._roots[name]
        known, last = 0, root
        for number, state in enumerate(self._walk(root, messages), start=1):
            if state in self._turns:
                known, last = number, state
        has_replies = any(message.role == "assistant" for message in messages[known:])
        if last == root:
            opening = await run(renderer.opening, messages, tools)
            kind = "restarts" if has_replies and self._actions else None
            digest = _digest(opening.tokens, opening.media)
            spot = _Spot(root, messages, 0, None, opening.tokens, opening.media, [], digest, kind)
            return renderer, spot
        turn = self._turns[last]
        new, conversation = messages[known:], turn.conversation
        action = self.trajectory.sequences[turn.position[0]].segments[turn.position[1]]
        step = await run(renderer.next_context, TokenSequence([action]), conversation, new, tools)
        if step.restart:
            # the template rewrites earlier turns, and history = "split"
            digest, after, kind = _digest(step.tokens, step.media), None, "restarts"
        else:
            digest, after = _digest(step.tokens, step.media, turn.digest), turn.position
            kind = "branches" if has_replies else None
        spot = _Spot(last, messages, known, after, step.tokens, step.media, conversation, digest, kind)
        return renderer, spot

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

    def sibling(self, trajectory: Trajectory, name: str) -> MessageTree:
        """A tree of its own beside this one, with the same model: for what is not recorded here."""
        budgets = self._recorder.budgets.model_copy(update={"max_turns": _UNLIMITED})
        return MessageTree(self._recorder.sibling(trajectory, name, budgets), self._renderer)

    async def count_tokens(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec] = (), *, is_long: bool = False
    ) -> int:
        """How many tokens the model would read before it replies."""
        _, spot = await self._located(messages, tools, is_long)
        return len(self._recorder.context(spot.after, spot.context()).tokens)

    async def close(self) -> None:
        """Release the engine's sessions."""
        await self._recorder.sessions.close()

    # Recording

    def commit(self, turn: SampledTurn) -> None:
        """Record a turn: its reply has reached the client."""
        spot, recorder = turn.spot, self._recorder
        state, is_new = self._enter(spot)
        position = self._contexts.get(state)
        kind = spot.kind
        if position is None:
            position, branched = recorder.append_context(spot.context(), spot.after)
            self._contexts[state] = position
            if branched and kind is None:
                kind = "branches"
        elif kind is None:
            kind = "branches"  # another reply to the same messages
        action, end_of_action = recorder.append_action(
            turn.sampled, turn.reply.message.tool_calls, position
        )
        faults = [call for call in action.calls if call.fault is not None]
        action.faults = tuple(call.fault or Fault.MALFORMED_CALL for call in faults)
        action.faulted = tuple(call.name for call in faults)
        self._actions[turn.reply.id] = action
        end = self._new_state()
        conversation = [*spot.conversation, *spot.messages[spot.known :], turn.reply.message]
        digest = _digest(action.tokens, before=spot.digest)
        self._turns[end] = _KnownTurn(end_of_action, conversation, digest)
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

    def _new_state(self) -> int:
        self._states += 1
        return self._states


# Messages in a canonical form


def message_key(message: Message) -> MessageKey:
    """A canonical form of a message: equal for messages that mean the same, however a client wrote them.

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
