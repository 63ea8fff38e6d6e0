"""Base of the actors of a run: their owner, and their status.

`RunActor` is what runs in the cluster, `ActorWorker` what the process that has started it knows of it.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ludus.core.failures import Boundary, ConfigError, InfraError
from ludus.core.messages import Json, ToolCall, ToolContext, ToolResult, ToolSpec
from ludus.core.task import Task
from ludus.core.trajectory import Trajectory
from ludus.dist.cluster import Claim, RayCluster, cause_of, load_ray, node_for
from ludus.envs.remote import RemoteEnv
from ludus.remote import user_log
from ludus.remote.channel import Frame
from ludus.remote.supervisor import NoWorker, Supervisor, WorkerDied
from ludus.rewards import build_reward
from ludus.rewards.reward import CheckedReward
from ludus.rewards.scorer import TurnReward, evaluate, evaluate_turns
from ludus.rewards.scores import DEFAULT_TIMEOUT, RewardTraits
from ludus.tools.hosting import PooledHost, ToolFacts, ToolReference
from ludus.tools.hosting.host import LOADER, HostedTools, reply_of
from ludus.tools.tool import malformed
from ludus.tools.wire import error_to_json

_START_SECONDS = 300.0


class RunActor:
    """An actor of a run. It is asked on an event loop, so that it answers while it works.

    On its own it holds a place: rank 0 is the process of `ludus train`, which Ray does not know of.
    """

    def __init__(self, path: list[str], folder: str, run: str, role: str, number: int) -> None:
        """`path` is where modules are looked for, and `folder` where relative paths begin, as in the process
        that started it. Without shared storage this node may not have the folder."""
        sys.path[:] = [*path, *(entry for entry in sys.path if entry not in path)]
        with suppress(OSError):
            os.chdir(folder)
        self._folder = folder
        user_log.refuse()
        self._told: Json = {"run": run, "role": role, "number": number, "pid": os.getpid()}
        self._heard = time.time()

    async def tell(self, facts: Mapping[str, Any]) -> None:
        """Remember what `status` shows."""
        self._told |= facts
        self._heard = time.time()

    async def status(self) -> Json:
        """Its run, its place, and its last request or work."""
        runtime = importlib.import_module("ray").get_runtime_context()
        return {
            **self._told,
            "node": runtime.get_node_id(),
            "gpu_ids": runtime.get_accelerator_ids().get("GPU", []),
            "memory_bytes": sum(_resident(pid) for pid in {os.getpid(), self._told["pid"]}),
            "seconds_since_heard": round(time.time() - self._heard, 1),
        }

    async def live(self) -> None:
        """Never returns: a request that fails when the actor dies, which is how that is noticed."""
        await asyncio.Event().wait()


class ActorWorker:
    """An actor as a worker of a supervisor. Its class has a method `build`, which is called once."""

    def __init__(
        self,
        cluster: RayCluster,
        kind: type[RunActor],
        role: str,
        number: int,
        claim: Claim,
        *setup: Any,
    ) -> None:
        """`setup` are the arguments of `build`."""
        self._cluster, self._kind, self._role, self._number = cluster, kind, role, number
        self._claim, self._setup = claim, setup
        self._actor: Any = None
        self._end: Any = None

    async def start(self) -> Json:
        """Start it; what its `build` gives. `ConfigError` where it does not come up."""
        where = node_for(self._claim, self._number)
        self._actor = self._cluster.start(self._kind, self._role, self._number, self._claim, where)
        try:
            async with asyncio.timeout(_START_SECONDS):
                answer: Json = await self._actor.build.remote(*self._setup)
        except TimeoutError:
            message = f"no actor came up within {_START_SECONDS:g} seconds; has the cluster free cores?"
            raise ConfigError(message) from None
        except load_ray().exceptions.RayError as error:
            raise ConfigError(f"an actor could not be started: {error}") from error
        self._end = self._actor.live.remote()
        return reply_of(answer)

    async def ask(self, method: str, *arguments: Any) -> Any:
        """Call a method of the actor; `WorkerDied` when it dies first. Cancelling it cancels the work."""
        ray = load_ray()
        reference = getattr(self._actor, method).remote(*arguments)
        try:
            return await reference
        except asyncio.CancelledError:
            ray.cancel(reference)
            raise
        except (ray.exceptions.RayActorError, ray.exceptions.TaskCancelledError) as error:
            raise WorkerDied(f"a Ray actor died: {cause_of(error)}") from error

    async def ended(self) -> str:
        try:
            await self._end
        except load_ray().exceptions.RayError as error:
            return f"a Ray actor died: {cause_of(error)}"
        return "a Ray actor ended"

    async def kill(self) -> None:
        if self._actor is not None:
            self._cluster.kill(self._actor)
            self._actor = None


def _resident(pid: int) -> int:
    try:
        text = Path(f"/proc/{pid}/statm").read_text(encoding="ascii")
        return int(text.split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):  # it has ended, or this is no Linux
        return 0


class RayHost(PooledHost):
    """A host of `workers` actors. Joins the cluster at `address` (or `RAY_ADDRESS`), or starts a local one."""

    def __init__(
        self,
        references: Sequence[ToolReference],
        workers: int = 2,
        *,
        address: str | None = None,
        cpus: float = 1.0,
        loader: str = LOADER,
        cluster: RayCluster | None = None,
    ) -> None:
        """`cpus` is what each actor claims of its node. Files named in references must exist on every node.
        With a `cluster`, the actors are those of its run, which ends them."""
        absolute = [_absolute(reference) for reference in references]
        claim = Claim("tool actor", workers, cpus=cpus)

        def make_worker(number: int) -> RayWorker:
            assert self._cluster is not None, "the host is not started"
            return RayWorker(self._cluster, ToolActor, "tools", number, claim, absolute, loader)

        super().__init__(make_worker, workers)
        self._address, self._claim = address, claim
        self._cluster, self._is_ours = cluster, cluster is None

    async def start(self) -> Sequence[ToolFacts]:
        if self._cluster is None:
            address = self._address or os.environ.get("RAY_ADDRESS") or "local"
            self._cluster = RayCluster("tools", address, None, [self._claim])
        return await super().start()

    async def stop(self) -> None:
        await super().stop()
        if self._is_ours and self._cluster is not None:
            self._cluster.close()
            self._cluster = None


class RayWorker(ActorWorker):
    """One actor."""

    async def request(self, operation: str, body: Json) -> Json:
        return reply_of(*await self.ask("perform", {"operation": operation, "body": body}))


class ToolActor(RunActor):
    """An actor that runs tools in the cluster."""

    async def build(self, references: list[ToolReference], loader: str) -> Json:
        self._tools = HostedTools()
        setup = {"operation": "start", "references": references, "loader": loader}
        return (await self._tools.answer(setup))[0]

    async def perform(self, head: Json) -> Frame:
        await self.tell({"requests": self._told.get("requests", 0) + 1})
        return await self._tools.answer(head)


class HostSessions:
    """The episodes of a host, as a tool set and as the sessions of environments."""

    def __init__(self, host: RayHost) -> None:
        self._host = host

    async def open(self, context: ToolContext) -> None:
        await self._host.open(context)

    async def list(self, context: ToolContext) -> Sequence[ToolSpec]:
        return await self._host.list(context)

    async def call(self, call: ToolCall, context: ToolContext) -> ToolResult:
        if call.fault is not None:
            return malformed(call)
        return await self._host.call(call, context)

    async def close(self, context: ToolContext) -> None:
        await self._host.close(context)

    async def observation(self, context: ToolContext, env: str) -> Any:
        return await self._host.ask("observation", context, {"env": env})

    async def ask(self, what: str, context: ToolContext, env: str) -> Json:
        return await self._host.ask(what, context, {"env": env})


class HostedEnvs:
    """Makes environments that live in a host: each instance stands for a session there."""

    is_session = True

    def __init__(self, host: RayHost, described: Json) -> None:
        """`described` is what the host says of the environment."""
        self._sessions, self._described = HostSessions(host), described

    async def __call__(self) -> RemoteEnv:
        return RemoteEnv(self._sessions, self._described)


def _absolute(reference: ToolReference) -> ToolReference:
    """Actors run in folders of their own, so files are named in full."""
    if isinstance(reference, str):
        where, _, attribute = reference.rpartition(":")
        return f"{Path(where).resolve()}:{attribute}" if where.endswith(".py") else reference
    given = reference.get("tool")
    return {**reference, "tool": _absolute(given)} if isinstance(given, str) else reference


_WAIT_SECONDS = 300.0
_GRACE_SECONDS = 60.0
_ATTEMPTS = 3


class RewardActor(RunActor):
    """An actor that scores in the cluster."""

    async def build(self, specs: list[Any]) -> Json:
        try:
            self._rewards: list[Any] = [build_reward(spec) for spec in specs]
        except ConfigError as error:
            return {"error": error_to_json(error)}
        return {"reply": {}}

    async def score(self, number: int, trajectory: Trajectory, task: Task) -> Json:
        """The checked scores of a reward, of the episode or of each action."""
        reward = self._rewards[number]
        await self.tell({"scores": self._told.get("scores", 0) + 1})
        try:
            if isinstance(reward, TurnReward):
                return {"reply": await evaluate_turns(reward, trajectory, task, {})}
            return {"reply": await evaluate(reward, trajectory, task, {})}
        except Exception as error:  # noqa: BLE001 - raised again where the score is wanted
            return {"error": error_to_json(error)}


class RewardHost:
    """The actors that score for a run."""

    def __init__(self, cluster: RayCluster, claim: Claim, specs: Sequence[Any]) -> None:
        def make(number: int) -> ActorWorker:
            return ActorWorker(cluster, RewardActor, "rewards", number, claim, list(specs))

        self._actors = Supervisor(make, claim.count, name="actor for rewards")

    async def start(self) -> None:
        await self._actors.start()

    async def stop(self) -> None:
        await self._actors.close()

    async def score(self, number: int, seconds: float, trajectory: Trajectory, task: Task) -> Any:
        """Score by the reward of this number, within so many seconds."""
        problem = ""
        for _ in range(_ATTEMPTS):
            try:
                member = await self._actors.place(seconds=_WAIT_SECONDS)
            except NoWorker as error:
                problem = str(error)
                break
            try:
                with member.busy():
                    async with asyncio.timeout(seconds + _GRACE_SECONDS):
                        answer = await member.worker.ask("score", number, trajectory, task)
            except TimeoutError:
                problem = f"no score within {seconds + _GRACE_SECONDS:g} seconds"
                break
            except (WorkerDied, load_ray().exceptions.RayError) as death:
                problem = str(death) if isinstance(death, WorkerDied) else cause_of(death)
                member.take_out(problem)
                continue
            return reply_of(answer)
        raise InfraError(Boundary.REWARD, f"reward {number} on the cluster: {problem}")


class HostedReward(CheckedReward):
    """A reward that is computed in an actor; its name and weight are those of the reward itself."""

    uses_envs = False

    def __init__(self, host: RewardHost, number: int, reward: Any) -> None:
        self._host, self._number = host, number
        self.name: str = reward.name
        traits = RewardTraits.of(reward)
        self.weight = traits.weight
        self._seconds = traits.timeout or DEFAULT_TIMEOUT

    async def score(self, trajectory: Trajectory, task: Task, envs: Mapping[str, Any]) -> Any:
        return await self._host.score(self._number, self._seconds, trajectory, task)


class HostedTurnReward(CheckedReward):
    """A reward that scores each action, computed in an actor."""

    uses_envs = False

    def __init__(self, host: RewardHost, number: int, reward: Any) -> None:
        self._whole = HostedReward(host, number, reward)
        self.name, self.weight = self._whole.name, self._whole.weight

    async def score_turns(self, trajectory: Trajectory, task: Task, envs: Mapping[str, Any]) -> Any:
        return await self._whole.score(trajectory, task, envs)


def hosted(host: RewardHost, rewards: Sequence[Any]) -> list[Any]:
    """These rewards, computed there."""
    kinds = [HostedTurnReward if isinstance(one, TurnReward) else HostedReward for one in rewards]
    return [
        kind(host, number, one) for number, (kind, one) in enumerate(zip(kinds, rewards, strict=True))
    ]
