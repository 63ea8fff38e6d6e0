"""The model: a causal LM's decoder with a linear head per dimension, read at the end of every action.

What an episode is worth as a whole is read at the end of its last action. A conversation is rendered with the
reward model's own tokenizer and chat template, so the policy that it scores may be any other model.

A folder has the LM in Hugging Face format, `heads.safetensors`, and `reward_model.json`: what the heads are.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from pydantic import Field
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ludus.chat.formats import load_format
from ludus.chat.renderer import Renderer
from ludus.chat.tokenizers import HFTokenizer
from ludus.core.config import Config
from ludus.core.failures import ConfigError, not_there
from ludus.model import context_limit, decoder_of, sampling_mode, use_ludus_attention
from ludus.model.image_features import placed_features
from ludus.observe import atomic_directory
from ludus.training.checkpoint import save_model
from ludus.training.config.model import ModelConfig
from ludus.training.data.conversations import Conversation, trajectory_of
from ludus.training.data.packing import PackedRows, Row, pack_rows, rows_of, to_device
from ludus.training.models.loading import load_model
from ludus.training.optim.forward import ForwardInputs, packed_states, shares_prefixes

ABOUT, HEADS = "reward_model.json", "heads.safetensors"
SCORING_TOKENS = 8192
"""Most tokens that are scored in one pass."""


class AboutHeads(Config):
    """What a reward model's heads are."""

    kind: Literal["preference", "step"]
    """Trained on pairs, or on scored steps."""
    heads: tuple[str, ...] = Field(min_length=1)
    """Their names, in order."""
    means: tuple[float, ...]
    """The mean score of each over the training data: what counts as average."""
    lowest: float = 0.0
    """Of steps: the lowest score it was shown."""
    highest: float = 1.0
    """Of steps: the highest."""
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
        """What `hidden_states` runs."""
        decoder: nn.Module = decoder_of(self.model)
        return decoder

    def get_output_embeddings(self) -> nn.Module:
        return self.heads

    @property
    def device(self) -> torch.device:
        return self.heads.weight.device

    def at_action_ends(self, packed: PackedRows, place_A: Tensor) -> Tensor:
        """[A, heads]: the scores at these places of a micro-batch, which are the last tokens of actions."""
        inputs = ForwardInputs.of(packed, self.device)
        place_A = inputs.at(to_device(place_A, self.device))
        placed = placed_features(self.model, packed.images)
        scores_AH: Tensor = self.heads(packed_states(self, inputs, placed)[place_A].float())
        return scores_AH

    def rows(self, conversation: Conversation) -> list[RatedRow]:
        """A conversation as rows of tokens, each with the places at which its actions end."""
        rows = rows_of([trajectory_of(conversation, self.renderer, ())])
        return [_rated(row, context_limit(self.model)) for row in rows]

    @torch.no_grad()
    def score(self, conversations: Sequence[Conversation]) -> list[Tensor]:
        """For each conversation [actions, heads], in the order of its actions, on the host."""
        rated = [(number, row) for number, one in enumerate(conversations) for row in self.rows(one)]
        found: dict[int, Tensor] = {}
        rows = [row.row for _, row in rated]
        starts = _starts(rows)
        with sampling_mode(self):
            share = shares_prefixes(self)
            for packed in pack_rows(rows, range(len(rows)), SCORING_TOKENS, share=share):
                numbers, place_A = ends_within(packed, [row.ends for _, row in rated], starts)
                scores_AH = self.at_action_ends(packed, place_A).cpu()
                for number in dict.fromkeys(numbers):
                    found[number] = scores_AH[[n == number for n in numbers]]
        scores: list[list[Tensor]] = [[] for _ in conversations]
        for place, (number, _) in enumerate(rated):
            scores[number].append(found[place])
        return [torch.cat(parts) for parts in scores]


@dataclass(frozen=True, slots=True)
class RatedRow:
    """A row, and where its actions end."""

    row: Row
    ends: list[int]


def _rated(row: Row, limit: int | None) -> RatedRow:
    """What is longer than the model can read loses its beginning; the actions there have their end at 0."""
    ends, place, left = [], 0, [len(turn.tokens) for turn in row.turns]
    for position, is_action in enumerate(row.action_mask):
        if is_action:
            left[place] -= 1
            if not left[place]:
                ends.append(position)
                place += 1
    cut = max(0, len(row.tokens) - limit) if limit else 0
    if not cut:
        return RatedRow(row, ends)
    images = tuple(span.moved(-cut) for span in row.images if span.start >= cut)
    short = replace(row, tokens=row.tokens[cut:], action_mask=row.action_mask[cut:], images=images)
    return RatedRow(short, [max(0, end - cut) for end in ends])


def _starts(rows: Sequence[Row]) -> list[int]:
    starts = [0]
    for row in rows:
        starts.append(starts[-1] + len(row.tokens))
    return starts


def ends_within(
    packed: PackedRows, ends: Sequence[Sequence[int]], starts: Sequence[int]
) -> tuple[list[int], Tensor]:
    """The rows of a micro-batch by number, once for each of their ends, and these ends' places in it."""
    row_at = {start: number for number, start in enumerate(starts[:-1])}
    numbers: list[int] = []
    places: list[int] = []
    first = 0
    for length in packed.lengths:
        number = row_at[int(packed.source_index_T[first])]
        for end in ends[number]:
            numbers.append(number)
            places.append(first + end)
        first += length
    return numbers, torch.tensor(places, dtype=torch.long)


def save_reward_model(folder: Path, reward_model: RewardModel) -> None:
    """Write it; the folder appears whole or not at all."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with atomic_directory(folder) as made:
        save_model(made, reward_model.model, reward_model.tokenizer)
        heads = {name: one.detach().cpu() for name, one in reward_model.heads.state_dict().items()}
        save_file(heads, made / HEADS)
        (made / ABOUT).write_text(reward_model.about.model_dump_json(indent=2), encoding="utf-8")


def load_reward_model(folder: str | Path, device: str = "auto") -> RewardModel:
    """What `save_reward_model` wrote."""
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
