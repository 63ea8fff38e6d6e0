"""Chromium processes, shared by all instances of this process: each episode has a context of its own in one of
them.

One thread runs an event loop with Playwright in it; other threads hand it coroutines (`BrowserHost.run`),
so that instances work from any loop or thread. A browser serves up to `CONTEXTS` episodes at once, and is
replaced after `EPISODES` of them. One that dies, or does not answer, is killed: what was played in it is an
`InfraError` that has the episode played again, and the next episode gets another browser. Chromium hangs on a
pipe of Playwright's driver, and the driver on one from here, so both end with this process however it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import shlex
import shutil
import signal
import threading
import weakref
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ludus.core.failures import Boundary, ConfigError, InfraError, MissingExtraError
from ludus.envs.world import imported
from ludus.remote.processes import ScratchFolder
from ludus.worlds.browser.gateway import Gateway, NetworkPolicy

if TYPE_CHECKING:
    from playwright.async_api import Browser, BrowserContext, Playwright

T = TypeVar("T")

EXECUTABLE = "LUDUS_CHROMIUM"
"""The environment variable with Chromium's path."""
PROGRAMS = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")
"""Programs that are looked for on the path."""
CHROMIUM = "|".join((*PROGRAMS, EXECUTABLE))
"""Any of these programs, as `World.programs` names alternatives."""
SANDBOX = "LUDUS_CHROMIUM_SANDBOX"
"""0 switches Chromium's own sandbox off, which needs user namespaces; as root it is always off."""
_NODE = "PLAYWRIGHT_NODEJS_PATH"
"""The environment variable with the program that runs Playwright's driver, which has no other setting for
its temporary files."""
FLAGS = (
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    "--disable-quic",
    "--force-webrtc-ip-handling-policy=disable_non_proxied_udp",
    "--js-flags=--max-old-space-size=512",
)
CONTEXTS = 16
"""Episodes in one browser at once."""
EPISODES = 1000
"""Contexts after which a browser is replaced."""
GATEWAYS = 32
"""Kept for policies that no episode has now; each is a port."""
LAUNCH_SECONDS = 45.0
ANSWER_SECONDS = 5.0
"""In which a browser that lives answers a question about itself."""


class Chromium:
    """One browser process."""

    def __init__(self, browser: Browser, pid: int) -> None:
        self.browser, self.pid = browser, pid
        self._handle: int | None = None
        """Of the process, where there are such: its number may become another one's."""
        if hasattr(os, "pidfd_open"):
            self._handle = os.pidfd_open(pid)
            weakref.finalize(self, os.close, self._handle)
        self.contexts = 0
        """Open now."""
        self.made = 0
        """So far."""

    @property
    def is_alive(self) -> bool:
        return bool(self.browser.is_connected())

    async def answers(self) -> bool:
        """Whether the process answers; a page that hangs does not keep it from that."""
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                session = await self.browser.new_browser_cdp_session()
                await session.send("Browser.getVersion")
                await session.detach()
                return True
        except Exception:  # noqa: BLE001 - whatever it was, it did not answer
            return False

    def kill(self) -> None:
        with contextlib.suppress(OSError):
            if self._handle is not None:
                signal.pidfd_send_signal(self._handle, signal.SIGKILL)
            elif self.is_alive:
                os.kill(self.pid, signal.SIGKILL)


class BrowserHost:
    """The thread that Playwright lives in, its browsers and gateways. `shared_host()` is the one to use."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.users = 0
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="browser", daemon=True)
        self._thread.start()
        self._playwright: Playwright | None = None
        self._browsers: list[Chromium] = []
        self._gateways: dict[NetworkPolicy, Gateway] = {}
        self._starting = asyncio.Lock()
        self._folders: list[ScratchFolder] = []
        """Folders of drivers' and browsers' files; a killed driver's are removed here."""

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine over there, from any event loop; cancelled with the caller."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    def wait_for(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the host's loop, and wait for it in the caller's thread."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(4 * ANSWER_SECONDS)

    # In its own thread ----------------------------------------------------------------------------

    async def new_context(
        self, policy: NetworkPolicy, executable: str | None, options: dict[str, Any]
    ) -> tuple[Chromium, BrowserContext]:
        """A context with nothing in it, which reaches what the policy allows."""
        async with self._starting:
            chromium = await self._with_room(executable)
            gateway = await self._gateway(policy)
            gateway.users += 1
            chromium.contexts += 1
            chromium.made += 1
        try:
            async with asyncio.timeout(LAUNCH_SECONDS):
                context = await chromium.browser.new_context(
                    proxy={"server": f"http://127.0.0.1:{gateway.port}", "bypass": "<-loopback>"},
                    accept_downloads=False,
                    service_workers="block",
                    **options,
                )
        except BaseException as error:
            chromium.contexts -= 1
            gateway.users -= 1
            if isinstance(error, Exception):
                raise await self.lost(chromium, error) from error
            raise
        return chromium, context

    def gateway_of(self, policy: NetworkPolicy) -> Gateway:
        """The gateway of a policy's contexts."""
        return self._gateways[policy]

    async def close_context(
        self, policy: NetworkPolicy, chromium: Chromium, context: BrowserContext
    ) -> None:
        chromium.contexts -= 1
        self._gateways[policy].users -= 1
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                await context.close()
        except Exception:  # noqa: BLE001 - dead or stuck
            if chromium.is_alive and not await chromium.answers():
                chromium.kill()
        if chromium not in self._browsers and chromium.contexts == 0:
            await _close_browser(chromium)

    async def lost(self, chromium: Chromium, error: BaseException) -> InfraError:
        """The failure to raise when a browser does not do what it should; it is not used again."""
        if chromium in self._browsers:
            self._browsers.remove(chromium)
        how = "died" if not chromium.is_alive else "did not answer in time and was killed"
        chromium.kill()
        message = f"Chromium (process {chromium.pid}) {how}: {error}"[:500]
        return InfraError(Boundary.ENV, message, retriable=False, replay=True, kind="BrowserLost")

    async def _gateway(self, policy: NetworkPolicy) -> Gateway:
        if policy not in self._gateways:
            unused = [one for one in self._gateways.values() if not one.users]
            for one in unused[: max(0, len(unused) - GATEWAYS)]:
                del self._gateways[one.policy]
                await one.close()
            gateway = Gateway(policy)
            await gateway.open()
            self._gateways[policy] = gateway
        return self._gateways[policy]

    async def _with_room(self, executable: str | None) -> Chromium:
        for chromium in list(self._browsers):
            if not chromium.is_alive or chromium.made >= EPISODES:
                self._browsers.remove(chromium)
                if chromium.contexts == 0:
                    await _close_browser(chromium)
            elif chromium.contexts < CONTEXTS:
                return chromium
        self._browsers.append(await self._launch(executable))
        return self._browsers[-1]

    async def _launch(self, executable: str | None) -> Chromium:
        path = find_chromium(executable)
        is_sandboxed = os.geteuid() != 0 and os.environ.get(SANDBOX) != "0"
        try:
            async with asyncio.timeout(LAUNCH_SECONDS):
                return await self._launched(path, is_sandboxed)
        except MissingExtraError:
            raise
        except Exception as error:
            hint = f" ({SANDBOX}=0 switches its sandbox off)" if is_sandboxed else ""
            raise InfraError(
                Boundary.ENV,
                f"Chromium ({path}) did not start{hint}: {error}"[:2000],
                kind="BrowserLost",
            ) from error

    async def _launched(self, path: str, is_sandboxed: bool) -> Chromium:
        is_new = self._playwright is None
        if self._playwright is None:
            self._folders.append(ScratchFolder("ludus-browser-"))
            self._playwright = await _start_playwright(self._folders[-1].path)
        try:
            browser = await self._playwright.chromium.launch(
                executable_path=path,
                args=list(FLAGS),
                chromium_sandbox=is_sandboxed,
                handle_sigint=False,  # this process handles it
                handle_sigterm=False,
                handle_sighup=False,
                timeout=1000 * LAUNCH_SECONDS,
            )
        except Exception as error:
            if is_new or "closed" not in str(error):
                raise
            self._playwright = None  # its driver has died
            return await self._launched(path, is_sandboxed)
        session = await browser.new_browser_cdp_session()
        found = await session.send("SystemInfo.getProcessInfo")
        await session.detach()
        pid = next(int(one["id"]) for one in found["processInfo"] if one["type"] == "browser")
        return Chromium(browser, pid)

    async def _shut_down(self) -> None:
        await asyncio.gather(*(_close_browser(one) for one in self._browsers))
        for gateway in self._gateways.values():
            await gateway.close()
        if self._playwright is not None:
            with contextlib.suppress(Exception):
                async with asyncio.timeout(ANSWER_SECONDS):
                    await self._playwright.stop()
        for folder in self._folders:
            await asyncio.to_thread(folder.remove)
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    def stop(self) -> None:
        """Close all browsers and end the thread; waits for it."""
        with contextlib.suppress(Exception):
            asyncio.run_coroutine_threadsafe(self._shut_down(), self._loop).result(2 * ANSWER_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(ANSWER_SECONDS)
        if not self._thread.is_alive():
            self._loop.close()


_host: BrowserHost | None = None
_guard = threading.Lock()


def acquire_host() -> BrowserHost:
    """The host of this process; each user of it calls `release_host` once, the last of them ends it."""
    global _host
    with _guard:
        if _host is None or _host.pid != os.getpid():  # a fork has no thread
            _host = BrowserHost()
        _host.users += 1
        return _host


def release_host(host: BrowserHost) -> None:
    """Give it back; the last one to do so closes the browsers, which takes a moment."""
    global _host
    with _guard:
        host.users -= 1
        if host.users:
            return
        if _host is host:
            _host = None
    if host.pid == os.getpid():
        host.stop()


async def _start_playwright(folder: Path) -> Playwright:
    """Its driver, which keeps files in `folder` and has the browsers do so."""
    playwright = imported("playwright.async_api", "browser", "the environment browser")
    before = os.environ.get(_NODE)
    node = before or str(Path(inspect.getfile(playwright)).parents[1] / "driver" / "node")
    script = folder / "node"
    script.write_text(f'#!/bin/sh\nTMPDIR={shlex.quote(str(folder))} exec {shlex.quote(node)} "$@"\n')
    script.chmod(0o700)
    if os.access(script, os.X_OK) and os.access(node, os.X_OK):  # not where programs may not be in /tmp
        os.environ[_NODE] = str(script)
    try:
        started: Playwright = await playwright.async_playwright().start()
        return started
    finally:
        os.environ.pop(_NODE, None)
        if before is not None:
            os.environ[_NODE] = before


async def _close_browser(chromium: Chromium) -> None:
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            await chromium.browser.close()
    except Exception:  # noqa: BLE001 - it does not close: it is ended
        chromium.kill()


def find_chromium(given: str | None = None) -> str:
    """The path of Chromium: as given, of the environment variable, or the first on the path."""
    wanted = given or os.environ.get(EXECUTABLE)
    if wanted:
        if not Path(wanted).is_file():
            raise ConfigError(
                f"there is no Chromium at {wanted} (agent.pools.NAME.options.executable, or {EXECUTABLE})"
            )
        return wanted
    for name in PROGRAMS:
        if found := shutil.which(name):
            return found
    raise ConfigError(
        f"no Chromium was found ({', '.join(PROGRAMS)} on the path): install it (Debian: apt install chromium; "
        f"or: playwright install chromium), or set {EXECUTABLE} to its path"
    )
