"""`RemoteEngine`: an engine over an OpenAI-compatible server. It evaluates a model; it cannot train one.

What comes back is text, which is encoded again: it need not be the tokens that were sampled, and their
log-probabilities under the weights that would be trained are not known. So these are NaN in every completion,
and `pause` and `update_weights`, which a trainer needs, are refused.

Who waits for whom: each `generate` awaits its own HTTP request, with all its attempts within one deadline. At
most `connections` requests are in flight at once, the rest wait for one of them, within their deadline; the
number of callers is bounded by the rollout's `max_in_flight`. Nothing runs in the background.
"""

from __future__ import annotations

import logging
import math
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from ludus.core.failures import EngineError
from ludus.core.generation import Completion, Engine, FinishReason, OnTokens, Sampling
from ludus.core.images import not_shown
from ludus.core.messages import MediaSpan
from ludus.core.tokenizer import Tokenizer
from ludus.engine.servers.in_flight import RequestsInFlight
from ludus.engine.servers.openai_api import (
    MOST_STOPS,
    Answer,
    TranscriptTokenizer,
    WriteCalls,
    cut,
    read_answer,
    sampling_fields,
    write_hermes,
)
from ludus.llm.http import Address, ModelServerClient, refusal
from ludus.remote.client import RequestFailed, RetryPolicy, ServerReply

log = logging.getLogger(__name__)

NOT_KNOWN = math.nan
"""The log-probability of a token that was not sampled here; it makes a loss NaN."""


@dataclass(frozen=True, slots=True)
class RemoteOptions(RetryPolicy):
    """How to talk to a server."""

    prompt: Literal["tokens", "text"] = "tokens"
    """How a prompt is sent with the model's own tokenizer: as ids, which is exact, or as text."""
    connections: int = 256
    """Most requests on their way at once."""
    tools: Literal["text", "native"] = "text"
    """Over chat: tools as text in the system message, or in the request's `tools` (agent.format = "hermes")."""
    request: Mapping[str, Any] = field(default_factory=dict)
    """Further fields of every request; None leaves a field out that would be sent."""


class RemoteEngine(Engine):
    """An `Engine` over `/completions`, or over `/chat/completions` when given a `TranscriptTokenizer`."""

    def __init__(
        self,
        address: Address | str,
        tokenizer: Tokenizer,
        *,
        key: str | None = None,
        options: RemoteOptions | None = None,
        write_calls: WriteCalls = write_hermes,
    ) -> None:
        """The key is `LUDUS_API_KEY` from the environment when left out.

        A server may answer with native `tool_calls`; `write_calls` writes them as the run's format does.
        """
        self.address = Address.parse(address) if isinstance(address, str) else address
        self.options = options or RemoteOptions()
        self._tokenizer = tokenizer
        self._write_calls = write_calls
        self._transport = ModelServerClient(key, self.options.connections)
        self._requests: RequestsInFlight[Answer] = RequestsInFlight()
        self._tells_stops = True
        self._has_warned = False

    @property
    def name(self) -> str:
        return f"the server {self.address}"

    @property
    def takes_images(self) -> bool:
        return False

    async def check(self) -> None:
        """Find the server and the model, before many episodes fail for the same reason."""
        self.address, names = await self._transport.find_model(self.address)
        if names and self.address.model not in names:
            # some servers serve more than they list: the first request will tell
            log.warning("%s does not list the model %s", self.address.url, self.address.model)

    async def generate(
        self,
        tokens: Sequence[int],
        sampling: Sampling,
        *,
        session: str | None = None,
        media: Sequence[MediaSpan] = (),
        on_tokens: OnTokens | None = None,
    ) -> Completion:
        self._requests.check_open()
        if media:
            raise not_shown("a model behind an address")
        asking = self._answer(list(tokens), sampling)
        answer = await self._requests.answer(session, uuid.uuid4().hex, asking)
        if answer is None:
            return Completion([], [], FinishReason.ABORTED)
        ids = self._encode(answer.text)
        return Completion(ids, [NOT_KNOWN] * len(ids), answer.finish, stop=answer.stop)

    @property
    def _is_chat(self) -> bool:
        return isinstance(self._tokenizer, TranscriptTokenizer)

    def _encode(self, text: str) -> list[int]:
        """In a transcript, only Ludus writes marks; the model's own tokenizer knows its special tokens."""
        return self._tokenizer.encode_text(text) if self._is_chat else self._tokenizer.encode(text)

    async def _answer(self, tokens: list[int], sampling: Sampling) -> Answer:
        sends_stops = self._tells_stops and 0 < len(set(sampling.stop)) <= MOST_STOPS
        answer = await self._ask(tokens, sampling, stops=sends_stops)
        if sends_stops and answer.finish is FinishReason.STOP_TOKEN and not answer.tells_stop:
            # The server leaves the stop string out of the text and does not name it, so whether a tool call was
            # closed is unknown. From now on stop strings are not sent, and the text is cut here.
            log.info("%s does not say which stop string it met", self.address.url)
            self._tells_stops = False
            answer = await self._ask(tokens, sampling, stops=False)
        ends = [self._tokenizer.decode([token]) for token in sampling.stop_tokens]
        return cut(answer, sampling.stop, ends)

    async def _ask(self, tokens: list[int], sampling: Sampling, *, stops: bool) -> Answer:
        body = sampling_fields(sampling, stops=stops)
        if isinstance(self._tokenizer, TranscriptTokenizer):
            path = "chat/completions"
            if self.options.tools == "native":
                body["messages"], tools = self._tokenizer.native(tokens)
                body["tools"] = tools or None
            else:
                body["messages"] = self._tokenizer.messages(tokens)
        else:
            as_text = self.options.prompt == "text"
            path = "completions"
            body["prompt"] = self._tokenizer.decode(tokens) if as_text else tokens
        body["model"] = self.address.model
        body |= self.options.request
        body = {name: value for name, value in body.items() if value is not None}
        read = partial(read_answer, chat="messages" in body, sampling=sampling, write=self._write_calls)
        try:
            answer = await self._transport.post(f"{self.address.url}/{path}", body, self.options, read)
        except RequestFailed as error:
            # not worth a new episode: it was tried often enough
            message = str(error) if error.reply is None else self._refusal(error.reply)
            raise EngineError(message, retriable=False) from error
        self._compare(len(tokens), answer.prompt_tokens)
        return answer

    def _refusal(self, reply: ServerReply) -> str:
        if reply.status in (400, 422) and not self._is_chat and self.options.prompt == "tokens":
            return (
                f"{self.address.url} refuses ({reply.problem}): a server that takes no token ids wants "
                "prompts as text (prompt='text')"
            )
        return refusal(self.address, reply)

    def _compare(self, ours: int, theirs: int | None) -> None:
        """Say once that the server reads another prompt than the one that was rendered."""
        if self._is_chat or theirs in (None, ours) or self._has_warned:
            return
        self._has_warned = True
        log.warning(
            "%s counts %s tokens in a prompt of %s: another tokenizer, or a second beginning-of-text token",
            self.address.url,
            theirs,
            ours,
        )

    async def abort(self, session: str) -> None:
        for task in self._requests.of(session).values():
            task.cancel()

    async def pause(self) -> None:
        raise self._untrainable()

    async def update_weights(self, count: int = 1) -> int:
        raise self._untrainable()

    def _untrainable(self) -> EngineError:
        return EngineError(
            f"{self.address} can be evaluated and not trained: its weights are elsewhere, and what it said "
            "has no log-probabilities. Name a model's folder or hub name as model.name",
            retriable=False,
        )

    async def close(self) -> None:
        self._requests.close()
        await self._transport.close()
