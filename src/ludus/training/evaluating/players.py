"""Opening a model, wherever it is, such that it can play: a folder, the hub, a run, a server's address."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ludus.core.failures import ConfigError
from ludus.core.tokenizer import Tokenizer
from ludus.engine.remote import (
    Address,
    RemoteEngine,
    RemoteOptions,
    TranscriptTokenizer,
    is_address,
)
from ludus.observe import RunFolder
from ludus.rollouts.formats import load_format
from ludus.rollouts.tokenizers import load_tokenizer
from ludus.sandbox import close_shared_sandboxes
from ludus.training.parts import Parts
from ludus.training.recipe import Recipe
from ludus.training.set_building import close_task_sets
from ludus.training.task_sets import TaskSet

_WEIGHTS = (".safetensors", ".bin", ".json")


@dataclass(frozen=True, slots=True)
class Player:
    """A model that can be opened. `label` is what reports call it, `name` what it is loaded by.

    Without a name it is the recipe's own model. `tokenizer` (a folder or hub name) is for an address: with
    it, tokens are sent; without one, messages.
    """

    label: str
    name: str | None
    tokenizer: str | None = None
    remote: RemoteOptions = field(default_factory=RemoteOptions)
    key: str | None = field(default=None, repr=False)

    @property
    def is_remote(self) -> bool:
        return self.name is not None and is_address(self.name)

    def identity(self, recipe: Recipe) -> dict[str, Any]:
        """What tells this model from others: results of different ones must not mix."""
        if self.is_remote:
            return {
                "address": self.name,
                "tokenizer": self.tokenizer,
                "prompt": self.remote.prompt,
                **({"tools": "native"} if self.remote.tools == "native" else {}),
                "request": dict(self.remote.request),
            }
        model = self.recipe(recipe).model
        identity: dict[str, Any] = model.model_dump(mode="json")
        if model.name is not None and Path(model.name).is_dir():
            identity["name"] = str(Path(model.name).resolve())
            identity["files"] = _files(Path(model.name))
        if model.scratch is not None:
            identity["seed"] = recipe.seed
        return identity

    def recipe(self, recipe: Recipe) -> Recipe:
        """The recipe with this model in it."""
        if self.name is None or self.is_remote:
            return recipe
        chosen = {"name": self.name, "scratch": None}
        return recipe.model_copy(update={"model": recipe.model.model_copy(update=chosen)})

    @asynccontextmanager
    async def open(self, recipe: Recipe, parts: Parts) -> AsyncIterator[list[TaskSet]]:
        """The task sets, ready to be played by the model; all that was opened is closed at the end."""
        from ludus.training.workshop import assemble, task_sets_on  # torch comes with it

        if not self.is_remote:
            async with await assemble(self.recipe(recipe), parts) as workshop:
                yield workshop.task_sets
            return
        assert self.name is not None
        tokenizer: Tokenizer = (
            load_tokenizer(self.tokenizer) if self.tokenizer else TranscriptTokenizer()
        )
        format = load_format(recipe.agent.format, **recipe.agent.format_options)
        if self.remote.tools == "native" and (self.tokenizer or format.name != "hermes"):
            raise ConfigError(
                'native tools are for chat servers: leave out --tokenizer, and use agent.format = "hermes"'
            )
        engine = RemoteEngine(
            self.name,
            tokenizer,
            key=self.key,
            options=self.remote,
            write_calls=format.render_action,
        )
        sets: list[TaskSet] = []
        try:
            sets = task_sets_on(engine, tokenizer, recipe, parts)
            await engine.check()
            yield sets
        finally:
            await engine.close()
            await close_task_sets(sets)
            await close_shared_sandboxes()


async def player_of(
    model: str | None,
    recipe: Recipe,
    *,
    tokenizer: str | None = None,
    remote: RemoteOptions | None = None,
    key: str | None = None,
) -> Player:
    """The player that a user's words mean.

    A run's folder stands for its newest checkpoint, an address without a model for the only one there.
    """
    if model is None:
        return Player(recipe.model.name or f"{recipe.name} (from scratch)", None)
    if is_address(model):
        parsed = Address.parse(model)
        address = str(parsed if parsed.model else await _only_model(parsed, key))
        return Player(address, address, tokenizer, remote or RemoteOptions(), key)
    run = RunFolder(model)
    if not run.is_run:
        return Player(model, model)
    latest = run.latest_checkpoint()
    if latest is None:
        raise ConfigError(f"the run {model} has no checkpoint yet")
    return Player(f"{model}, step {latest.step}", str(latest.path))


async def _only_model(address: Address, key: str | None) -> Address:
    engine = RemoteEngine(address, TranscriptTokenizer(), key=key)
    try:
        await engine.check()
        return engine.address
    finally:
        await engine.close()


def _files(folder: Path) -> list[list[Any]]:
    """The model's files by name, size and time: weights that were replaced are another model."""
    found = [(file, file.stat()) for file in sorted(folder.iterdir()) if file.suffix in _WEIGHTS]
    return [[file.name, stat.st_size, stat.st_mtime_ns] for file, stat in found]
