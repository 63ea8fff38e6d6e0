"""Requests to a vLLM server, and parsing of its answers. Pure.

The route (vLLM 0.32): `/inference/v1/generate` takes token ids and gives token ids, log-probabilities and spans
of weight versions back. A server's answer is not trusted: every field is checked before it is used, and what
does not fit is a `BadResponse` that says what was wrong.

Stops are decided here, over the tokens that came back, by the rules of the embedded engine; the server gets
them too, so that it ends early.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ludus.core.failures import EngineError
from ludus.core.generation import Completion, FinishReason, Sampling, VersionSpan
from ludus.core.messages import Json
from ludus.engine.embedded.request import Decode, first_ending
from ludus.remote.client import BadResponse

REQUEST_PREFIX = "generate-tokens-"
"""The server's prefix of a request's own id."""
_NOT_COMPUTED = -9000.0
"""The server writes -9999 where it has no number, or one that is not finite."""
_SEED_BITS = 2**63 - 1


@dataclass(frozen=True, slots=True)
class WeightLabel:
    """This run's label of a version of the weights on a server, unique among runs."""

    run: str

    def of(self, version: int) -> str:
        return f"ludus-{self.run}-{version}"

    def version(self, label: Any) -> int:
        """The version that a label names; raises where this run has not given it."""
        head, _, number = str(label).rpartition("-")
        if head != f"ludus-{self.run}" or not number.isdecimal():
            raise BadResponse(
                f"the server has weights that this run has not given it (it calls them {label!r:.80}): was it "
                "started again, or does another run use it, too?"
            )
        return int(number)


def generate_body(tokens: Sequence[int], sampling: Sampling, request: str, model: str | None) -> Json:
    """A request for a completion. Nothing is left to the server's defaults."""
    if sampling.is_truncated:
        raise EngineError(
            "a vLLM server reports log-probabilities of what top_p, top_k, min_p or repetition_penalty leave, "
            "not of the distribution that is trained: leave them out",
            retriable=False,
        )
    fields: Json = {
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "seed": sampling.seed & _SEED_BITS,
        "logprobs": 0,  # of the sampled token alone
        "ignore_eos": True,  # a run's stop tokens are listed, the model's own need not be among them
        "stop_token_ids": list(sampling.stop_tokens),
    }
    if sampling.stop:
        fields |= {
            "stop": list(dict.fromkeys(sampling.stop)),
            "include_stop_str_in_output": True,
            "skip_special_tokens": False,
            "spaces_between_special_tokens": False,
        }
    else:
        fields["detokenize"] = False
    return _request(tokens, fields, request, model)


def score_body(tokens: Sequence[int], request: str, model: str | None) -> Json:
    """A request for the log-probability of each token at a temperature of 1."""
    fields = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0, "detokenize": False}
    return _request(tokens, fields, request, model)


def _request(tokens: Sequence[int], fields: Json, request: str, model: str | None) -> Json:
    body = {"request_id": request, "token_ids": list(tokens), "sampling_params": fields}
    return body if model is None else body | {"model": model}


def read_completion(
    body: Json,
    sampling: Sampling,
    *,
    vocabulary: int,
    decode: Decode | None,
    label: WeightLabel,
    version: int,
) -> Completion:
    """A completion, cut where Ludus ends one. `version` is that of a completion without tokens."""
    choice = _choice(body)
    tokens = choice.get("token_ids")
    if not isinstance(tokens, list) or not all(_is_count(one) and one < vocabulary for one in tokens):
        raise BadResponse(f"the answer's token_ids are no tokens of a vocabulary of {vocabulary}")
    if len(tokens) > sampling.max_tokens:
        raise BadResponse(f"{len(tokens)} tokens came, where {sampling.max_tokens} were asked for")
    logprobs = _logprobs(choice.get("logprobs"), tokens)
    versions = _versions(choice.get("weight_versions"), len(tokens), label)
    reason = choice.get("finish_reason")
    count, finish, stop = first_ending(tokens, sampling, decode)
    if finish is None:
        if reason == "abort":
            finish = FinishReason.ABORTED
        elif reason == "length" and tokens:
            finish = FinishReason.LENGTH
        else:
            raise BadResponse(
                f"a completion ended without a stop token, a stop string or its length (finish_reason "
                f"{reason!r:.40}, stop_reason {choice.get('stop_reason')!r:.40}): does the server have "
                "another tokenizer than the trainer?"
            )
    # where the server says so (--enable-prompt-tokens-details)
    usage = body.get("usage")
    details = usage.get("prompt_tokens_details") if isinstance(usage, dict) else None
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    return Completion(
        tokens[:count],
        logprobs[:count],
        finish,
        tuple(span for span in versions if span.start < max(count, 1)) or (VersionSpan(0, version),),
        stop,
        cached if isinstance(cached, int) and _is_count(cached) else 0,
    )


def _choice(body: Json) -> Json:
    choices = body.get("choices")
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        raise BadResponse("the answer does not have exactly one choice")
    choice: Json = choices[0]
    return choice


def _is_count(raw: Any) -> bool:
    return isinstance(raw, int) and not isinstance(raw, bool) and raw >= 0


def _logprobs(raw: Any, tokens: Sequence[int]) -> list[float]:
    content = raw.get("content") if isinstance(raw, dict) else None
    if not tokens and not content:
        return []
    if not isinstance(content, list) or len(content) != len(tokens):
        raise BadResponse(f"the answer does not have a log-probability for each of {len(tokens)} tokens")
    found = []
    for token, one in zip(tokens, content, strict=True):
        if not isinstance(one, dict) or one.get("token_id") != token:
            raise BadResponse("the answer's log-probabilities are of other tokens than it has")
        found.append(_logprob(one.get("logprob")))
    return found


def _logprob(raw: Any) -> float:
    is_number = isinstance(raw, float | int) and not isinstance(raw, bool)
    if not is_number or not math.isfinite(raw) or not _NOT_COMPUTED < raw <= 1e-3:
        raise BadResponse(f"{raw!r:.40} is no log-probability: are the weights finite?")
    return min(0.0, float(raw))


def _versions(raw: Any, count: int, label: WeightLabel) -> list[VersionSpan]:
    """Spans must lie end to end over all tokens."""
    if not raw and not count:
        return []
    spans: list[VersionSpan] = []
    reached = 0
    for one in raw if isinstance(raw, list) else []:
        start, end = (one.get("start"), one.get("end")) if isinstance(one, dict) else (None, None)
        if not isinstance(end, int) or start != reached or end < reached:
            raise BadResponse(f"the answer's weight_versions have a gap at token {reached}")
        version = label.version(one.get("version"))
        if end > reached and (not spans or spans[-1].version != version):
            spans.append(VersionSpan(reached, version))
        reached = end
    if reached != count:
        raise BadResponse(f"the answer's weight_versions are of {reached} tokens, and it has {count}")
    return spans


def read_scores(body: Json, tokens: Sequence[int]) -> list[float]:
    """The log-probability of each token of a prompt; the first one's is 0."""
    listed = body.get("prompt_logprobs")
    if not isinstance(listed, list) or len(listed) != len(tokens):
        raise BadResponse(f"the answer does not have prompt_logprobs of {len(tokens)} tokens")
    found = [0.0]
    for token, one in zip(tokens[1:], listed[1:], strict=True):
        entry = one.get(str(token)) if isinstance(one, dict) else None
        if not isinstance(entry, dict):
            raise BadResponse(f"the answer's prompt_logprobs lack the token {token}")
        found.append(_logprob(entry.get("logprob")))
    return found
