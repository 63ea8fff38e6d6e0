"""Models of this process that are asked: the policy that is trained, or a frozen one."""

from __future__ import annotations

from collections.abc import Sequence

from ludus.core.chat import ChatModel, ChatOptions, ChatReply, policy_model
from ludus.core.failures import ConfigError
from ludus.core.messages import Message
from ludus.core.registry import Registry
from ludus.remote.threads import run_sync

POLICY = "policy"
"""The name of the model that is trained or evaluated."""
LOADERS = Registry("loader of chat models", group="ludus.chat_models")
"""`frozen` loads a model's weights, by its folder or hub name, as a `ChatModel`."""


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
