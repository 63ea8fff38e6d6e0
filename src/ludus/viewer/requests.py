"""Requests to the viewer: who may make them, their parsing and checking, and the responses.

Reading: on loopback, any client that uses a loopback name (a foreign name that points here, DNS rebinding, is
refused); elsewhere, clients with the token, in a cookie that the first address with `?token=` sets, or as a
bearer. Writing is for JSON from pages of this server alone: the request carries a header that no foreign page
can send without asking first, and its origin is compared. Every page allows scripts and styles of this server
alone.
"""

from __future__ import annotations

import mimetypes
import re
from typing import Any
from urllib.parse import urlsplit

from aiohttp import web

from ludus.core.messages import Json
from ludus.core.strict_json import BadJson, read_object
from ludus.serve.admission import RequestError
from ludus.serve.app import bearer_token, check_host, check_utf8, is_token
from ludus.tools.wire import JSON_TYPE, ErrorKind
from ludus.viewer.episode_index import EpisodeQuery, FilterError
from ludus.viewer.episode_view import STATIC, dump_json, picture_type
from ludus.viewer.labels import LabelError
from ludus.viewer.workspace import NotFound

COOKIE = "ludus_view"
_STATIC_FILES = {file.name: file for file in STATIC.iterdir() if file.is_file()}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "font-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
"""In every answer."""


def admit(request: web.Request, token: str | None) -> web.Response | None:
    """`RequestError` without access; for a token in the address, a redirect that moves it to a cookie."""
    if token is None:
        check_host(request)
    else:
        given = request.query.get("token")
        if given is not None and request.method == "GET" and is_token(given, token):
            query = {name: value for name, value in request.query.items() if name != "token"}
            clean = str(request.rel_url.with_query(query))
            answer = web.Response(status=303, headers={"Location": clean})
            answer.set_cookie(COOKIE, token, httponly=True, samesite="Strict", path="/")
            return answer
        offered = (request.cookies.get(COOKIE, ""), bearer_token(request.headers))
        if not any(is_token(one, token) for one in offered):
            message = "open the address with the token that `ludus view` has printed: …/?token=…"
            raise RequestError(ErrorKind.UNAUTHORIZED, message)
    if request.method not in ("GET", "HEAD"):
        _check_writing(request)
    return None


def _check_writing(request: web.Request) -> None:
    origin = request.headers.get("Origin")
    if origin is not None and urlsplit(origin).netloc != request.host:
        raise RequestError(ErrorKind.FORBIDDEN, "a page of another origin may not write here")
    if request.headers.get("X-Ludus") != "1" or request.content_type != JSON_TYPE:
        message = "writing needs application/json and the header X-Ludus: 1"
        raise RequestError(ErrorKind.FORBIDDEN, message)
    check_utf8(request)


Place = tuple[str, str, int]
"""An episode: its run, its file, its row."""


def episode_query(request: web.Request) -> EpisodeQuery:
    given = request.query
    success = given.get("success") or None
    if success not in (None, "yes", "no"):
        raise FilterError(f"success is yes or no, not {success[:40]!r}")

    def text(name: str, most: int = 500) -> str | None:
        return given[name][:most] if given.get(name) else None

    return EpisodeQuery(
        runs=tuple(texts(request, "run")),
        first_step=integer(request, "first_step"),
        last_step=integer(request, "last_step"),
        split=text("split"),
        task=text("task"),
        least_reward=number(request, "least_reward"),
        most_reward=number(request, "most_reward"),
        success=None if success is None else success == "yes",
        stop=text("stop"),
        failure=text("failure"),
        tool=text("tool"),
        fault=text("fault"),
        faulted=text("faulted"),
        text=text("text", 2000),
        answer=text("answer"),
        group=integer(request, "group"),
        file=text("file"),
        sort=given.get("sort", "step"),
        ascending=given.get("order") == "asc",
        offset=integer(request, "offset") or 0,
        limit=integer(request, "limit") or 50,
    )


def texts(request: web.Request, name: str) -> list[str]:
    return [value[:500] for value in request.query.getall(name, []) if value]


def integer(request: web.Request, name: str) -> int | None:
    text = request.query.get(name)
    if not text:
        return None
    if not re.fullmatch(r"-?[0-9]{1,15}", text):
        raise FilterError(f"{name} is a whole number, not {text[:40]!r}")
    return int(text)


def number(request: web.Request, name: str) -> float | None:
    text = request.query.get(name)
    if not text:
        return None
    try:
        return float(text)
    except ValueError:
        raise FilterError(f"{name} is a number, not {text[:40]!r}") from None


def episode_place(request: web.Request) -> Place:
    given = request.match_info
    return given["run"], given["file"], int(given["row"])


def parsed_place(text: str) -> Place:
    run, _, rest = text.partition("/")
    file, _, row = rest.partition("/")
    if not row.isdecimal() or len(row) > 9:
        raise FilterError(f"an episode is run/file/row, not {text[:80]!r}")
    return run, file, int(row)


def body_place(raw: Any) -> Place:
    row = raw.get("row") if isinstance(raw, dict) else None
    if not isinstance(row, int) or isinstance(row, bool) or not 0 <= row < 10**9:
        raise LabelError('an episode is {"run": ..., "file": ..., "row": ...}')
    return str(raw.get("run")), str(raw.get("file")), row


def place_json(place: Place) -> Json:
    return dict(zip(("run", "file", "row"), place, strict=True))


def parsed_body(data: bytearray) -> Json:
    try:
        return read_object(data)
    except BadJson as error:
        raise FilterError(f"the body cannot be read: {error}") from None


def json_response(value: Any, status: int = 200) -> web.Response:
    return web.Response(
        body=dump_json(value), status=status, content_type="application/json", charset="utf-8"
    )


def picture_response(data: bytes | None) -> web.Response:
    kind = picture_type(data) if data is not None else None
    if data is None or kind is None:
        raise NotFound("there is no such picture; only its hash was kept")
    headers = {
        "Content-Security-Policy": "sandbox; default-src 'none'",
        "Cache-Control": "private, max-age=86400",
    }
    return web.Response(body=data, content_type=kind, headers=headers)


def index_page(status: int = 200) -> web.Response:
    page = _STATIC_FILES["index.html"].read_bytes()
    return web.Response(body=page, status=status, content_type="text/html", charset="utf-8")


def static_response(name: str) -> web.Response:
    if name not in _STATIC_FILES:
        raise NotFound("there is no such file")
    kind = mimetypes.guess_type(name)[0] or "application/octet-stream"
    headers = {"Cache-Control": "no-cache"}
    return web.Response(
        body=_STATIC_FILES[name].read_bytes(), content_type=kind, charset="utf-8", headers=headers
    )
