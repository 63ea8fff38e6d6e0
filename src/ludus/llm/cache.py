"""Answers that are kept: the same request gets the same answer, in this process and in the next.

The key is the content: the model's name, the messages and the options. Each answer is a small file that is
written whole or not at all, so that several processes can share a folder. With a temperature above 0, different
answers to one question take different seeds. Answers that could not be used are forgotten (`ask_json`), and
asked for again by the next process.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import secrets
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from pydantic import TypeAdapter

from ludus.core.chat import ChatModel, ChatOptions, ChatReply
from ludus.core.messages import Message
from ludus.core.strict_json import decode
from ludus.llm.limits import ChatUsage, CountsUsage
from ludus.remote.threads import run_sync

_REPLY = TypeAdapter(ChatReply)


def request_key(name: str, messages: Sequence[Message], options: ChatOptions) -> str:
    """Cache key of a request."""
    said = [
        {**message.as_chat(), "media": [[item.kind, item.sha256] for item in message.media]}
        for message in messages
    ]
    text = json.dumps([1, name, said, asdict(options)], sort_keys=True, default=str)
    return hashlib.sha256(text.encode("utf-8", errors="surrogatepass")).hexdigest()


class ReplyFolder:
    """Answers by key, as files. What cannot be read is no answer; what cannot be written is left out."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).expanduser()

    def read(self, key: str) -> ChatReply | None:
        with contextlib.suppress(OSError, ValueError, RecursionError):
            return decode(_REPLY, json.loads(self._file(key).read_bytes()))
        return None

    def write(self, key: str, reply: ChatReply) -> None:
        file = self._file(key)
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_name(f".{key}.{secrets.token_hex(4)}")
        try:
            part.write_text(json.dumps(asdict(reply)), encoding="utf-8")
            part.replace(file)
        finally:
            part.unlink(missing_ok=True)

    def remove(self, key: str) -> None:
        with contextlib.suppress(OSError):
            self._file(key).unlink()

    def _file(self, key: str) -> Path:
        return self.folder / key[:2] / f"{key}.json"


@dataclass(slots=True)
class _Shared:
    task: asyncio.Task[ChatReply]
    callers: int = 0


class CachedChatModel:
    """A model whose answers are kept in a folder; equal requests at the same time are one request."""

    def __init__(self, inner: ChatModel, folder: str | Path) -> None:
        self.inner, self._store = inner, ReplyFolder(folder)
        self.usage = inner.usage if isinstance(inner, CountsUsage) else ChatUsage()
        self._shared: dict[tuple[int, str], _Shared] = {}

    @property
    def name(self) -> str:
        return self.inner.name

    async def chat(self, messages: Sequence[Message], options: ChatOptions = ChatOptions()) -> ChatReply:  # noqa: B008 - frozen
        key = request_key(self.name, messages, options)
        place = (id(asyncio.get_running_loop()), key)
        shared = self._shared.get(place)
        joins = shared is not None
        if shared is None:
            shared = _Shared(asyncio.create_task(self._find_or_ask(key, messages, options)))
            self._shared[place] = shared
            shared.task.add_done_callback(lambda _: self._shared.pop(place, None))
        shared.callers += 1
        try:
            reply = await asyncio.shield(shared.task)
        finally:
            shared.callers -= 1
            if shared.callers == 0 and not shared.task.done():  # no caller waits for it any more
                shared.task.cancel()
                self._shared.pop(place, None)
        if joins or reply.is_cached:
            self.usage.cached += 1
            reply = replace(reply, is_cached=True)
        return reply

    async def forget(self, messages: Sequence[Message], options: ChatOptions) -> None:
        """Ask again the next time."""
        await run_sync(self._store.remove, request_key(self.name, messages, options))

    async def close(self) -> None:
        await self.inner.close()

    async def _find_or_ask(
        self, key: str, messages: Sequence[Message], options: ChatOptions
    ) -> ChatReply:
        found = await run_sync(self._store.read, key)
        if found is not None:
            return replace(found, is_cached=True)
        reply = await self.inner.chat(messages, options)
        with contextlib.suppress(OSError):  # a full disk loses answers, not the run
            await run_sync(self._store.write, key, reply)
        return reply
