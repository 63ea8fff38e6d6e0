"""A reward model: a causal LM's decoder with a linear head per dimension, read at the end of every action.

What an episode is worth as a whole is read at the end of its last action. A conversation is rendered with the
reward model's own tokenizer and chat template, so the policy that it scores may be any other model. A folder
has the LM in Hugging Face format, `heads.safetensors`, and `reward_model.json`: what the heads are.

As rewards, `reward_model` scores an episode, `step_model` each of its actions. Episodes that end at the same
time are scored in one pass, in a thread; what comes meanwhile waits for the next one. The model is loaded with
the first episode.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ludus.chat.formats import load_format
from ludus.chat.renderer import Renderer
from ludus.chat.tokenizers import HFTokenizer
from ludus.core.config import Config
from ludus.core.failures import ConfigError, not_there
from ludus.core.task import Task
from ludus.core.trajectory import Trajectory
from ludus.model import context_limit, decoder_of, sampling_mode, use_ludus_attention
from ludus.model.images import placed_features
from ludus.observe import atomic_directory
from ludus.rewards.scores import checked_name, checked_weight
from ludus.training.checkpoint import save_model
from ludus.training.config.run import ModelConfig
from ludus.training.data.batch import Batch
from ludus.training.data.conversations import Conversation, answers, episode_conversation, trajectory_of
from ludus.training.data.micro_batches import MicroBatch, micro_batches
from ludus.training.models.loading import load_model
from ludus.training.optim.logprobs import at_places, packed_states, shares_prefixes

ABOUT, HEADS = "reward_model.json", "heads.safetensors"
SCORING_TOKENS = 8192
"""Most tokens that are scored in one pass."""


class AboutHeads(Config):
    """The heads of a reward model."""

    kind: Literal["preference", "step"]
    """Trained on pairs, or on scored steps."""
    heads: tuple[str, ...] = Field(min_length=1)
    """Their names, in order."""
    means: tuple[float, ...]
    """The mean score of each over the training data: what counts as average."""
    lowest: float = 0.0
    """For step scores: the lowest score in training."""
    highest: float = 1.0
    """For step scores: the highest."""
    format: str = "hermes"
    """How tool calls are written for it (agent.format)."""


class RewardModel(nn.Module):
    """A causal LM whose decoder is used, and the heads."""

    def __init__(self, model: nn.Module, tokenizer: HFTokenizer, about: AboutHeads) -> None:
        super().__init__()
        use_ludus_attention(model)
        self.model, self.tokenizer, self.about = model, tokenizer, about
        self.renderer = Renderer(tokenizer, load_format(about.format))
        width = int(decoder_of(model).config.hidden_size)
        device = next(model.parameters()).device
        self.heads = nn.Linear(width, len(about.heads), device=device, dtype=torch.float32)
        nn.init.zeros_(self.heads.weight)
        nn.init.zeros_(self.heads.bias)

    def get_decoder(self) -> nn.Module:
        """The decoder that `hidden_states` runs."""
        decoder: nn.Module = decoder_of(self.model)
        return decoder

    def get_output_embeddings(self) -> nn.Module:
        return self.heads

    @property
    def device(self) -> torch.device:
        return self.heads.weight.device

    def scores_at(self, batch: MicroBatch) -> Tensor:
        """[A, heads]: the scores at the trained tokens of a micro-batch, which are the last ones of actions."""
        placed = placed_features(self.model, batch.images)
        hidden_UD, index_T = packed_states(self, batch, placed)
        scores_AH: Tensor = self.heads(at_places(hidden_UD, index_T, batch.trained_index_A).float())
        return scores_AH

    def rows(self, conversations: Sequence[Conversation]) -> tuple[Batch, Tensor, list[int]]:
        """(batch, place_A, counts): conversations as rows, in which the last token of each action is trained.

        `place_A` are the places of these tokens, action by action, and `counts` the actions by conversation.
        """
        shown = [trajectory_of(one, self.renderer, ()) for one in conversations]
        batch = Batch.of(shown)
        counts = torch.bincount(batch.trajectory_T[_ends(batch)], minlength=len(shown)).tolist()
        batch, place_A = _shortened(batch, _ends(batch), context_limit(self.model))
        trained_T = torch.zeros_like(batch.action_T).index_fill(0, place_A, True)
        return replace(batch, trained_T=trained_T), place_A, counts

    @torch.no_grad()
    def score(self, conversations: Sequence[Conversation]) -> list[Tensor]:
        """For each conversation [actions, heads], in the order of its actions, on the host."""
        batch, place_A, counts = self.rows(conversations)
        scores_TH = torch.zeros(len(batch.tokens_T), len(self.about.heads))
        with sampling_mode(self):
            for part in micro_batches(batch, SCORING_TOKENS, share=shares_prefixes(self)):
                scores_TH[part.source_index_A] = self.scores_at(part.to(self.device)).cpu()
        return list(torch.split(scores_TH[place_A], counts))


def _ends(batch: Batch) -> Tensor:
    """The place of the last token of each turn."""
    turn_T = batch.turn_T
    is_last_T = turn_T != torch.cat([turn_T[1:], turn_T.new_full((1,), -1)])
    return (is_last_T & batch.action_T).nonzero().squeeze(1)


def _shortened(batch: Batch, place_A: Tensor, limit: int | None) -> tuple[Batch, Tensor]:
    """Rows that are longer than the model can read lose their beginnings, and the places in the rest.

    The actions that are lost have the first token that is left as their place.
    """
    lengths_R = batch.lengths_R
    kept_R = lengths_R if limit is None else lengths_R.clamp(max=limit)
    first_R = lengths_R.cumsum(0) - kept_R
    """The first token that is kept of each row."""
    if torch.equal(kept_R, lengths_R):
        return batch, place_A
    row_A = torch.searchsorted(lengths_R.cumsum(0), place_A, right=True)
    starts_R = kept_R.cumsum(0) - kept_R
    source_T = torch.cat([torch.arange(a, a + n) for a, n in zip(first_R, kept_R, strict=True)])
    columns = {
        one.name: getattr(batch, one.name)[source_T] for one in fields(batch) if one.name.endswith("_T")
    }
    images = [
        span.moved(int(start))
        for row, start in enumerate(starts_R)
        for span in batch.images_of(int(first_R[row]), int(kept_R[row]))
    ]
    short = replace(batch, lengths_R=kept_R, images=tuple(images), turns=(), **columns)
    return short, starts_R[row_A] + (place_A - first_R[row_A]).clamp(min=0)


def save_reward_model(folder: Path, reward_model: RewardModel) -> None:
    """Write it; the folder appears whole or not at all."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with atomic_directory(folder) as made:
        save_model(made, reward_model.model, reward_model.tokenizer)
        heads = {name: one.detach().cpu() for name, one in reward_model.heads.state_dict().items()}
        save_file(heads, made / HEADS)
        (made / ABOUT).write_text(reward_model.about.model_dump_json(indent=2), encoding="utf-8")


def load_reward_model(folder: str | Path, device: str = "auto") -> RewardModel:
    """Load the files of `save_reward_model`."""
    path = Path(folder)
    if not (path / ABOUT).is_file():
        raise ConfigError(
            f"{not_there(path / ABOUT)}: a reward model is a folder that ludus reward-model has made"
        )
    about = AboutHeads.parse(json.loads((path / ABOUT).read_text(encoding="utf-8")), "the reward model")
    model, tokenizer = load_model(ModelConfig(name=str(path), device=device), seed=0)
    made = RewardModel(model, tokenizer, about)
    made.heads.load_state_dict(load_file(path / HEADS))
    return made.requires_grad_(False).eval()


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
