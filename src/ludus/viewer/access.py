"""Access control of the viewer, checked before every handler.

Reading: on loopback, any client that uses a loopback name (a foreign name that points here, DNS rebinding, is
refused); elsewhere, clients with the token, in a cookie that the first address with `?token=` sets, or as a
bearer. Writing (labels, moves) is for JSON from pages of this server alone: the request carries a header
that no foreign page can send without asking first, and its origin is compared.

Every page runs under a policy that allows scripts and styles of this server and nothing from anywhere else.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from aiohttp import web

from ludus.serve.admission import RequestError
from ludus.serve.app import bearer_token, check_host, check_utf8, is_token
from ludus.tools.wire import JSON_TYPE, ErrorKind

COOKIE = "ludus_view"
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
