"""Rewards in Ray actors. Scoring changes nothing, so what was lost with an actor is simply scored again.

Who waits for whom: an episode's score waits for the actor with the fewest scores under way, as long as the
reward's own timeout allows and a little longer. An actor that dies is replaced by whoever finds out first; the
others wait for the new one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from ludus.core.failures import Boundary, ConfigError, InfraError
from ludus.core.messages import Json
from ludus.core.task import Task
from ludus.core.trajectory import Trajectory
from ludus.dist.actors import RunActor
from ludus.dist.cluster import Claim, RayCluster, cause_of, load_ray
from ludus.dist.tools import node_for
from ludus.rewards.declared import DEFAULT_TIMEOUT
from ludus.rewards.registry import build_reward
from ludus.rewards.reward import CheckedReward
from ludus.rewards.scorer import evaluate, evaluate_turns
from ludus.tools.hosting.host import error_from_json, error_to_json

_START_SECONDS = 300.0
_GRACE_SECONDS = 60.0
_ATTEMPTS = 3


class RewardActor(RunActor):
    """What scores in the cluster."""

    async def build(self, specs: list[Any]) -> Json:
        try:
            self._rewards: list[Any] = [build_reward(spec) for spec in specs]
        except ConfigError as error:
            return {"error": error_to_json(error)}
        return {}

    async def score(self, number: int, trajectory: Trajectory, task: Task) -> Json:
        """The checked scores of a reward, of the episode or of each action."""
        reward = self._rewards[number]
        await self.tell({"scores": self._told.get("scores", 0) + 1})
        try:
            if hasattr(reward, "score_turns"):
                return {"scores": await evaluate_turns(reward, trajectory, task, {})}
            return {"scores": await evaluate(reward, trajectory, task, {})}
        except Exception as error:  # noqa: BLE001 - raised again where the score is wanted
            return {"error": error_to_json(error)}


class RewardHost:
    """The actors that score for a run."""

    def __init__(self, cluster: RayCluster, claim: Claim, specs: Sequence[Any]) -> None:
        self._cluster, self._claim, self._specs = cluster, claim, list(specs)
        self._actors: list[Any] = [None] * claim.count
        self._running = [0] * claim.count
        self._locks = [asyncio.Lock() for _ in range(claim.count)]

    async def start(self) -> None:
        await asyncio.gather(*(self._replace(place, None) for place in range(self._claim.count)))

    async def score(self, number: int, seconds: float, trajectory: Trajectory, task: Task) -> Any:
        """What the reward of this number says, within so many seconds."""
        ray, problem = load_ray(), ""
        for _ in range(_ATTEMPTS):
            place = min(range(len(self._running)), key=self._running.__getitem__)
            actor = self._actors[place]
            self._running[place] += 1
            try:
                async with asyncio.timeout(seconds + _GRACE_SECONDS):
                    answer: Json = await actor.score.remote(number, trajectory, task)
                if "error" in answer:
                    raise error_from_json(answer["error"])
                return answer["scores"]
            except TimeoutError:
                problem = f"no score within {seconds + _GRACE_SECONDS:g} seconds"
                break
            except ray.exceptions.RayError as error:
                problem = f"its actor died: {cause_of(error)}"
                await self._replace(place, actor)
            finally:
                self._running[place] -= 1
        raise InfraError(Boundary.REWARD, f"reward {number} on the cluster: {problem}")

    async def _replace(self, place: int, dead: Any) -> None:
        async with self._locks[place]:
            if self._actors[place] is not dead:
                return  # somebody else was first
            where = node_for(self._claim, place)
            actor = self._cluster.start(RewardActor, "rewards", place, self._claim, where)
            try:
                async with asyncio.timeout(_START_SECONDS):
                    answer: Json = await actor.build.remote(self._specs)
            except TimeoutError:
                message = f"no actor for rewards came up within {_START_SECONDS:g} seconds"
                raise InfraError(Boundary.REWARD, message) from None
            if "error" in answer:
                raise error_from_json(answer["error"])
            self._actors[place] = actor


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
    """The same of a reward that scores each action."""

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
