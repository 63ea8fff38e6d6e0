"""The options of `ludus eval` and `ludus rollout`, and what they make."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ludus.core.failures import ConfigError
from ludus.core.generation import Sampling
from ludus.engine.remote import RemoteOptions


@dataclass(frozen=True, slots=True)
class Options:
    """What both commands take; None leaves it to the recipe."""

    tasks: int | None
    attempts: int | None
    temperature: float | None
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    seed: int
    show: int
    out: Path | None

    def sampling(self, temperature: float) -> Sampling:
        try:
            return Sampling(
                temperature=self.temperature if self.temperature is not None else temperature,
                top_p=self.top_p,
                top_k=self.top_k,
                min_p=self.min_p,
                repetition_penalty=self.repetition_penalty,
            )
        except ValueError as error:
            name, _, why = str(error).removeprefix("sampling.").partition(" ")
            raise ConfigError(f"--{name.replace('_', '-')} {why}") from None


@dataclass(frozen=True, slots=True)
class StudyOptions:
    """What `ludus eval` takes beside what both commands take."""

    models: Sequence[str]
    against: str | None
    turns: str | None
    pass_at: str | None
    by: str | None
    results: Path | None
    tokenizer: str | None
    prompt: str
    tools: str
    request: str | None
    checkpoint: str | None = None

    def remote(self) -> RemoteOptions:
        if self.prompt not in ("tokens", "text"):
            raise ConfigError(f"--prompt is tokens or text, not {self.prompt!r}")
        try:
            fields = json.loads(self.request or "{}")
        except ValueError as error:
            raise ConfigError(f"--request is a JSON object: {error}") from None
        if not isinstance(fields, dict):
            raise ConfigError("--request is a JSON object, such as '{\"top_k\": 20}'")
        if self.tools not in ("text", "native"):
            raise ConfigError(f"--tools is text or native, not {self.tools!r}")
        return RemoteOptions(
            prompt="text" if self.prompt == "text" else "tokens",
            tools="native" if self.tools == "native" else "text",
            request=fields,
        )
