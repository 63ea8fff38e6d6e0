"""Who may use the viewer: a middleware around all of its routes.

Reading: on loopback, whoever reaches the port by a loopback name (a page elsewhere whose name points here, DNS
rebinding, is refused); elsewhere, who has the token, by a cookie that the first address with `?token=` sets, or
as a bearer. Writing (labels, moves) is for JSON from pages of this server alone: the request carries a header
that no foreign page can send without asking first, and its origin is compared.

Every page runs under a policy that allows scripts and styles of this server and nothing from anywhere else.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
from urllib.parse import urlsplit

from aiohttp import web

from ludus.core.failures import LudusError
from ludus.tools.remote_http import is_loopback
from ludus.viewer.episode_index import FilterError
from ludus.viewer.labels import LabelError
from ludus.viewer.play import PlayError
from ludus.viewer.requests import Handler, error_response
from ludus.viewer.workspace import NotFound

_log = logging.getLogger(__name__)

COOKIE = "ludus_view"
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "font-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
_DATA = re.compile("/(api|static|export)(/|$)")
"""What programs ask for; all else is a page."""


class Access:
    """Answers what is refused and what fails; all else goes to its handler."""

    def __init__(self, token: str | None, page: Handler) -> None:
        """`page` is shown at addresses that do not exist: it says so, with a way home."""
        self._token = token
        self._page = page

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            answer = self._refused(request)
            if answer is None:
                answer = await handler(request)
        except web.HTTPNotFound as error:
            if _DATA.match(request.path):
                answer = error_response(error.status, error.reason)
            else:
                answer = await self._page(request)
                answer.set_status(404)
        except web.HTTPException as error:
            answer = error_response(error.status, error.reason)
        except NotFound as error:
            answer = error_response(404, str(error))
        except (FilterError, PlayError, LabelError) as error:
            answer = error_response(400, str(error))
        except LudusError as error:
            answer = error_response(409, str(error))
        except asyncio.CancelledError:
            raise
        except Exception:  # noqa: BLE001 - one request must not end the server; it is logged
            _log.exception("%s %s", request.method, request.path)
            answer = error_response(500, "the viewer failed at this request; its log says why")
        if not answer.prepared:
            for name, value in _HEADERS.items():
                answer.headers.setdefault(name, value)
            answer.headers.setdefault("Cache-Control", "no-store")
        return answer

    def _refused(self, request: web.Request) -> web.StreamResponse | None:
        if self._token is None:
            if not _is_loopback_host(request.host):
                return error_response(403, "without a token the viewer answers to loopback names only")
        elif (refused := self._without_token(request, self._token)) is not None:
            return refused
        if request.method not in ("GET", "HEAD"):
            origin = request.headers.get("Origin")
            if origin is not None and urlsplit(origin).netloc != request.host:
                return error_response(403, "a page of another origin may not write here")
            if request.headers.get("X-Ludus") != "1" or request.content_type != "application/json":
                return error_response(403, "writing needs application/json and the header X-Ludus: 1")
            if (request.charset or "utf-8").lower() not in ("utf-8", "utf8"):
                return error_response(415, "send UTF-8: no other charset is read")
        return None

    def _without_token(self, request: web.Request, token: str) -> web.StreamResponse | None:
        """None for who has the token; who brings it in the address gets a cookie and a clean address."""
        given = request.query.get("token")
        if given is not None and request.method == "GET" and _equal(given, token):
            query = {name: value for name, value in request.query.items() if name != "token"}
            answer = web.Response(
                status=303, headers={"Location": str(request.rel_url.with_query(query))}
            )
            answer.set_cookie(COOKIE, token, httponly=True, samesite="Strict", path="/")
            return answer
        bearer = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if _equal(request.cookies.get(COOKIE, ""), token) or _equal(bearer, token):
            return None
        return error_response(
            401, "open the address with the token that `ludus view` has printed: …/?token=…"
        )


def _equal(given: str, token: str) -> bool:
    return hmac.compare_digest(given.encode("utf-8", "replace"), token.encode())


def _is_loopback_host(host: str) -> bool:
    name = host.rpartition(":")[0] if re.search(r":[0-9]+$", host) else host
    return is_loopback(name.strip("[]").lower())
