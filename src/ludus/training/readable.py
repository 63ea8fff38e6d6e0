"""Whether a model can read what it is to learn from.

What the engine played, it has read. What others wrote down may be longer than the model can look at, or hold
tokens that it does not have: found out here, and not by an index out of range in the middle of a step.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from ludus.core.failures import ConfigError
from ludus.core.trajectory import Trajectory
from ludus.engine import vocabulary_size
from ludus.engine.hf_model import context_limit
from ludus.training.rows import rows_of


def check_readable(trajectories: Sequence[Trajectory], model: nn.Module, what: str) -> None:
    """Refuse episodes that the model cannot read; `what` is what one of them is called."""
    limit, vocabulary = context_limit(model), vocabulary_size(model)
    for number, trajectory in enumerate(trajectories, start=1):
        for row in rows_of([trajectory]):
            if limit is not None and len(row.tokens) > limit:
                raise ConfigError(
                    f"{what} {number} has {len(row.tokens)} tokens, and the model can look at {limit}: shorten "
                    "it or leave it out, or use a model with a longer context"
                )
            if max(row.tokens) >= vocabulary:
                raise ConfigError(
                    f"{what} {number} holds the token {max(row.tokens)}, and the model has {vocabulary}: is "
                    "the tokenizer another model's, or were the embeddings not resized?"
                )
