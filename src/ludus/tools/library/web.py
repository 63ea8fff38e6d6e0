"""The web: search through Serper or an API like it, and reading pages.

A search that fails is an infrastructure failure: it is retried, and then ends the episode. A page that cannot
be read is the fault of the model, which chose its address and reads the reason. Wrap both in a recording
(`agent.record`) to pay for a query once and to repeat a run offline.

What a model asks for must not reach into the local network. `visit` looks at the address of every socket
before it connects, so neither a name that resolves to a private address nor a redirect gets through.
"""

from __future__ import annotations

import asyncio
import errno
import html
import json
import os
import re
import socket
import threading
import time
from collections.abc import Mapping
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import TYPE_CHECKING, Any
from urllib.parse import urljoin, urlsplit

from ludus.core.failures import Boundary, ConfigError, InfraError, ToolFault
from ludus.core.generation import ChatOptions
from ludus.core.messages import Json, Message
from ludus.llm import RemoteChatModel
from ludus.remote.client import ConnectionFailed, HttpClient, RetryPolicy, load_aiohttp, retry_after
from ludus.remote.threads import run_sync
from ludus.tools.library.retrieval import checked_query
from ludus.tools.tool import Tool

if TYPE_CHECKING:
    import aiohttp

SERPER = "https://google.serper.dev/search"
_KEY = "SERPER_API_KEY"
_MOST_ANSWER_BYTES = 4_000_000
_LONGEST_RETRY_AFTER = 10.0
_MOST_REDIRECTS = 5
_MOST_URL_CHARS = 2_000
_READABLE = ("text/", "application/xhtml+xml", "application/xml", "application/json")
_CONNECT_SECONDS = 10.0
_SUMMARY_POLICY = RetryPolicy(seconds=60.0, retries=2, unusable=0)


async def _post(client: HttpClient, url: str, body: Json, headers: Mapping[str, str], what: str) -> Json:
    """The JSON object that an API answers with; whatever else happens is an `InfraError`."""
    try:
        async with client.open("POST", url, json=body, headers=headers) as response:
            data = await client.read(response)
    except (ConnectionFailed, OSError) as error:
        message = f"{what}: {url} cannot be reached ({error})"
        raise InfraError(Boundary.TOOL, message) from error
    said = data[:300].decode("utf-8", "replace").strip()
    if response.status == 429 or response.status >= 500:
        wait = retry_after(response.headers.get("Retry-After"))
        await asyncio.sleep(min(wait, _LONGEST_RETRY_AFTER))
        raise InfraError(
            Boundary.TOOL, f"{what}: {url} answered {response.status}: {said}", kind="ApiBusy"
        )
    if response.status != 200:
        refused = response.status in (401, 403)
        hint = "; is the key right?" if refused else ""
        raise InfraError(
            Boundary.TOOL,
            f"{what}: {url} answered {response.status}: {said}{hint}",
            retriable=False,
            kind="ApiRefused",
        )
    try:
        answer = json.loads(data)
    except (ValueError, RecursionError):
        answer = None
    if not isinstance(answer, dict):
        message = f"{what}: {url} answered with something that is no JSON object: {said}"
        raise InfraError(Boundary.TOOL, message, kind="ApiAnswer")
    return answer


async def _read(response: aiohttp.ClientResponse, most: int) -> bytes:
    """The body, or as much of it as is wanted."""
    data = bytearray()
    async for piece in response.content.iter_any():
        data += piece
        if len(data) > most:
            break
    return bytes(data[:most])


class RateLimit:
    """At most so many calls a second, over all episodes and threads; callers wait for their time."""

    def __init__(self, per_second: float | None) -> None:
        self._gap = 1 / per_second if per_second else 0.0
        self._next, self._lock = 0.0, threading.Lock()

    async def wait(self) -> None:
        with self._lock:
            mine = max(time.monotonic(), self._next)
            self._next = mine + self._gap
        await asyncio.sleep(max(0.0, mine - time.monotonic()))


class WebSearch(Tool):
    """Search the web.

    Args:
        query: What to search for, in a few words.
    """

    name = "web_search"
    on_timeout = "failure"
    max_concurrency = 32

    def __init__(
        self,
        k: int = 3,
        url: str = SERPER,
        per_second: float | None = None,
        parameters: Mapping[str, Any] | None = None,
        key_variable: str = _KEY,
        name: str = "web_search",
    ) -> None:
        """`parameters` go into every request, such as {"gl": "us"}; the key is read from the environment."""
        self.name = name
        super().__init__()
        if k < 1 or (per_second is not None and per_second <= 0):
            raise ConfigError("web_search: k is at least 1, and per_second is above 0")
        if urlsplit(url).scheme not in ("http", "https"):
            raise ConfigError(f"web_search: url is an http or https address, not {url!r}")
        self.k, self.url, self.parameters = k, url, dict(parameters or {})
        self.key_variable = key_variable
        self._limit = RateLimit(per_second)
        self._api = HttpClient(
            purpose="the tool 'web_search'",
            extra="search",
            connect_seconds=_CONNECT_SECONDS,
            most_bytes=_MOST_ANSWER_BYTES,
            trust_env=True,
        )

    async def run(self, query: str) -> str:
        wanted = checked_query(query)
        key = os.environ.get(self.key_variable)
        if not key and self.url == SERPER:
            message = (
                f"{self.key_variable} is not set; give it the key of the search API (https://serper.dev)"
            )
            raise InfraError(Boundary.TOOL, message, retriable=False, kind="ApiKeyMissing")
        await self._limit.wait()
        body = {**self.parameters, "q": wanted, "num": max(self.k, 10)}
        answer = await _post(
            self._api, self.url, body, {"X-API-KEY": key} if key else {}, f"the tool {self.name!r}"
        )
        return web_results(answer, self.k)


def web_results(answer: Mapping[str, Any], k: int) -> str:
    """Serper's answer as text: the answer box where there is one, then `k` pages with address and snippet."""
    lines = []
    box = answer.get("answerBox")
    if isinstance(box, Mapping):
        text = " ".join(str(box[key]) for key in ("answer", "snippet") if box.get(key))
        lines += [f"Answer(Title: {_line(box.get('title', ''))}) {_line(text)}"] if text else []
    organic = answer.get("organic")
    pages = [page for page in organic if isinstance(page, Mapping)] if isinstance(organic, list) else []
    for number, page in enumerate(pages[:k], start=1):
        title, link, snippet = (_line(page.get(key) or "") for key in ("title", "link", "snippet"))
        lines.append(f"Doc {number}(Title: {title}) {snippet}\nURL: {link}")
    return "\n".join(lines) or "No page matches the query."


def _line(value: object) -> str:
    return " ".join(str(value).split())


# Pages


class Visit(Tool):
    """Read a web page.

    Args:
        url: The page's address, beginning with http:// or https://.
        goal: What you want to know from it.
    """

    name = "visit"
    on_timeout = "failure"
    max_concurrency = 32
    timeout = 90.0

    def __init__(
        self,
        seconds: float = 20.0,
        max_bytes: int = 2_000_000,
        max_chars: int = 8_000,
        private: bool = False,
        summarizer: str | None = None,
        summary_tokens: int = 512,
        name: str = "visit",
    ) -> None:
        """`private` allows private and local addresses. `summarizer` is a model behind an OpenAI-compatible
        API, http://host/v1#MODEL, whose summary the agent reads in place of the page (key: LUDUS_API_KEY)."""
        self.name = name
        super().__init__()
        self.seconds, self.max_bytes, self.max_chars, self.private = (
            seconds,
            max_bytes,
            max_chars,
            private,
        )
        self.summarizer, self.summary_tokens = summarizer, summary_tokens
        if summarizer is not None and not all(summarizer.partition("#")):
            raise ConfigError(f"visit: summarizer is written http://host/v1#MODEL, not {summarizer!r}")
        self._pages = HttpClient(
            {"User-Agent": "ludus", "Accept": "text/html, text/plain;q=0.9, */*;q=0.1"},
            purpose="the tool 'visit'",
            extra="search",
            connect_seconds=_CONNECT_SECONDS,
            limit=64,
            socket_factory=None if private else public_socket,
            force_close=True,
        )
        self._model = None if summarizer is None else RemoteChatModel(summarizer, policy=_SUMMARY_POLICY)

    async def run(self, url: str, goal: str = "") -> str:
        try:
            async with asyncio.timeout(self.seconds):
                address, kind, data = await self._fetch(url.strip())
        except TimeoutError:
            raise ToolFault(f"{url[:200]} did not answer within {self.seconds:g} seconds") from None
        text = await run_sync(page_text, data, kind)
        if self._model is not None and text:
            text = await self._summary(text, goal)
        elif len(text) > self.max_chars - 300:
            text = f"{text[: self.max_chars - 300]}\n[the page goes on: {len(text):,} characters in all]"
        return f"URL: {address}\n{text or 'The page has no text.'}"

    async def _fetch(self, url: str) -> tuple[str, str, bytes]:
        """The address after redirects, the content type and the body."""
        http = load_aiohttp("search", "the tool 'visit'")
        for _ in range(_MOST_REDIRECTS + 1):
            _check_url(url)
            try:
                async with self._pages.open("GET", url) as response:
                    if response.status in (301, 302, 303, 307, 308) and "Location" in response.headers:
                        url = urljoin(url, response.headers["Location"])
                        continue
                    if response.status != 200:
                        raise ToolFault(
                            f"{url} answered {response.status} {response.reason or ''}".strip()
                        )
                    kind = response.content_type
                    if not kind.startswith(_READABLE):
                        raise ToolFault(f"{url} is no text but {kind}, which cannot be read here")
                    charset = response.charset or ""
                    return url, f"{kind};{charset}", await _read(response, self.max_bytes)
            except (ConnectionFailed, OSError, UnicodeError) as error:
                if isinstance(error, TimeoutError):
                    raise
                why = error.__cause__ if isinstance(error, ConnectionFailed) else error
                if isinstance(why, http.InvalidURL):
                    raise ToolFault(f"{url[:200]!r} is no address of a page") from None
                reason = (
                    _NOT_PUBLIC if _NOT_PUBLIC in str(why) else f"cannot be reached ({error!s:.200})"
                )
                raise ToolFault(f"{url[:200]} {reason}") from None
        raise ToolFault(f"{url[:200]} redirects more than {_MOST_REDIRECTS} times")

    async def _summary(self, text: str, goal: str) -> str:
        assert self._model is not None
        wanted = f"What matters is: {goal[:1000]}\n" if goal.strip() else ""
        prompt = (
            f"Summarise this web page for somebody who cannot see it. {wanted}Keep names, numbers and dates as "
            f"they are, and say so if the page does not hold what is asked for.\n\n{text[: 8 * self.max_chars]}"
        )
        options = ChatOptions(max_tokens=self.summary_tokens, temperature=0.0)
        return (await self._model.chat([Message("user", prompt)], options)).text.strip()


def _check_url(url: str) -> None:
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable or len(url) > _MOST_URL_CHARS:
        raise ToolFault(f"{url[:200]!r} is no address of a page; it begins with http:// or https://")


_NOT_PUBLIC = "is not a public address"


def is_public(address: IPv4Address | IPv6Address) -> bool:
    """Whether an address is on the public internet. An IPv6 address that embeds an IPv4 one counts as that."""
    if isinstance(address, IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour
        if address.packed[:12] in (
            bytes.fromhex("0064ff9b0000000000000000"),
            bytes(12),
        ):  # NAT64; as ::1.2.3.4
            inner = IPv4Address(address.packed[12:])
        if inner is not None:
            return is_public(inner)
        is_own_nat64 = address.packed[:6] == bytes.fromhex("0064ff9b0001")
        if address.is_site_local or address.teredo is not None or is_own_nat64:
            return False
    return address.is_global and not address.is_multicast


def public_socket(info: Any) -> socket.socket:
    """A socket for an address that has been resolved; `PermissionError` where it is not a public one."""
    family, kind, protocol, _, address = info
    host = str(address[0]).partition("%")[0]
    if not is_public(ip_address(host)):
        raise PermissionError(errno.EACCES, f"{host} {_NOT_PUBLIC}")
    made = socket.socket(family, kind, protocol)
    made.setblocking(False)
    return made


# HTML to text, in time that grows with the page's length, whatever is in it

_TAG = re.compile(r"/?([a-zA-Z][a-zA-Z0-9]*)")
_HIDDEN = {"script", "style", "noscript", "template", "svg", "head", "iframe", "textarea", "select"}
_BLOCKS = {
    "address", "article", "aside", "blockquote", "br", "caption", "dd", "div", "dl", "dt", "figcaption",
    "figure", "footer", "form", "h1", "h2", "h3", "h4", "h5", "h6", "header", "hr", "li", "main", "nav",
    "ol", "p", "pre", "section", "table", "tbody", "td", "th", "thead", "tr", "ul",
}  # fmt: skip
_CHARSET = re.compile(rb"<meta[^>]{0,200}?charset=[\"']?([\w-]{1,40})", re.IGNORECASE)
_TITLE = re.compile(r"<title[^>]{0,200}>([^<]{0,500})", re.IGNORECASE)


def page_text(data: bytes, kind: str) -> str:
    """The text of a page: its title, and what is not hidden, one block a line."""
    kind, _, charset = kind.partition(";")
    if not charset and (found := _CHARSET.search(data[:4096])):
        charset = found[1].decode("ascii")
    try:
        text = data.decode(charset or "utf-8", "replace")
    except LookupError:
        text = data.decode("utf-8", "replace")
    if "html" not in kind:
        return text.strip()
    title = _TITLE.search(text)
    lines = (" ".join(line.split()) for line in html.unescape("".join(_visible(text))).split("\n"))
    body = "\n".join(line for line in lines if line)
    return f"Title: {_line(html.unescape(title[1]))}\n{body}" if title else body


def _visible(text: str) -> list[str]:
    pieces: list[str] = []
    position = 0
    while (start := text.find("<", position)) >= 0:
        pieces.append(text[position:start].replace("\n", " "))
        if text.startswith("<!--", start):
            end = text.find("-->", start + 4)
            position = end + 3 if end >= 0 else len(text)
            continue
        tag = _TAG.match(text, start + 1)
        if tag is None and text[start + 1 : start + 2] not in ("!", "?"):
            pieces.append("<")
            position = start + 1
            continue
        end = text.find(">", start)
        if end < 0:
            return pieces
        position = end + 1
        name = tag[1].lower() if tag is not None else ""
        if name in _HIDDEN and text[start + 1] != "/" and text[end - 1] != "/":
            closing = re.compile(f"</{name}\\b", re.IGNORECASE).search(text, position)
            position = closing.start() if closing is not None else len(text)
        pieces.append("\n" if name in _BLOCKS else " " if name in _HIDDEN else "")
    pieces.append(text[position:].replace("\n", " "))
    return pieces
