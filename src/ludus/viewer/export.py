"""Episodes as self-contained HTML files: no script, nothing loaded, everything that was said escaped."""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from functools import cache
from html import escape
from pathlib import Path

from ludus.core.messages import Json
from ludus.observe import printable
from ludus.viewer.workspace import NotFound

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
_MOST_PICTURE_BYTES = 1_000_000
STATIC = Path(__file__).parent / "static"

PictureOf = Callable[[str], bytes | None]
"""The bytes of a picture by its hash, or None."""


@cache
def _style() -> str:
    return (STATIC / "export.css").read_text(encoding="utf-8")


def export_page(title: str, episodes: Sequence[Json], picture_of: PictureOf | None = None) -> str:
    if not episodes:
        raise NotFound("there is no episode to export")
    columns = "".join(_episode(one, picture_of or (lambda _: None)) for one in episodes)
    return (
        "<!doctype html><html lang=en><head><meta charset=utf-8>"
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name=viewport content="width=device-width,initial-scale=1">'
        f"<title>{_text(title)}</title><style>{_style()}</style></head><body>"
        f"<header><h1>{_text(title)}</h1><p>Exported by Ludus.</p></header>"
        f'<main class="columns n{min(len(episodes), 4)}">{columns}</main></body></html>'
    )


def _episode(one: Json, picture_of: PictureOf) -> str:
    facts = [
        ("run", one.get("run")),
        ("step", one.get("step")),
        ("attempt", one["attempt"]),
        ("ended", one["stop"]),
        ("turns", len(one["turns"])),
        ("tokens", one["action_tokens"]),
    ]
    reward = "not scored" if one["reward"] is None else f"{one['reward']:.4g}"
    parts = "".join(f"<li>{_text(name)} <b>{_number(value)}</b></li>" for name, value in one["rewards"])
    listed = "".join(
        f"<dt>{_text(name)}</dt><dd>{_text(value)}</dd>" for name, value in facts if value is not None
    )
    failure = one["failure"]
    lost = (
        f"<p class=fault>Lost at {_text(failure['boundary'])}: {_text(failure['message'])}</p>"
        if failure
        else ""
    )
    renders: dict[int, list[Json]] = {}
    for render in one["renders"]:
        renders.setdefault(render["turn"], []).append(render)
    blocks = []
    for message in one["messages"]:
        number, turn = message["turn"], None
        if number is not None:
            blocks += [_render(render, picture_of) for render in renders.pop(number, [])]
            turn = one["turns"][number] if number < len(one["turns"]) else None
        blocks.append(_message(message, turn))
    blocks += [_render(render, picture_of) for left in renders.values() for render in left]
    return (
        f"<article><h2>{_text(one['task']['id'] or 'task')}</h2><p class=reward>{_text(reward)}</p>"
        f"<ul class=parts>{parts}</ul><dl>{listed}</dl>{lost}{''.join(blocks)}</article>"
    )


def _message(message: Json, turn: Json | None) -> str:
    more = message["chars"] - len(message["content"])
    cut = f"<p class=cut>… {more} characters left out</p>" if more > 0 else ""
    calls = "".join(_call(call) for call in message["calls"])
    facts = ""
    if turn is not None:
        shown = [
            (name, turn[name])
            for name in ("reward", "advantage", "logprob", "entropy")
            if turn[name] is not None
        ]
        facts = "".join(f"<span>{name} {_number(value)}</span>" for name, value in shown)
        facts += "".join(f"<span class=fault>{_text(one['fault'])}</span>" for one in turn["faults"])
    name = f" · {_text(message['name'])}" if message["name"] else ""
    return (
        f"<section class='{_text(message['role'])}'><h3>{_text(message['role'])}{name} {facts}</h3>"
        f"<pre>{_text(message['content'])}</pre>{cut}{calls}</section>"
    )


def _call(call: Json) -> str:
    rows = "".join(f"<dt>{_text(name)}</dt><dd>{_text(value)}</dd>" for name, value in call["arguments"])
    fault = (
        f"<p class=fault>{_text(call['fault'])}: {_text(call['problem'])}</p>" if call["fault"] else ""
    )
    return f"<div class=call><b>{_text(call['name'])}</b><dl>{rows}</dl>{fault}</div>"


def _render(render: Json, picture_of: PictureOf) -> str:
    if render["picture"] is None:
        return f"<pre class=render>{_text(render['text'])}</pre>"
    data = picture_of(render["picture"]["sha256"])
    kind = picture_type(data) if data is not None and len(data) <= _MOST_PICTURE_BYTES else None
    if data is None or kind is None:
        return ""
    source = f"data:{kind};base64,{base64.b64encode(data).decode()}"
    return f'<img class=render alt="{_text(render["env"])}" src="{source}">'


def picture_type(data: bytes) -> str | None:
    """The type of a picture by its first bytes; None for others, such as SVG, which can hold scripts."""
    for start, kind in (
        (b"\x89PNG\r\n\x1a\n", "image/png"),
        (b"\xff\xd8\xff", "image/jpeg"),
        (b"GIF8", "image/gif"),
    ):
        if data.startswith(start):
            return kind
    return "image/webp" if data[:4] == b"RIFF" and data[8:12] == b"WEBP" else None


def _number(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else "–"


def _text(value: object) -> str:
    """Text that is shown and not obeyed: markup is escaped, control and direction characters are visible."""
    return escape(printable(str(value)), quote=True)
