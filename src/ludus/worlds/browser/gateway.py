"""The only way out for pages: a proxy on the loopback interface that knows which origins a task may reach.

Every request of a browser context goes through the gateway of its `NetworkPolicy`, also redirects, web
sockets and what a page loads in the background. Allowed origins are forwarded to; hosts that are folders of
ours (the homepage, MiniWoB's pages) are answered from files; all else is refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import mimetypes
import socket
import ssl
import time
from dataclasses import dataclass
from fnmatch import fnmatchcase
from html import escape
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import SplitResult, unquote, urlsplit

from ludus.tools.library.web import is_public

_HEAD_BYTES = 64 * 1024
_CONNECT_SECONDS = 10.0
_IDLE_SECONDS = 120.0
GATEWAY_ERRORS = frozenset((502, 503, 504))
"""Statuses of a proxy before a site, or of this gateway, where the site itself does not answer."""
_PORTS = {"http": 80, "https": 443, "ws": 80, "wss": 443}
_REASONS = {200: "OK", 400: "Bad Request", 403: "Forbidden", 404: "Not Found", 502: "Bad Gateway"}


@dataclass(frozen=True, slots=True)
class NetworkPolicy:
    """Addresses that a task's pages may reach."""

    origins: tuple[str, ...] = ()
    """`http://localhost:7770`; `*` in a host stands for any characters, and `*` alone for every origin. What is
    reached by a `*` has to be a public address: our own network is for those that name it in full."""
    folders: tuple[tuple[str, str], ...] = ()
    """Names of hosts that are folders on this machine."""

    def allows(self, url: str) -> bool:
        """Whether a page may be there."""
        try:
            parts = urlsplit(url)
            port = parts.port or _PORTS.get(parts.scheme, 0)
        except ValueError:
            return False
        if parts.scheme not in ("http", "https") or not parts.hostname:
            return False
        if parts.hostname in dict(self.folders):
            return parts.scheme == "http" and port == 80
        return self.allows_port(parts.hostname, port, parts.scheme)

    def allows_port(self, host: str, port: int, *schemes: str) -> bool:
        if "*" in self.origins:
            return True
        for origin in self.origins:
            wanted = urlsplit(origin)
            own_port = wanted.port or _PORTS.get(wanted.scheme, 0)
            is_host = fnmatchcase(host.lower(), (wanted.hostname or "").lower())
            if is_host and port == own_port and (not schemes or wanted.scheme in schemes):
                return True
        return False

    def names_in_full(self, host: str, port: int) -> bool:
        """Whether one of the origins is of this host and port, without a `*`."""
        return (host.lower(), port) in [_host_and_port(one) for one in self.origins if "*" not in one]

    def names_site(self, url: str) -> bool:
        """Whether the task names the origin of this address in full, and so relies on it."""
        named = [(urlsplit(one).scheme, _host_and_port(one)) for one in self.origins if "*" not in one]
        return (urlsplit(url).scheme, _host_and_port(url)) in named

    def described(self) -> str:
        """For the model."""
        return ", ".join([*(f"http://{host}" for host, _ in self.folders), *self.origins]) or "none"


def origin_of(url: str) -> str:
    """Scheme, host and port of an address."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"


def _host_and_port(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    return (parts.hostname or "").lower(), parts.port or _PORTS.get(parts.scheme, 0)


async def is_up(url: str) -> bool:
    """Whether the site of an address answers at its root, whatever it answers, gateway errors apart."""
    host, port = _host_and_port(url)
    context = None
    if urlsplit(url).scheme == "https":
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # nothing is read or sent
    try:
        async with asyncio.timeout(_CONNECT_SECONDS):
            reader, writer = await asyncio.open_connection(host, port, ssl=context)
            try:
                name = urlsplit(url).netloc.rpartition("@")[2]
                writer.write(f"GET / HTTP/1.1\r\nHost: {name}\r\nConnection: close\r\n\r\n".encode())
                status = (await reader.readline()).split()[1]
            finally:
                writer.close()
        return int(status) not in GATEWAY_ERRORS
    except (OSError, TimeoutError, ValueError, IndexError):
        return False


class Gateway:
    """The proxy of one policy; it belongs to the event loop that opened it."""

    def __init__(self, policy: NetworkPolicy) -> None:
        self.policy = policy
        self.port = 0
        self.users = 0
        """Contexts that go through it."""
        self.refused: list[str] = []
        """The last addresses that were refused."""
        self._unreached: dict[tuple[str, int], float] = {}
        """When a site could last not be connected to, by host and port."""
        self._folders = {host: Path(folder).resolve() for host, folder in policy.folders}
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, limit=_HEAD_BYTES)
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for task in list(self._open):
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    def was_unreached(self, url: str, since: float) -> bool:
        """Whether the site of an address could not be connected to at a time after `since`."""
        return self._unreached.get(_host_and_port(url), 0.0) >= since

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        try:
            while await self._request(reader, writer):
                pass
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, TimeoutError):
            pass  # the browser or the site went away
        except asyncio.CancelledError:
            pass  # we close
        finally:
            self._open.discard(task)
            writer.close()

    async def _request(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Answer one request; whether another may follow on this connection."""
        async with asyncio.timeout(_IDLE_SECONDS):
            head = await reader.readuntil(b"\r\n\r\n")
        try:
            method, target, _ = head.split(b"\r\n", 1)[0].decode("ascii").split(" ")
            parts = urlsplit(target if method != "CONNECT" else f"//{target}")
            host, port = (parts.hostname or "").lower(), parts.port or 80
        except ValueError:
            await _answer(writer, 400, _page("Bad request", "The request cannot be read."))
            return False
        if method == "CONNECT":
            if not self.policy.allows_port(host, port, "https", "wss") and not self._ws(host, port):
                await self._refuse(writer, target)
                return False
            await self._forward(reader, writer, host, port, None)
            return False
        if host in self._folders and port == 80:
            await _answer(writer, *self._file(self._folders[host], parts), keep_alive=True)
            return method == "GET" and b"content-length" not in head.lower()
        if not self.policy.allows_port(host, port, "http"):
            await self._refuse(writer, target)
            return False
        await self._forward(reader, writer, host, port, _as_origin_request(head, method, parts))
        return False

    def _ws(self, host: str, port: int) -> bool:
        """Web sockets of plain http come as CONNECT, too; port 443 of an http origin is another one."""
        return self.policy.allows_port(host, port, "http")

    async def _refuse(self, writer: asyncio.StreamWriter, target: str) -> None:
        self.refused = [*self.refused[-19:], target[:200]]
        text = f"{target[:200]} is not allowed. Allowed are: {self.policy.described()}"
        await _answer(writer, 403, _page("Not allowed", text))

    async def _forward(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        host: str,
        port: int,
        request: bytes | None,
    ) -> None:
        """Connect to the site and pass on both directions; without a request, as a tunnel."""
        try:
            async with asyncio.timeout(_CONNECT_SECONDS):
                loop = asyncio.get_running_loop()
                found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
                addresses = [str(one[4][0]) for one in found]
                if not self.policy.names_in_full(host, port):  # our own network has to be named
                    addresses = [
                        one for one in addresses if is_public(ip_address(one.partition("%")[0]))
                    ]
                if not addresses:
                    await self._refuse(writer, f"{host}:{port}")
                    return
                site_reader, site_writer = await asyncio.open_connection(addresses[0], port)
        except (OSError, TimeoutError):
            self._unreached[host, port] = time.monotonic()
            await _answer(writer, 502, _page("No answer", f"{host}:{port} cannot be reached."))
            return
        try:
            if request is None:
                writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
            else:
                site_writer.write(request)
            up = asyncio.create_task(_pipe(reader, site_writer))
            try:
                await _pipe(site_reader, writer)
            finally:
                up.cancel()
                await asyncio.gather(up, return_exceptions=True)
        finally:
            site_writer.close()

    def _file(self, folder: Path, parts: SplitResult) -> tuple[int, bytes, str]:
        path = (folder / unquote(parts.path).lstrip("/")).resolve()
        if path.is_dir():
            path = path / "index.html"
        if not path.is_relative_to(folder) or not path.is_file():
            return 404, _page("Not found", f"There is no {parts.path[:200]}."), "text/html"
        return 200, path.read_bytes(), mimetypes.guess_type(path.name)[0] or "application/octet-stream"


def _as_origin_request(head: bytes, method: str, parts: SplitResult) -> bytes:
    """The request as the site expects it, on a connection of its own."""
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    lines = head.rstrip(b"\r\n").split(b"\r\n")[1:]
    kept = [
        line
        for line in lines
        if line.split(b":", 1)[0].strip().lower()
        not in (b"connection", b"proxy-connection", b"keep-alive")
    ]
    return b"\r\n".join([f"{method} {path} HTTP/1.1".encode(), *kept, b"Connection: close", b"", b""])


async def _pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(64 * 1024):
            writer.write(data)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()


def _page(title: str, text: str) -> bytes:
    return f"<!doctype html><title>{escape(title)}</title><h1>{escape(title)}</h1><p>{escape(text)}".encode()


async def _answer(
    writer: asyncio.StreamWriter,
    status: int,
    body: bytes,
    kind: str = "text/html",
    *,
    keep_alive: bool = False,
) -> None:
    lasting = "keep-alive" if keep_alive else "close"
    charset = "; charset=utf-8" if kind.startswith("text/") else ""
    cached = "max-age=3600" if status == 200 else "no-store"
    head = (
        f"HTTP/1.1 {status} {_REASONS[status]}\r\nContent-Type: {kind}{charset}\r\n"
        f"Content-Length: {len(body)}\r\nCache-Control: {cached}\r\nConnection: {lasting}\r\n\r\n"
    )
    writer.write(head.encode() + body)
    await writer.drain()
