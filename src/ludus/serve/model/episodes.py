"""Episodes behind the API: a key is an episode, and what is said with it is recorded exactly.

Who waits for whom. Each request samples in a task of its own; a request that is marked as a retry, or that
equals one whose client has gone, waits for that task instead of starting another. A turn is recorded when a
client is there to take it: a reply without a waiting client is dropped `ORPHAN_SECONDS` later, and was
never part of the episode. Closing the episode cancels what still runs.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import Any
from weakref import WeakSet

from aiohttp import web

from ludus.chat.api_fields import ApiError, bad
from ludus.chat.streaming import TokenFeed
from ludus.core.failures import Aborted, ConfigError, EngineError, InfraError
from ludus.core.images import MOST_PIXELS
from ludus.core.messages import Json
from ludus.core.random import key as seed_key
from ludus.core.trajectory import StopReason, Trajectory
from ludus.llm import Address
from ludus.remote.client import ConnectionFailed, HttpClient
from ludus.rollouts.message_tree import MessageTree, SampledTurn
from ludus.rollouts.recorder import BudgetUsedUp
from ludus.serve.admission import WorkBudget
from ludus.serve.app import check_token
from ludus.serve.model.requests import (
    LONG,
    Forwarded,
    Incoming,
    ModelReply,
    ModelRequest,
    check_images,
    refuse_images,
    reward_number,
    unknown_model,
)
from ludus.serve.model.streams import LiveReplies
from ludus.serve.telemetry import ModelMetrics

log = logging.getLogger(__name__)
_noted: set[tuple[Any, float]] = set()
"""Temperatures, asked for and used, that were logged."""

TRAINED, FROZEN = "trained", "frozen"
ANY = "*"
ORPHAN_SECONDS = 30.0
NO_REWARDS = (
    "the recipe's rewards score this episode: agent.program.rewards = true lets programs set some"
)
_MOST_ENDED = 65_536
_FORWARD_SECONDS = 600.0
FORWARD_BYTES = 64 << 20
"""The longest answer of another server."""
_OFF = {"top_p": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 1, "presence_penalty": 0,
        "frequency_penalty": 0}  # fmt: skip
"""Sampling that draws from another distribution than the trained one, and the values that do nothing."""


@dataclass(slots=True)
class _Sampling:
    """A request that is being sampled, or was."""

    task: asyncio.Task[SampledTurn]
    tree: MessageTree
    feed: TokenFeed | None = None
    """Its tokens as they come, for a stream."""
    waiters: int = 0
    is_recorded: bool = False
    orphaned: asyncio.TimerHandle | None = None


class EpisodeSession:
    """One episode: its conversations, and what its client reported."""

    def __init__(
        self,
        tree: MessageTree,
        models: Mapping[str, str] | None = None,
        *,
        temperature: float = 1.0,
        metrics: ModelMetrics | None = None,
        http: HttpClient | None = None,
        pixels: WorkBudget | None = None,
        takes_rewards: bool = True,
    ) -> None:
        """`models` says who answers to a model's name: trained, frozen, or an address; all are trained when
        left out. `tree` records the trained ones. `pixels` bounds what is decoded for all episodes.
        `takes_rewards`: whether its client may set rewards."""
        self.key = f"sk-ludus-{secrets.token_urlsafe(24)}"
        self.tree = tree
        self.stop: StopReason | None = None
        """The budget that was used up."""
        self.failure: Exception | None = None
        """The last infrastructure error; cleared by the next success."""
        self.answer: str | None = None
        """The answer that the client reported."""
        self.counts: Counter[str] = Counter()
        self.takes_rewards = takes_rewards
        self.program: asyncio.Future[int] | None = None
        """The process that alone may use the key, with its children; None where any process that has it may."""
        self._clients: WeakSet[asyncio.BaseTransport] = WeakSet()
        """Connections that were found to be the program's."""
        self._models = dict(models or {ANY: TRAINED})
        self._temperature, self._metrics, self._http = temperature, metrics, http
        self._pixels = pixels or WorkBudget(MOST_PIXELS)
        self._frozen: dict[str, MessageTree] = {}
        self._sampling: dict[bytes, _Sampling] = {}
        self._reward: float | None = None
        self._turn_rewards: dict[str, float] = {}
        self._is_closed = False

    @property
    def models(self) -> list[str]:
        """The names that are answered to; "policy" stands for any."""
        return ["policy" if name == ANY else name for name in self._models]

    async def check_client(self, transport: asyncio.BaseTransport | None) -> None:
        """Refuse a connection of another process than the program's."""
        if self.program is None or transport in self._clients:
            return
        program = await asyncio.shield(self.program)  # which is being started
        ends = [transport.get_extra_info(one) for one in ("peername", "sockname")] if transport else []
        if transport is None or not await asyncio.to_thread(is_of_program, ends[0], ends[1], program):
            raise ApiError(
                403,
                "this key is of another program: the command of an episode and its child processes may use its "
                'key; agent.program.clients = "any" lets any process that has it, such as a container',
                code="invalid_api_key",
            )
        self._clients.add(transport)

    async def complete(
        self, request: ModelRequest, incoming: Incoming, live: LiveReplies | None = None
    ) -> Sequence[ModelReply] | Forwarded:
        route = self._models.get(request.model, self._models.get(ANY))
        if route is None:
            raise unknown_model(request.model, self.models)
        if route not in (TRAINED, FROZEN):
            self.counts["forwarded"] += 1
            return await self._forward(Address.parse(route), request, incoming)
        running = self._sampling.get(incoming.digest)
        is_same = running is not None and (
            incoming.is_retry or (not running.waiters and not running.is_recorded)
        )
        if running is None or not is_same:
            self._check(request)
            tree = self.tree if route == TRAINED else self._frozen_tree(request.model)
            if incoming.reward is not None:
                self._check_takes_rewards()
                turn_id = self.tree.last_turn_of(request.messages, request.tools)
                if turn_id is None:
                    raise bad("a reward came with a conversation that holds no reply of this episode")
                self._turn_rewards[turn_id] = incoming.reward
            feed = None if live is None else TokenFeed()
            running = _Sampling(asyncio.create_task(self._sample(tree, request, feed)), tree, feed)
            self._sampling[incoming.digest] = running
        else:
            self.counts["retries"] += 1
            if self._metrics is not None:
                self._metrics.retried.inc()
        if live is not None and running.feed is not None:
            live.follow([running.feed])
        turn = await self._wait(running, incoming.digest)
        if not running.is_recorded:
            running.is_recorded = True
            running.tree.commit(turn)
        sampled = turn.sampled
        return [ModelReply.of(turn.reply, sampled.completion, sampled.prompt_tokens, request)]

    async def _wait(self, running: _Sampling, digest: bytes) -> SampledTurn:
        if running.orphaned is not None:
            running.orphaned.cancel()
            running.orphaned = None
        running.waiters += 1
        try:
            return await asyncio.shield(running.task)
        except asyncio.CancelledError:
            if running.waiters == 1 and not running.task.done() and not self._is_closed:
                loop = asyncio.get_running_loop()
                running.orphaned = loop.call_later(ORPHAN_SECONDS, running.task.cancel)
            if self._is_closed:
                raise ended() from None
            if running.task.cancelled():
                self._sampling.pop(digest, None)
            raise
        except Exception:
            self._sampling.pop(digest, None)  # a retry samples again
            raise
        finally:
            running.waiters -= 1

    async def _sample(
        self, tree: MessageTree, request: ModelRequest, feed: TokenFeed | None
    ) -> SampledTurn:
        await check_images(request, tree.images, self._pixels)
        try:
            turn = await tree.sample(
                request.messages,
                request.tools,
                max_tokens=request.max_tokens,
                stop=request.stop,
                parses_calls=request.calls_allowed,
                feed=feed,
                is_long=request.size >= LONG,
            )
        except BudgetUsedUp as error:
            if tree is self.tree:
                self.stop = error.stop
            raise
        except (InfraError, Aborted) as error:
            self.failure = error
            raise
        self.failure = None
        return turn

    def _check(self, request: ModelRequest) -> None:
        """Refuse what would make the record a lie; note what the recipe decides instead of the client."""
        asked = request.asked
        if request.count > 1:
            raise bad("'n' must be 1 while this model is trained: send a request for each reply", "n")
        if asked.get("logit_bias"):
            raise bad("'logit_bias' draws from another distribution than the trained one", "logit_bias")
        for name, off in _OFF.items():
            if name in asked and asked[name] != off and not (name == "top_k" and asked[name] == -1):
                raise bad(
                    f"'{name}' = {asked[name]} draws from another distribution than the one that is trained, "
                    "which makes importance ratios wrong: leave it out",
                    name,
                )
        if asked.get("temperature", self._temperature) != self._temperature:
            self.counts["temperature_overridden"] += 1
            pair = asked["temperature"], self._temperature
            if pair not in _noted and len(_noted) < 100:
                _noted.add(pair)
                log.warning(
                    "the agent asks for temperature %s; the recipe's, %s, is used, which is trained",
                    *pair,
                )

    def _frozen_tree(self, name: str) -> MessageTree:
        """What a frozen name says is sampled from the policy and recorded nowhere."""
        if name not in self._frozen:
            own = self.tree.trajectory
            scratch = Trajectory(own.task, seed=seed_key(own.seed, "frozen", name))
            self._frozen[name] = self.tree.sibling(scratch, f"frozen.{len(self._frozen)}")
        return self._frozen[name]

    async def _forward(self, address: Address, request: ModelRequest, incoming: Incoming) -> Forwarded:
        """Hand a request on to another server, by the same API."""
        if self._http is None:
            raise ConfigError("this session cannot forward requests")
        body = {**request.raw, "model": address.model or request.model}
        own = os.environ.get("LUDUS_API_KEY", "").strip()
        headers = {"x-api-key": own, "Authorization": f"Bearer {own}"} if own else {}
        url = f"{address.url.removesuffix('/')}/{incoming.path.removeprefix('/v1/')}"
        try:
            async with (
                asyncio.timeout(_FORWARD_SECONDS),
                self._http.open("POST", url, json=body, headers=headers) as answer,
            ):
                return Forwarded(answer.status, answer.content_type, await self._http.read(answer))
        except (ConnectionFailed, TimeoutError) as error:
            self.failure = EngineError(f"the model at {url} does not answer: {error}")
            raise self.failure from error

    async def count_tokens(self, request: ModelRequest) -> int:
        refuse_images(request, self.tree.images)
        is_long = request.size >= LONG
        return await self.tree.count_tokens(request.messages, request.tools, is_long=is_long)

    # Rewards

    def report(self, body: Json) -> None:
        """A reward, of the episode or of one completion; and the answer. What comes again replaces."""
        unknown = sorted(body.keys() - {"reward", "completion", "answer"})
        if unknown:
            raise bad(
                f"there is no field {unknown[0]!r:.40}: send reward, completion, answer", unknown[0]
            )
        answer = body.get("answer")
        if not isinstance(answer, str | None):
            raise bad("'answer' must be a text", "answer")
        self.answer = answer if answer is not None else self.answer
        if body.get("reward") is None:
            if answer is None:
                raise bad("the body has neither 'reward' nor 'answer'", "reward")
            return
        self._check_takes_rewards()
        value, completion = reward_number(body["reward"], "reward"), body.get("completion")
        if completion is None:
            self._reward = value
            return
        turn = str(completion).rpartition("-" if str(completion).startswith("chat") else "_")[2]
        if not self.tree.has_turn(turn):
            raise ApiError(404, f"no reply of this episode has the id {completion!r:.100}")
        self._turn_rewards[turn] = value

    def _check_takes_rewards(self) -> None:
        if not self.takes_rewards:
            raise ApiError(403, NO_REWARDS, code="rewards_not_taken")

    # The end

    async def close(self) -> None:
        """The end: running requests are cancelled; rewards and counts go into the trajectory."""
        self._is_closed = True
        if self.program is not None:
            self.program.cancel()
        tasks = [one.task for one in self._sampling.values() if not one.task.done()]
        for one in self._sampling.values():
            if one.orphaned is not None:
                one.orphaned.cancel()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for one in self._sampling.values():
            if one.task.done() and not one.task.cancelled():
                one.task.exception()  # its waiters have raised it; asyncio warns of errors that are never read
        for tree in (self.tree, *self._frozen.values()):
            await tree.close()
        for turn, value in self._turn_rewards.items():
            self.tree.reward(value, turn)
        if self._reward is not None and self.tree.last is not None:
            self.tree.reward(self._reward)
        unrecorded = sum(not one.is_recorded for one in self._sampling.values())
        counts = {**self.tree.counts, **self.counts, "unrecorded": unrecorded}
        self.tree.trajectory.counts.update(
            {f"model_server/{name}": value for name, value in counts.items()}
        )


class EpisodeService:
    """A `ModelService` whose keys are the episodes that are open now."""

    def __init__(self) -> None:
        self.metrics = ModelMetrics()
        self.pixels = WorkBudget(MOST_PIXELS)
        self._sessions: dict[str, EpisodeSession] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()
        self.metrics.watch("episodes", "Episodes that are open now.", lambda: len(self._sessions))

    def open(self, session: EpisodeSession) -> None:
        """From now on its key is good."""
        self._sessions[session.key] = session

    async def end(self, session: EpisodeSession) -> None:
        """From now on its key is not: 409."""
        if self._sessions.pop(session.key, None) is None:
            return
        self._ended[session.key] = None
        if len(self._ended) > _MOST_ENDED:
            self._ended.popitem(last=False)
        await session.close()

    async def authorize(self, request: web.Request, key: str) -> EpisodeSession:
        session = self.session(key)
        await session.check_client(request.transport)
        return session

    def check_reader(self, request: web.Request, key: str) -> None:
        check_token(request, key, None)

    def session(self, key: str) -> EpisodeSession:
        """The open episode of a key; `ApiError` if there is none."""
        if key in self._ended:
            raise ended()
        if key not in self._sessions:
            raise ApiError(401, "this key belongs to no episode", code="invalid_api_key")
        return self._sessions[key]

    async def close(self) -> None:
        for session in list(self._sessions.values()):
            await self.end(session)


def ended() -> ApiError:
    """A request with the key of an episode that has ended."""
    return ApiError(409, "the episode of this key has ended", code="episode_ended")


def check_models(models: Mapping[str, str]) -> None:
    """`ConfigError` for a table of models that nothing could be trained with."""
    for name, route in models.items():
        if route not in (TRAINED, FROZEN) and not route.startswith(("http://", "https://")):
            raise ConfigError(
                f'agent.program.models.{name} is "trained", "frozen" or an address such as '
                f'"http://host:8000/v1#MODEL", not {route!r}'
            )
    if models and TRAINED not in models.values():
        raise ConfigError('agent.program.models trains none of them: set one to "trained"')


# Which process a connection comes from: the kernel's table of sockets, and who holds which

_PROC = Path("/proc")
_TABLES = (_PROC / "net/tcp", _PROC / "net/tcp6")
CAN_TELL = _TABLES[0].exists()

End = tuple[IPv4Address | IPv6Address, int]
"""One end of a connection."""


def is_of_program(peer: tuple[str, int], own: tuple[str, int], program: int) -> bool:
    """Whether the other end of our connection is held by a process or one that descends from it. Linux only.

    All programs of a user can read each other's environment, with the keys in it: so a key alone says little,
    and the process that shows it is looked at. A descendant that has left the program's session, and whose
    parent has ended, is not known as one.
    """
    ends = _end(*peer[:2]), _end(*own[:2])
    for table in _TABLES:
        lines = table.read_text().splitlines() if table.exists() else []
        for line in (one for one in lines if all(f":{port:04X} " in one for _, port in ends)):
            _, local, remote, *rest = line.split()
            if (_listed(local), _listed(remote)) == ends and rest[6] != "0":
                return any(_holds(pid, f"socket:[{rest[6]}]") for pid in _family(program))
    return False


def _listed(text: str) -> End:
    """An end as the kernel writes it: words of 32 bits in the machine's order, and a port."""
    words, port = text.split(":")
    data = b"".join(bytes.fromhex(words[i : i + 8])[::-1] for i in range(0, len(words), 8))
    return _end(str(ip_address(data)), int(port, 16))


def _end(address: str, port: int) -> End:
    found = ip_address(address.partition("%")[0])
    return getattr(found, "ipv4_mapped", None) or found, port


def _holds(pid: int, socket: str) -> bool:
    with suppress(OSError):  # it has ended, or is another user's
        for entry in (_PROC / str(pid) / "fd").iterdir():
            with suppress(OSError):  # it was closed just now
                if str(entry.readlink()) == socket:
                    return True
    return False


def _family(program: int) -> Iterator[int]:
    """The program and its descendants; then the rest of its session, which needs a scan of all processes."""
    pending = [program]
    while pending:
        pid = pending.pop()
        yield pid
        for tasks in (_PROC / str(pid) / "task").glob("*/children"):
            try:
                pending += map(int, tasks.read_text().split())
            except OSError:
                continue
    for entry in _PROC.glob("[0-9]*/stat"):
        try:
            session = entry.read_text().rpartition(")")[2].split()[3]
        except OSError:
            continue
        if session == str(program):
            yield int(entry.parent.name)
