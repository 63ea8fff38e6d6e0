"""A judge by script: reads the evidence as a model would, and answers as it is told to."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from openai_server import chat

Json = dict[str, Any]
_CODE = re.compile(r'"code": "([0-9a-f]{8})"')


def code_in(body: Json) -> str:
    """The code that a verdict has to name, from the form at the end."""
    text = body["messages"][1]["content"]
    return _CODE.findall(text[0]["text"] if isinstance(text, list) else text)[-1]


def evidence(body: Json, name: str) -> str:
    """What stands between the marks of this name."""
    code, text = code_in(body), body["messages"][1]["content"]
    if isinstance(text, list):
        text = text[0]["text"]
    return str(text.split(f"<{name}-{code}>\n")[1].split(f"\n</{name}-{code}>")[0])


def verdict(body: Json, scores: Mapping[str, float], **changes: Any) -> str:
    return json.dumps({"code": code_in(body), "reason": "because", "scores": scores} | changes)


def judging(score: Callable[[str], Mapping[str, float]]) -> Callable[[Json], Json]:
    """A server's reply that scores the episode's text."""
    return lambda body: chat(verdict(body, score(evidence(body, "episode"))))


def attempts_in(body: Json) -> list[str]:
    """The attempts that a RULER is shown, in their order."""
    text, found = body["messages"][1]["content"], []
    while f"<attempt-{len(found) + 1}-" in text:
        found.append(evidence(body, f"attempt-{len(found) + 1}"))
    return found


def ranking(score: Callable[[str], float]) -> Callable[[Json], Json]:
    """A server's reply that scores each attempt by its text."""

    def reply(body: Json) -> Json:
        scores = [{"id": n, "score": score(text)} for n, text in enumerate(attempts_in(body), start=1)]
        return chat(json.dumps({"code": code_in(body), "scores": scores}))

    return reply
