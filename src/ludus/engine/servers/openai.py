"""`RemoteEngine`: an engine over an OpenAI-compatible server. It evaluates a model; it cannot train one.

An engine is given tokens, but `/chat/completions` takes messages. So a transcript is kept in tokens that only
serve to be turned back into messages: special ones mark where messages start and end, all others stand for
up to three bytes of text each, which is about as many tokens as a real tokenizer counts, rather more. Content
cannot forge a mark, because marks are ids.

What comes back is text, which is encoded again: it need not be the tokens that were sampled, and their
log-probabilities under the weights that would be trained are not known. So these are NaN in every completion,
and `pause` and `update_weights`, which a trainer needs, are refused.

Who waits for whom: each `generate` awaits its own HTTP request, with all its attempts within one deadline. At
most `connections` requests are in flight at once, the rest wait for one of them, within their deadline; the
number of callers is bounded by the rollout's `max_in_flight`. Nothing runs in the background.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

from ludus.core.failures import EngineError
from ludus.core.generation import Completion, FinishReason, Sampling, first_stop
from ludus.core.messages import Json, Message, ToolCall
from ludus.core.tokenizer import SPECIALS, ByteTokenizer, Tokenizer
from ludus.engine.servers.client import ServerEngine
from ludus.llm.remote import Address, ModelServerClient, checked_text, first_choice, refusal, token_count
from ludus.remote.client import BadResponse, RequestFailed, RetryPolicy, ServerReply

_START, _END = "<|im_start|>", "<|im_end|>"
_BYTES_PER_TOKEN = 3
_FIRST = (0, 256, 256 + 256**2)
"""The first id of tokens of one, two and three bytes."""
_FIRST_SPECIAL = 256 + 256**2 + 256**3
_ROLES = ("system", "user", "assistant", "tool")
_TOOLS = (
    "# Tools\n\nYou may call one or more functions. You are given their signatures within "
    "<tools></tools>:\n<tools>\n{listed}\n</tools>\n\nFor each call, write a JSON object within "
    '<tool_call></tool_call>:\n<tool_call>\n{{"name": <function-name>, "arguments": '
    "<arguments-object>}}\n</tool_call>"
)

_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)

log = logging.getLogger(__name__)
MOST_STOPS = 4
"""How many stop strings the OpenAI interface takes."""
NOT_KNOWN = math.nan
"""The log-probability of a token that was not sampled here; it makes a loss NaN."""


class TranscriptTokenizer(ByteTokenizer):
    """A `Tokenizer` without files or state: what it encodes means the same in every process.

    The byte tokenizer with several bytes in a token; its special tokens follow all of those.
    """

    def __init__(self) -> None:
        super().__init__()
        self._specials = {text: _FIRST_SPECIAL + i for i, text in enumerate(SPECIALS)}
        self._texts = {number: text for text, number in self._specials.items()}

    @property
    def vocabulary_size(self) -> int:
        return _FIRST_SPECIAL + len(self._specials)

    def encode_text(self, text: str) -> list[int]:
        data = text.encode("utf-8", errors="surrogatepass")
        pieces = (data[at : at + _BYTES_PER_TOKEN] for at in range(0, len(data), _BYTES_PER_TOKEN))
        return [_FIRST[len(piece) - 1] + int.from_bytes(piece, "big") for piece in pieces]

    def decode(self, tokens: Sequence[int]) -> str:
        texts: list[str] = []
        pending = bytearray()
        for token in tokens:
            if 0 <= token < _FIRST_SPECIAL:
                size = 3 if token >= _FIRST[2] else 2 if token >= _FIRST[1] else 1
                pending += (token - _FIRST[size - 1]).to_bytes(size, "big")
            else:
                texts.append(pending.decode("utf-8", errors="replace"))
                pending.clear()
                texts.append(self._texts.get(token, f"<|{token}|>"))
        return "".join([*texts, pending.decode("utf-8", errors="replace")])

    def apply_chat_template(
        self, messages: Sequence[Json], tools: Sequence[Json] | None, add_generation_prompt: bool
    ) -> str:
        given = list(messages)
        if tools:
            listed = _TOOLS.format(listed="\n".join(json.dumps(tool) for tool in tools))
            system = given.pop(0)["content"] + "\n\n" if given and given[0]["role"] == "system" else ""
            given.insert(0, {"role": "system", "content": system + listed})
        return super().apply_chat_template(given, None, add_generation_prompt)

    def messages(self, tokens: Sequence[int]) -> list[Json]:
        """The conversation that these tokens are the transcript of, as a chat server takes it.

        Results of tools become messages of the user, in the way of Hermes: the server has not seen the
        calls that they answer. Messages of one role in a row are joined, because many templates insist.
        """
        found: list[Json] = []
        for role, content in self._said(tokens):
            _append(found, role, content)
        return found

    def native(self, tokens: Sequence[int]) -> tuple[list[Json], list[Json]]:
        """(messages, tools) with calls and results as the OpenAI interface has them.

        Calls have the numbers of their places as ids, and the results that follow answer them in order. A
        message with a call that is no JSON stays text, and so do its results.
        """
        found: list[Json] = []
        tools: list[Json] = []
        asked: list[str] = []
        for role, content in self._said(tokens):
            if role == "system" and not found:
                content, tools = _without_tools(content)
                if content:
                    found.append({"role": role, "content": content})
            elif role == "assistant":
                text, calls = _calls(content, f"call_{len(found)}")
                found.append({"role": role, "content": text} | ({"tool_calls": calls} if calls else {}))
                asked = [call["id"] for call in calls]
            elif role == "tool" and asked:
                found.append({"role": role, "tool_call_id": asked.pop(0), "content": content})
            else:
                _append(found, role, content)
        return found, tools

    def _said(self, tokens: Sequence[int]) -> Iterator[tuple[str, str]]:
        start, end = self._specials[_START], self._specials[_END]
        opened: list[int] | None = None
        for token in tokens:
            if token == start:
                opened = []
            elif opened is not None and token == end:
                role, _, content = self.decode(opened).partition("\n")
                if role not in _ROLES:
                    raise ValueError(f"a transcript has no role {role!r:.40}")
                yield role, content
                opened = None
            elif opened is not None:
                opened.append(token)


def _without_tools(system: str) -> tuple[str, list[Json]]:
    """A system message, and the tools that `apply_chat_template` listed at its end."""
    before, after = _TOOLS.split("{listed}")
    head, start, rest = system.rpartition(before.format())
    if not start or not rest.endswith(after.format()):
        return system, []
    listed = rest.removesuffix(after.format())
    return head.removesuffix("\n\n"), [json.loads(line) for line in listed.split("\n")]


def _calls(said: str, name: str) -> tuple[str, list[Json]]:
    """The assistant's text and its calls; all of it is text where a call cannot be read."""
    calls: list[Json] = []
    for body in _CALL.findall(said):
        try:
            read = json.loads(body)
        except ValueError:
            return said, []
        if not isinstance(read, dict) or not isinstance(read.get("name"), str):
            return said, []
        function = {"name": read["name"], "arguments": json.dumps(read.get("arguments") or {})}
        calls.append({"id": f"{name}_{len(calls)}", "type": "function", "function": function})
    return (_CALL.sub("", said).strip() if calls else said), calls


def _append(found: list[Json], role: str, content: str) -> None:
    if role == "tool":
        role, content = "user", f"<tool_response>\n{content}\n</tool_response>"
    if found and found[-1]["role"] == role:
        found[-1]["content"] += "\n" + content
    else:
        found.append({"role": role, "content": content})


@dataclass(frozen=True, slots=True)
class Answer:
    """A parsed answer. `stop` is the stop string it met, `tells_stop` whether it says so at all."""

    text: str
    finish: FinishReason
    stop: str | None
    tells_stop: bool
    prompt_tokens: int | None
    """How many tokens the server found in the prompt, where it says."""


def sampling_fields(sampling: Sampling, *, stops: bool) -> Json:
    """The fields of a request that say how to draw; those that not every server knows only when used."""
    fields: Json = {
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "seed": sampling.seed & 0x7FFFFFFF,  # some servers take 32 bits only
    }
    if sampling.top_k:
        fields["top_k"] = sampling.top_k
    if sampling.min_p:
        fields["min_p"] = sampling.min_p
    if sampling.repetition_penalty != 1:
        fields["repetition_penalty"] = sampling.repetition_penalty
    if stops:
        fields["stop"] = list(dict.fromkeys(sampling.stop))
    return fields


WriteCalls = Callable[[str, Sequence[ToolCall]], str]
"""(text, calls) -> an action as the run's format writes it."""


def write_hermes(text: str, calls: Sequence[ToolCall]) -> str:
    """Calls as the usual format writes them."""
    bodies = [json.dumps({"name": call.name, "arguments": call.arguments}) for call in calls]
    written = [f"<tool_call>\n{body}\n</tool_call>" for body in bodies]
    return "\n".join([text, *written] if text else written)


def read_answer(
    body: Json, *, chat: bool, sampling: Sampling, write: WriteCalls = write_hermes
) -> Answer:
    """The first choice of a completion; native tool calls become text of the run's format."""
    choice = first_choice(body)
    text, is_native = _chat_text(choice, write) if chat else (choice.get("text"), False)
    is_cut = choice.get("finish_reason") == "length"
    told = [key for key in ("stop_reason", "matched_stop") if key in choice]
    stop = next((choice[key] for key in told if isinstance(choice[key], str)), None)
    return Answer(
        text=checked_text(text, sampling.max_tokens),
        finish=FinishReason.LENGTH if is_cut else FinishReason.STOP_TOKEN,
        stop=stop if stop in sampling.stop else None,
        tells_stop=bool(told) or is_native,
        prompt_tokens=token_count(body, "prompt_tokens"),
    )


def _chat_text(choice: Json, write: WriteCalls) -> tuple[Any, bool]:
    """The reply's text, and whether native tool calls are part of it."""
    message = choice.get("message")
    if not isinstance(message, dict):
        raise BadResponse("the answer has no message")
    content, calls = message.get("content"), message.get("tool_calls")
    said = "" if content is None else content  # a model that only thought, or only called a tool
    if not calls:
        return said, False
    if not isinstance(calls, list) or not isinstance(said, str):
        raise BadResponse(
            f"the answer's tool_calls are {type(calls).__name__}, not a list beside a text"
        )
    try:
        parsed = Message.parse({"role": "assistant", "content": said, "tool_calls": calls})
    except ValueError:  # the model's fault: a call that cannot be read, which the format will say
        raw = []
        for call in calls:
            function = call.get("function") if isinstance(call, dict) else None
            arguments = function.get("arguments") if isinstance(function, dict) else call
            written = arguments if isinstance(arguments, str) else json.dumps(arguments)
            raw.append(f"<tool_call>\n{written}\n</tool_call>")
        return "\n".join([said, *raw] if said else raw), True
    return write(said, parsed.tool_calls), True


def cut(answer: Answer, stops: Sequence[str], ends: Iterable[str]) -> Answer:
    """The answer up to the first stop string, that included, or up to a text that ends a turn.

    Servers leave out the stop string that they met: it is put back. One that they were not told of is
    found here.
    """
    text = answer.text
    if answer.stop is not None and not text.endswith(answer.stop):
        text += answer.stop
    at = min((text.find(end) for end in ends if end and end in text), default=None)
    said = text if at is None else text[:at]
    if (found := first_stop(said, stops)) is not None:
        start, stop = found
        return replace(
            answer, text=said[: start + len(stop)], finish=FinishReason.STOP_STRING, stop=stop
        )
    return (
        answer if at is None else replace(answer, text=said, finish=FinishReason.STOP_TOKEN, stop=None)
    )


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


class RemoteEngine(ServerEngine):
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
        super().__init__()
        self.address = Address.parse(address) if isinstance(address, str) else address
        self.options = options or RemoteOptions()
        self._tokenizer = tokenizer
        self._write_calls = write_calls
        self._transport = ModelServerClient(key, self.options.connections)
        self._tells_stops = True
        self._has_warned = False

    @property
    def name(self) -> str:
        return f"the server {self.address}"

    async def check(self) -> None:
        """Find the server and the model, before many episodes fail for the same reason."""
        self.address, names = await self._transport.find_model(self.address)
        if names and self.address.model not in names:
            # some servers serve more than they list: the first request will tell
            log.warning("%s does not list the model %s", self.address.url, self.address.model)

    async def _complete(
        self, tokens: Sequence[int], sampling: Sampling, request: str, session: str | None
    ) -> Completion:
        sends_stops = self._tells_stops and 0 < len(set(sampling.stop)) <= MOST_STOPS
        answer = await self._ask(tokens, sampling, stops=sends_stops)
        if sends_stops and answer.finish is FinishReason.STOP_TOKEN and not answer.tells_stop:
            # The server leaves the stop string out of the text and does not name it, so whether a tool call was
            # closed is unknown. From now on stop strings are not sent, and the text is cut here.
            log.info("%s does not say which stop string it met", self.address.url)
            self._tells_stops = False
            answer = await self._ask(tokens, sampling, stops=False)
        answer = cut(
            answer, sampling.stop, [self._tokenizer.decode([one]) for one in sampling.stop_tokens]
        )
        # in a transcript, only Ludus writes marks; the model's own tokenizer knows its special tokens
        encode = self._tokenizer.encode_text if self._is_chat else self._tokenizer.encode
        ids = encode(answer.text)
        return Completion(ids, [NOT_KNOWN] * len(ids), answer.finish, stop=answer.stop)

    @property
    def _is_chat(self) -> bool:
        return isinstance(self._tokenizer, TranscriptTokenizer)

    async def _ask(self, tokens: Sequence[int], sampling: Sampling, *, stops: bool) -> Answer:
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
            body["prompt"] = self._tokenizer.decode(tokens) if as_text else list(tokens)
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
        counted = answer.prompt_tokens
        if not self._is_chat and counted not in (None, len(tokens)) and not self._has_warned:
            self._has_warned = True
            log.warning(
                "%s counts %s tokens in a prompt of %s: another tokenizer, or a second beginning-of-text token",
                *(self.address.url, counted, len(tokens)),
            )
        return answer

    def _refusal(self, reply: ServerReply) -> str:
        if reply.status in (400, 422) and not self._is_chat and self.options.prompt == "tokens":
            return (
                f"{self.address.url} refuses ({reply.problem}): a server that takes no token ids wants "
                "prompts as text (prompt='text')"
            )
        return refusal(self.address, reply)

    async def pause(self) -> None:
        raise self._untrainable()

    async def update_weights(self, count: int = 1) -> int:
        raise self._untrainable()

    def _untrainable(self) -> EngineError:
        return EngineError(
            f"{self.address} can be evaluated and not trained: its weights are elsewhere, and it returns "
            "no log-probabilities. Name a model's folder or hub name as model.name",
            retriable=False,
        )

    async def close(self) -> None:
        await super().close()
        await self._transport.close()
