"""Reward models as rewards: `reward_model` scores an episode, `step_model` each of its actions.

Who waits for whom: episodes that end at the same time are scored in one pass. A scoring runs in a thread, and
what comes meanwhile waits for the next one. The model is loaded with the first episode.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ludus.core.failures import ConfigError
from ludus.core.task import Task
from ludus.core.trajectory import Trajectory
from ludus.rewards.scores import checked_name, checked_weight
from ludus.training.data.conversations import Conversation, answers, episode_conversation
from ludus.training.reward_models.model import ABOUT, RewardModel, load_reward_model


class _Scorer:
    """A reward model that scores what waits together."""

    def __init__(self, folder: str, device: str, kind: str, name: str) -> None:
        self._folder, self._device, self._kind, self._name = folder, device, kind, name
        self._model: RewardModel | None = None
        self._waiting: list[tuple[Conversation, asyncio.Future[Tensor]]] = []
        self._running: asyncio.Task[None] | None = None
        if not (Path(folder) / ABOUT).is_file():
            raise ConfigError(
                f"{name!r}: {folder} is no reward model; ludus reward-model DATA --out {folder} makes one"
            )

    async def score(self, conversation: Conversation) -> Tensor:
        """[actions, heads]."""
        future: asyncio.Future[Tensor] = asyncio.get_running_loop().create_future()
        self._waiting.append((conversation, future))
        if self._running is None or self._running.done():
            self._running = asyncio.create_task(self._run())
        return await future

    async def _run(self) -> None:
        await asyncio.sleep(0)  # what ends in the same turn of the event loop goes along
        while self._waiting:
            batch, self._waiting = self._waiting, []
            try:
                found = await asyncio.to_thread(self._score, [one for one, _ in batch])
            except Exception as error:  # noqa: BLE001 - every caller gets it
                for _, future in batch:
                    if not future.done():
                        future.set_exception(error)
                continue
            for (_, future), scores in zip(batch, found, strict=True):
                if not future.done():
                    future.set_result(scores)

    def _score(self, conversations: list[Conversation]) -> list[Tensor]:
        return self.model.score(conversations)

    @property
    def model(self) -> RewardModel:
        if self._model is None:
            made = load_reward_model(self._folder, self._device)
            if made.about.kind != self._kind:
                other = {"preference": "reward_model", "step": "step_model"}[made.about.kind]
                raise ConfigError(
                    f"{self._name!r}: {self._folder} was trained on {made.about.kind}s: use {other!r}"
                )
            self._model = made
        return self._model


class ModelReward:
    """A reward model's score of a whole episode, from 0 to 1: sigmoid(score - average score).

    So 0.5 is an average episode of the data that the model was trained on. `heads` weights the model's heads
    (the head `overall` alone when left out); each is logged as `<name>_<head>`. An episode in which the model
    said nothing is not scored.
    """

    uses_envs = False
    timeout = None

    def __init__(
        self,
        folder: str,
        *,
        heads: Mapping[str, float] | None = None,
        device: str = "auto",
        name: str = "reward_model",
        weight: float = 1.0,
    ) -> None:
        self.name, self.weight = checked_name(name), checked_weight(weight, name)
        self._scorer = _Scorer(folder, device, "preference", name)
        self._heads = dict(heads) if heads is not None else None

    async def score(
        self, trajectory: Trajectory, task: Task, envs: Mapping[str, Any]
    ) -> dict[str, float]:
        conversation = episode_conversation(trajectory)
        if not answers(conversation):
            return {}
        scores_AH = await self._scorer.score(conversation)
        about = self._scorer.model.about
        shares_H = torch.sigmoid(scores_AH[-1].double() - torch.tensor(about.means).double()).tolist()
        found = dict(zip(about.heads, shares_H, strict=True))
        weights = self._weights(about.heads)
        total = sum(weights.values())
        reward = sum(found[name] * share for name, share in weights.items()) / total
        return {self.name: reward, **{f"{self.name}_{name}": value for name, value in found.items()}}

    def _weights(self, heads: tuple[str, ...]) -> dict[str, float]:
        weights = self._heads if self._heads is not None else {heads[0]: 1.0}
        unknown = weights.keys() - set(heads)
        if unknown or not weights or min(weights.values()) <= 0:
            raise ConfigError(
                f"{self.name!r}: heads gives weights above 0 to heads of the model, which are: "
                f"{', '.join(heads)}"
            )
        return weights


class StepModelReward:
    """A process reward model: a score for each action, within the range of the scores that it has learned."""

    uses_envs = False
    timeout = None

    def __init__(
        self, folder: str, *, device: str = "auto", name: str = "step_model", weight: float = 1.0
    ) -> None:
        self.name, self.weight = checked_name(name), checked_weight(weight, name)
        self._scorer = _Scorer(folder, device, "step", name)

    async def score_turns(
        self, trajectory: Trajectory, task: Task, envs: Mapping[str, Any]
    ) -> list[float | None]:
        conversation = episode_conversation(trajectory)
        said = len(answers(conversation))
        if said != trajectory.turns or not said:
            return [
                None
            ] * trajectory.turns  # several conversations in one episode: not known which is which
        scores_AH = await self._scorer.score(conversation)
        about = self._scorer.model.about
        return [min(max(float(score), about.lowest), about.highest) for score in scores_AH[:, 0]]
