"""`RemoteChatModel`: a model behind an OpenAI-compatible address, asked over `/chat/completions`."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from ludus.core.failures import Boundary, InfraError
from ludus.core.generation import ChatOptions, ChatReply
from ludus.core.messages import Json, Media, Message
from ludus.llm.http import Address, ModelServerClient, checked_text, first_choice, refusal, token_count
from ludus.remote.client import BadResponse, RequestFailed, RetryPolicy
from ludus.remote.threads import PerLoop

log = logging.getLogger(__name__)

_IMAGES = {
    b"\x89PNG": "image/png",
    b"\xff\xd8\xff": "image/jpeg",
    b"GIF8": "image/gif",
    b"RIFF": "image/webp",
}
_CHARS_PER_TOKEN = 3
"""Where a server does not count: rather too many tokens than too few."""


class ChatError(InfraError):
    """A model that was asked gave no answer, or none that could be used. It has been retried already."""

    def __init__(self, message: str, *, attempts: int = 1) -> None:
        super().__init__(Boundary.CHAT, message, attempts=attempts, retriable=False)


class _Deadlines:
    """The deadlines of an event loop's requests to one server, which are put off while it answers others.

    A server of one model on a CPU answers one request after the other: what waits in its queue is not lost.
    Each may wait for as long again as for every request before it, so that one that hangs ends all the same.
    """

    def __init__(self) -> None:
        self._open: dict[asyncio.Timeout, tuple[float, float]] = {}
        """Of each, its seconds and the latest that it may be put off to."""

    @asynccontextmanager
    async def timeout(self, seconds: float) -> AsyncIterator[asyncio.Timeout]:
        """As `asyncio.timeout`."""
        latest = asyncio.get_running_loop().time() + seconds * (len(self._open) + 1)
        async with asyncio.timeout(seconds) as deadline:
            self._open[deadline] = seconds, latest
            try:
                yield deadline
            finally:
                del self._open[deadline]

    def put_off(self) -> None:
        """The server has answered."""
        now = asyncio.get_running_loop().time()
        for deadline, (seconds, latest) in self._open.items():
            if not deadline.expired():
                deadline.reschedule(min(now + seconds, latest))

    async def close(self) -> None:
        """Nothing to release."""


class RemoteChatModel:
    """A `ChatModel` over HTTP. A request has one deadline over all its attempts (`_Deadlines`)."""

    def __init__(
        self,
        address: Address | str,
        *,
        key: str | None = None,
        policy: RetryPolicy | None = None,
        connections: int = 64,
        request: Mapping[str, Any] | None = None,
        name: str | None = None,
    ) -> None:
        """`request` has further fields of every request; None leaves a field out that would be sent.

        The key is `LUDUS_API_KEY` from the environment when left out. `name` is what reports and caches call
        the model: the address, unless given.
        """
        self.address = Address.parse(address) if isinstance(address, str) else address
        self._name = name
        self._policy = policy or RetryPolicy()
        self._request = dict(request or {})
        self._http = ModelServerClient(key, connections)
        self._deadlines = PerLoop(_Deadlines)
        self._takes_json_mode = True

    @property
    def name(self) -> str:
        return self._name or str(self.address)

    async def chat(self, messages: Sequence[Message], options: ChatOptions = ChatOptions()) -> ChatReply:  # noqa: B008 - frozen
        if self.address.model is None:
            self.address, _ = await self._http.find_model(self.address)
        body = self._body(messages, options)
        try:
            return await self._ask(body, options)
        except RequestFailed as error:
            if (
                error.reply is not None
                and error.reply.status in (400, 422)
                and "response_format" in body
            ):
                log.info("%s takes no response_format: it is left out from now on", self.address.url)
                self._takes_json_mode = False
                return await self.chat(messages, options)
            message = str(error) if error.reply is None else refusal(self.address, error.reply)
            raise ChatError(message, attempts=error.attempts) from error

    async def close(self) -> None:
        await self._http.close()
        await self._deadlines.close()

    async def _ask(self, body: Json, options: ChatOptions) -> ChatReply:
        url = f"{self.address.url}/chat/completions"
        sent = sum(len(str(message["content"])) for message in body["messages"])
        read = partial(_read_reply, max_tokens=options.max_tokens, sent_chars=sent)
        deadlines = await self._deadlines.get()
        reply = await self._http.request(
            "POST", url, body, self._policy, read, repeatable=True, timeout=deadlines.timeout
        )
        deadlines.put_off()
        return reply

    def _body(self, messages: Sequence[Message], options: ChatOptions) -> Json:
        body: Json = {
            "model": self.address.model,
            "messages": [as_openai(message) for message in messages],
            "max_tokens": options.max_tokens,
            "temperature": options.temperature,
        }
        if options.seed is not None:
            body["seed"] = options.seed & 0x7FFFFFFF  # some servers take 32 bits only
        if options.wants_json and self._takes_json_mode:
            body["response_format"] = {"type": "json_object"}
        body |= self._request
        return {name: value for name, value in body.items() if value is not None}


def as_openai(message: Message) -> Json:
    """A message as the interface takes it: arguments of calls as JSON texts, media as parts."""
    sent = message.as_chat()
    for call in sent.get("tool_calls", ()):
        call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    if message.media:
        text = [{"type": "text", "text": message.content}] if message.content else []
        sent["content"] = [*text, *(_image_part(item) for item in message.media)]
    return sent


def _image_part(item: Media) -> Json:
    if item.data is None:
        raise ChatError(f"the {item.kind} {item.sha256[:12]} cannot be sent: its bytes are not at hand")
    kind = next((kind for start, kind in _IMAGES.items() if item.data.startswith(start)), None)
    if kind is None:
        raise ChatError(f"the {item.kind} {item.sha256[:12]} is no PNG, JPEG, GIF or WebP image")
    url = f"data:{kind};base64,{base64.b64encode(item.data).decode('ascii')}"
    return {"type": "image_url", "image_url": {"url": url}}


def _read_reply(body: Json, *, max_tokens: int, sent_chars: int) -> ChatReply:
    choice = first_choice(body)
    message = choice.get("message")
    if not isinstance(message, dict):
        raise BadResponse("the answer has no message")
    content = message.get("content")
    text = checked_text("" if content is None else content, max_tokens)  # a model may only have thought
    prompt, completion = (token_count(body, f"{kind}_tokens") for kind in ("prompt", "completion"))
    return ChatReply(
        text,
        prompt_tokens=prompt or 1 + sent_chars // _CHARS_PER_TOKEN,
        completion_tokens=completion or 1 + len(text) // _CHARS_PER_TOKEN,
        is_cut=choice.get("finish_reason") == "length",
    )
