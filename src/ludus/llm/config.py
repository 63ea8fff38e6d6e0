"""A model by what a recipe says about it: an address, or a table with an address and its limits.

Beside addresses there are models of this process: the policy that is trained, and frozen ones.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from ludus.core.config import Config, Place, cache_folder, toml_table
from ludus.core.failures import ConfigError
from ludus.core.generation import ChatModel, ChatOptions, ChatReply, policy_model
from ludus.core.messages import Message
from ludus.core.registry import Registry
from ludus.llm.limits import CachedChatModel, ChatBudget, ChatLimits, LimitedChatModel
from ludus.llm.remote import Address, ModelServerClient, RemoteChatModel, is_address
from ludus.remote.client import RetryPolicy
from ludus.remote.threads import run_sync

POLICY = "policy"
"""The name of the model that is trained or evaluated."""
LOADERS = Registry("loader of chat models", group="ludus.chat_models")
"""`frozen` loads a model's weights, by its folder or hub name, as a `ChatModel`."""


class ChatModelConfig(Config):
    """A model that is asked: a judge, a writer of tasks."""

    address: str
    """http://host:port/v1#MODEL; `policy`, the trained model itself; or a folder or hub name, loaded frozen."""
    name: str | None = None
    """Name in reports and in the cache; the address if left out."""
    key_variable: str | None = None
    """The environment variable with its key, if not LUDUS_API_KEY."""
    seconds: float = Field(default=600.0, gt=0)
    """One request with all its attempts; waiting goes on while the server answers other requests from here."""
    retries: int = Field(default=6, ge=0)
    """How often a request is sent again after an overload, an error of the server's, or none at all."""
    concurrency: int = Field(default=32, ge=1)
    """Most requests at once."""
    requests_per_minute: float | None = Field(default=None, gt=0)
    """Most requests a minute."""
    tokens_per_minute: float | None = Field(default=None, gt=0)
    """Most tokens a minute, of questions and answers together."""
    wait_seconds: float = Field(default=600.0, gt=0)
    """Longest wait for a turn by these limits."""
    budget: ChatBudget = ChatBudget()
    """The most that may be spent."""
    cache: bool | Place = False
    """Keep answers and give them again to the same questions: a folder, or true for `chat` in LUDUS_CACHE."""
    request: dict[str, Any] = Field(default_factory=dict)
    """Further fields of every request."""


def load_chat_model(spec: str | Mapping[str, Any] | ChatModel, **changes: Any) -> ChatModel:
    """A model by its address or table, with these keys of the table changed; what is a model stays as it is."""
    if isinstance(spec, ChatModel):
        return spec
    config = ChatModelConfig.parse({**model_table(spec), **changes}, "the table of a model")
    return limited(_source(config), config)


def model_table(spec: str | Mapping[str, Any]) -> dict[str, Any]:
    """The table of a model: a text is its address, or the table itself in TOML, as on a command line."""
    if not isinstance(spec, str):
        return dict(spec)
    return toml_table(spec) if spec.lstrip().startswith("{") else {"address": spec}


async def check_reachable(*specs: str | Mapping[str, Any]) -> None:
    """`ConfigError` where there is no server at the address of one of these models, or it wants another key."""
    for spec in specs:
        config = ChatModelConfig.parse(model_table(spec), "the table of a model")
        if not is_address(config.address):
            continue
        client = ModelServerClient(_key(config.key_variable), 1)
        try:
            await client.reach(Address.parse(config.address))
        finally:
            await client.close()


def _source(config: ChatModelConfig) -> ChatModel:
    if config.address == POLICY:
        return PolicyChatModel()
    if not is_address(config.address):
        return FrozenChatModel(config.address)
    return RemoteChatModel(
        Address.parse(config.address),
        key=_key(config.key_variable),
        policy=RetryPolicy(config.seconds, config.retries),
        connections=config.concurrency,
        request=config.request,
        name=config.name,
    )


def limited(model: ChatModel, config: ChatModelConfig) -> ChatModel:
    """A model within the limits, the budget and the cache of its table."""
    limits = ChatLimits(
        config.concurrency, config.requests_per_minute, config.tokens_per_minute, config.wait_seconds
    )
    model = LimitedChatModel(model, limits, config.budget)
    if config.cache is False:
        return model
    folder = cache_folder() / "chat" if config.cache is True else Path(config.cache)
    return CachedChatModel(model, folder)


def _key(variable: str | None) -> str | None:
    """The key in this variable; None means the usual one."""
    if variable is None:
        return None
    if variable not in os.environ:
        raise ConfigError(f"key_variable = {variable!r}: there is no such environment variable")
    return os.environ[variable]


class PolicyChatModel:
    """The policy itself, as it is when it is asked: it can be asked while a run scores its episodes."""

    @property
    def name(self) -> str:
        return self._policy().name

    async def chat(self, messages: Sequence[Message], options: ChatOptions = ChatOptions()) -> ChatReply:  # noqa: B008 - frozen
        return await self._policy().chat(messages, options)

    async def close(self) -> None:
        """It belongs to the run."""

    def _policy(self) -> ChatModel:
        found = policy_model.get()
        if found is None:
            raise ConfigError(
                "the model 'policy' is the one that is trained or evaluated, and there is none here: name an "
                "address such as http://127.0.0.1:8000/v1#NAME, a folder, or a model on the hub"
            )
        return found


class FrozenChatModel:
    """A model by its folder or hub name; its weights are loaded when it is first asked."""

    def __init__(self, source: str) -> None:
        self.name = source
        self._loaded: ChatModel | None = None

    async def chat(self, messages: Sequence[Message], options: ChatOptions = ChatOptions()) -> ChatReply:  # noqa: B008 - frozen
        if self._loaded is None:
            loaded: ChatModel = await run_sync(LOADERS.load("frozen"), self.name)
            self._loaded = loaded
        return await self._loaded.chat(messages, options)

    async def close(self) -> None:
        if self._loaded is not None:
            await self._loaded.close()
