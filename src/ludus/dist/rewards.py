"""Rewards in Ray actors. Scoring changes nothing, so what was lost with an actor is simply scored again.

Who waits for whom: an episode's score waits for the actor with the fewest scores in flight, as long as the
reward's own timeout allows and a little longer. A supervisor replaces actors that die; where none is left,
scores wait for a new one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from ludus.core.failures import Boundary, ConfigError, InfraError
from ludus.core.messages import Json
from ludus.core.task import Task
from ludus.core.trajectory import Trajectory
from ludus.dist.actors import ActorWorker, RunActor
from ludus.dist.cluster import Claim, RayCluster, cause_of, load_ray
from ludus.remote.supervisor import NoWorker, Supervisor, WorkerDied
from ludus.rewards.declared import DEFAULT_TIMEOUT
from ludus.rewards.registry import build_reward
from ludus.rewards.reward import CheckedReward
from ludus.rewards.scorer import evaluate, evaluate_turns
from ludus.tools.hosting.host import error_to_json
from ludus.tools.hosting.worker import reply_of

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
            if hasattr(reward, "score_turns"):
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
        self.weight: float = getattr(reward, "weight", 1.0)
        self._seconds: float = getattr(reward, "timeout", None) or DEFAULT_TIMEOUT

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
    kinds = [HostedTurnReward if hasattr(one, "score_turns") else HostedReward for one in rewards]
    return [
        kind(host, number, one) for number, (kind, one) in enumerate(zip(kinds, rewards, strict=True))
    ]
