"""Routes of the viewer, and who may use them.

Reading: on loopback, whoever reaches the port by a loopback name (a page elsewhere whose name points here, DNS
rebinding, is refused); elsewhere, who has the token, by a cookie that the first address with `?token=` sets, or
as a bearer. Writing (labels, moves) is for JSON from pages of this server alone: the request carries a header
that no foreign page can send without asking first, and its origin is compared.

Every page runs under a policy that allows scripts and styles of this server and nothing from anywhere else.
Blocking work (DuckDB, Parquet, tokenizers) runs in threads, a few at a time.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import mimetypes
import re
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar
from urllib.parse import urlsplit

from aiohttp import web

from ludus.core.failures import LudusError
from ludus.core.messages import Json
from ludus.core.trajectory import Trajectory
from ludus.observe.media import MediaStore
from ludus.tools.remote_http import is_loopback
from ludus.viewer.comparison import evaluated_steps, paired_runs, recipe_difference, task_history
from ludus.viewer.episode_index import EpisodeIndex, EpisodeQuery, FilterError
from ludus.viewer.episode_view import EpisodeReader, dump_json
from ludus.viewer.export import STATIC, export_page, picture_type
from ludus.viewer.labels import LabelError, LabelStore
from ludus.viewer.play import Move, PlayError, PlayRoom
from ludus.viewer.run_view import RunReader
from ludus.viewer.workspace import NotFound, Workspace

_log = logging.getLogger(__name__)

T = TypeVar("T")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

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
_MOST_BODY = 1_000_000
_THREADS = 4
_STATIC_FILES = {file.name: file for file in STATIC.iterdir() if file.is_file()}
_DATA = re.compile("/(api|static|export)(/|$)")
"""What programs ask for; all else is a page."""
_PAGES = ("/", "/run/{run}", "/episodes", "/episode/{run}/{file}/{row}", "/compare", "/play", "/labels")


class ViewerApi:
    """All handlers."""

    def __init__(
        self,
        workspace: Workspace,
        *,
        token: str | None,
        play: PlayRoom | None = None,
        every: float = 1.5,
    ) -> None:
        self._workspace = workspace
        self._token = token
        self._play = play
        self._sync_seconds = every
        self._index = EpisodeIndex(workspace)
        self._reader = EpisodeReader(workspace, self._index)
        self._runs = RunReader(workspace, self._index)
        self._labels = LabelStore(workspace.labels_path)
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="viewer")
        self._first_sync = asyncio.Event()
        self._syncing: asyncio.Task[None] | None = None

    def application(self) -> web.Application:
        app = web.Application(middlewares=[self._guarded], client_max_size=_MOST_BODY)
        for path in _PAGES:
            app.router.add_get(path, self._page)
        app.router.add_get("/static/{name}", self._static)
        get, post = app.router.add_get, app.router.add_post
        get("/api/runs", self._list_runs)
        get("/api/run/{run}", self._run)
        get("/api/series", self._series)
        get("/api/diff", self._diff)
        get("/api/episodes", self._episodes)
        get("/api/facets", self._facets)
        get("/api/steps/{run}", self._steps)
        get("/api/history/{run}", self._history)
        get("/api/paired", self._paired)
        episode = "/{run}/{file}/{row:[0-9]{1,9}}"
        get("/api/episode" + episode, self._episode)
        get("/api/tokens" + episode, self._tokens)
        get("/api/text" + episode, self._text)
        get("/api/transcript" + episode, self._transcript)
        get("/api/media/{run}/{sha256:[0-9a-f]{64}}", self._media)
        get("/export/episode.html", self._export_html)
        get("/export/episode.json", self._export_json)
        get("/api/labels", self._list_labels)
        post("/api/label", self._label)
        post("/api/prefer", self._prefer)
        get("/api/play", self._describe_play)
        post("/api/play/start", self._start_play)
        post("/api/play/{id:[0-9a-f]{16}}/move", self._move)
        post("/api/play/{id:[0-9a-f]{16}}/save", self._save_played)
        get("/api/play/{id:[0-9a-f]{16}}", self._play_state)
        get("/api/play/{id:[0-9a-f]{16}}/media/{sha256:[0-9a-f]{64}}", self._play_media)
        app.on_startup.append(self._begin)
        app.on_cleanup.append(self._end)
        return app

    # Life.

    async def _begin(self, app: web.Application) -> None:
        self._syncing = asyncio.create_task(self._sync())

    async def _end(self, app: web.Application) -> None:
        if self._syncing is not None:
            self._syncing.cancel()
            await asyncio.wait({self._syncing})
        await asyncio.to_thread(self._threads.shutdown, cancel_futures=True)
        self._index.close()

    async def _sync(self) -> None:
        """Keep the index up to date, a few files at a time."""
        while True:
            more = False
            try:
                more = await asyncio.to_thread(self._index.sync)
            except Exception as error:  # noqa: BLE001 - a folder may vanish at any time; the next round tries again
                _log.warning("looking for new episodes: %s", error)
            self._first_sync.set()
            await asyncio.sleep(0 if more else self._sync_seconds)

    async def _in_thread(self, function: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, lambda: function(*args))

    # Who may.

    @web.middleware
    async def _guarded(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            answer = self._refused(request)
            if answer is None:
                answer = await handler(request)
        except web.HTTPNotFound as error:
            if _DATA.match(request.path):
                answer = _error(error.status, error.reason)
            else:  # the page says so, with a way home
                answer = await self._page(request)
                answer.set_status(404)
        except web.HTTPException as error:
            answer = _error(error.status, error.reason)
        except NotFound as error:
            answer = _error(404, str(error))
        except (FilterError, PlayError, LabelError) as error:
            answer = _error(400, str(error))
        except LudusError as error:
            answer = _error(409, str(error))
        except asyncio.CancelledError:
            raise
        except Exception:  # noqa: BLE001 - one request must not end the server; it is logged
            _log.exception("%s %s", request.method, request.path)
            answer = _error(500, "the viewer failed at this request; its log says why")
        if not answer.prepared:
            for name, value in _HEADERS.items():
                answer.headers.setdefault(name, value)
            answer.headers.setdefault("Cache-Control", "no-store")
        return answer

    def _refused(self, request: web.Request) -> web.StreamResponse | None:
        if self._token is None:
            if not _is_loopback_host(request.host):
                return _error(403, "without a token the viewer answers to loopback names only")
        elif (refused := self._without_token(request, self._token)) is not None:
            return refused
        if request.method not in ("GET", "HEAD"):
            origin = request.headers.get("Origin")
            if origin is not None and urlsplit(origin).netloc != request.host:
                return _error(403, "a page of another origin may not write here")
            if request.headers.get("X-Ludus") != "1" or request.content_type != "application/json":
                return _error(403, "writing needs application/json and the header X-Ludus: 1")
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
        return _error(401, "open the address with the token that `ludus view` has printed: …/?token=…")

    # Pages.

    async def _page(self, request: web.Request) -> web.StreamResponse:
        return web.Response(
            body=_STATIC_FILES["index.html"].read_bytes(), content_type="text/html", charset="utf-8"
        )

    async def _static(self, request: web.Request) -> web.StreamResponse:
        file = _STATIC_FILES.get(request.match_info["name"])
        if file is None:
            raise NotFound("there is no such file")
        kind = mimetypes.guess_type(file.name)[0] or "application/octet-stream"
        return web.Response(
            body=file.read_bytes(),
            content_type=kind,
            charset="utf-8",
            headers={"Cache-Control": "no-cache"},
        )

    # Runs.

    async def _list_runs(self, request: web.Request) -> web.StreamResponse:
        found = await self._in_thread(self._runs.overview)
        return _json(found | {"index": self._index_state(), "play": self._play is not None})

    async def _run(self, request: web.Request) -> web.StreamResponse:
        return _json(await self._in_thread(self._runs.detail, request.match_info["run"]))

    async def _series(self, request: web.Request) -> web.StreamResponse:
        names = _list(request, "name")[:100]
        runs = _list(request, "run")[:20]
        first, last = _integer(request, "first"), _integer(request, "last")
        return _json(await self._in_thread(self._runs.series, runs, names, first, last))

    async def _diff(self, request: web.Request) -> web.StreamResponse:
        runs = _list(request, "run")[:10]

        def difference() -> list[Json]:
            return recipe_difference({run: self._workspace.recipe(run) for run in runs})

        return _json({"runs": runs, "settings": await self._in_thread(difference)})

    # Episodes.

    async def _episodes(self, request: web.Request) -> web.StreamResponse:
        query = episode_query(request)
        await self._first_sync.wait()
        state = self._index_state()  # before the query, which may find more than it says
        rows, summary = await self._in_thread(self._index.page, query)
        return _json({"episodes": rows, "summary": summary, "offset": query.offset, "index": state})

    async def _facets(self, request: web.Request) -> web.StreamResponse:
        await self._first_sync.wait()
        return _json(await self._in_thread(self._index.facets, _list(request, "run")))

    async def _steps(self, request: web.Request) -> web.StreamResponse:
        return _json(
            {"steps": await self._in_thread(evaluated_steps, self._index, request.match_info["run"])}
        )

    async def _history(self, request: web.Request) -> web.StreamResponse:
        run, task = request.match_info["run"], request.query.get("task", "")
        return _json({"episodes": await self._in_thread(task_history, self._index, run, task)})

    async def _paired(self, request: web.Request) -> web.StreamResponse:
        def side(name: str) -> Json:
            return {
                "run": request.query.get(f"{name}_run"),
                "split": request.query.get(f"{name}_split"),
                "step": _integer(request, f"{name}_step"),
            }

        return _json(await self._in_thread(paired_runs, self._index, side("a"), side("b")))

    def _index_state(self) -> Json:
        state = self._index.state
        return {
            "version": state.version,
            "files": state.files,
            "waiting": state.waiting,
            "problems": [
                {"run": run, "file": file, "problem": text}
                for (run, file), text in sorted(state.problems.items())
            ][:50],
        }

    async def _episode(self, request: web.Request) -> web.StreamResponse:
        return _json(await self._in_thread(self._reader.view, *_place(request)))

    async def _tokens(self, request: web.Request) -> web.StreamResponse:
        sequence, offset = _integer(request, "sequence") or 0, _integer(request, "offset") or 0
        return _json(
            await self._in_thread(self._reader.tokens, *_place(request), sequence, max(0, offset))
        )

    async def _text(self, request: web.Request) -> web.StreamResponse:
        message, offset = _integer(request, "message") or 0, _integer(request, "offset") or 0
        return _json(
            await self._in_thread(self._reader.message_text, *_place(request), message, max(0, offset))
        )

    async def _transcript(self, request: web.Request) -> web.StreamResponse:
        text = await self._in_thread(self._reader.transcript, *_place(request))
        return web.Response(
            body=text.encode("utf-8", "backslashreplace"), content_type="text/plain", charset="utf-8"
        )

    async def _media(self, request: web.Request) -> web.StreamResponse:
        run, sha256 = request.match_info["run"], request.match_info["sha256"]
        data = await self._in_thread(self._picture, run, sha256)
        return _picture_response(data)

    def _picture(self, run: str, sha256: str) -> bytes | None:
        path = MediaStore(self._workspace.run(run).media_path).path(sha256)
        if path is None or not path.resolve().is_relative_to(self._workspace.root):
            return None
        with suppress(OSError):
            return path.read_bytes()
        return None

    # Export.

    async def _export_html(self, request: web.Request) -> web.StreamResponse:
        places = [_parsed_place(text) for text in _list(request, "episode")[:16]]

        def page() -> str:
            views = [self._reader.view(*place) for place in places]
            runs = {place[0] for place in places}
            title = f"{views[0]['task']['id'] if views else ''} · {', '.join(sorted(runs))}"
            return export_page(
                title,
                views,
                lambda sha256: next(filter(None, (self._picture(run, sha256) for run in runs)), None),
            )

        body = (await self._in_thread(page)).encode("utf-8", "backslashreplace")
        headers = {
            "Content-Disposition": 'attachment; filename="episode.html"',
            "Content-Security-Policy": "sandbox; default-src 'none'; style-src 'unsafe-inline'; img-src data:",
        }
        return web.Response(body=body, content_type="text/html", charset="utf-8", headers=headers)

    async def _export_json(self, request: web.Request) -> web.StreamResponse:
        places = [_parsed_place(text) for text in _list(request, "episode")[:16]]

        def views() -> list[Json]:
            return [
                self._reader.view(*place) | {"tokens": self._reader.tokens(*place, 0, 0)["segments"]}
                for place in places
            ]

        answer = _json({"episodes": await self._in_thread(views)})
        answer.headers["Content-Disposition"] = 'attachment; filename="episode.json"'
        return answer

    # Labels.

    async def _list_labels(self, request: web.Request) -> web.StreamResponse:
        def found() -> Json:
            return {
                "labels": self._labels.labels(),
                "preferences": self._labels.preferences(),
                "folder": str(self._labels.folder),
            }

        return _json(await self._in_thread(found))

    async def _label(self, request: web.Request) -> web.StreamResponse:
        body = await _body(request)
        place = _body_place(body.get("episode"))
        score, note = body.get("score"), body.get("note") or ""
        if not isinstance(score, int | float | None) or not isinstance(note, str):
            raise LabelError("a score is a number, and a note is text")

        def write() -> Json:
            played = self._trajectory(place)
            return self._labels.label(
                _place_json(place), played, body.get("label"), score=score, note=note
            )

        return _json(await self._in_thread(write))

    async def _prefer(self, request: web.Request) -> web.StreamResponse:
        body = await _body(request)
        chosen, rejected = _body_place(body.get("chosen")), _body_place(body.get("rejected"))
        note = body.get("note") or ""

        def write() -> Json:
            return self._labels.prefer(
                (_place_json(chosen), self._trajectory(chosen)),
                (_place_json(rejected), self._trajectory(rejected)),
                str(note),
            )

        return _json(await self._in_thread(write))

    def _trajectory(self, place: tuple[str, str, int]) -> Trajectory:
        return self._reader.trajectory(*place)[1]

    # Play.

    def _room(self) -> PlayRoom:
        if self._play is None:
            raise NotFound(
                "start the viewer with --play recipe.toml (or a run's folder) to play by hand"
            )
        return self._play

    async def _describe_play(self, request: web.Request) -> web.StreamResponse:
        return _json(self._room().describe())

    async def _start_play(self, request: web.Request) -> web.StreamResponse:
        body = await _body(request)
        number = body.get("number")
        if not isinstance(number, int):
            raise PlayError("number is a task's number")
        return _json(await self._room().start(str(body.get("set")), str(body.get("split")), number))

    async def _move(self, request: web.Request) -> web.StreamResponse:
        session = self._room().session(request.match_info["id"])
        return _json(await session.move(Move.parse(await _body(request))))

    async def _play_state(self, request: web.Request) -> web.StreamResponse:
        return _json(await self._room().session(request.match_info["id"]).state())

    async def _play_media(self, request: web.Request) -> web.StreamResponse:
        media = self._room().session(request.match_info["id"]).picture(request.match_info["sha256"])
        return _picture_response(media.data if media is not None else None)

    async def _save_played(self, request: web.Request) -> web.StreamResponse:
        """Keep a played episode as a demonstration, good or bad."""
        session = self._room().session(request.match_info["id"])
        body = await _body(request)
        trajectory = session.trajectory
        if trajectory is None:
            raise PlayError("the episode is not over yet")
        place = {"run": "(played by hand)", "file": session.id, "row": 0}
        label = body.get("label", True)
        return _json(await self._in_thread(lambda: self._labels.label(place, trajectory, label)))


def episode_query(request: web.Request) -> EpisodeQuery:
    """The filters of an address."""
    given = request.query
    success = given.get("success") or None
    if success not in (None, "yes", "no"):
        raise FilterError(f"success is yes or no, not {success[:40]!r}")

    def text(name: str, most: int = 500) -> str | None:
        return given[name][:most] if given.get(name) else None

    return EpisodeQuery(
        runs=tuple(_list(request, "run")),
        first_step=_integer(request, "first_step"),
        last_step=_integer(request, "last_step"),
        split=text("split"),
        task=text("task"),
        least_reward=_number(request, "least_reward"),
        most_reward=_number(request, "most_reward"),
        success=None if success is None else success == "yes",
        stop=text("stop"),
        failure=text("failure"),
        tool=text("tool"),
        fault=text("fault"),
        faulted=text("faulted"),
        text=text("text", 2000),
        answer=text("answer"),
        group=_integer(request, "group"),
        file=text("file"),
        sort=given.get("sort", "step"),
        ascending=given.get("order") == "asc",
        offset=_integer(request, "offset") or 0,
        limit=_integer(request, "limit") or 50,
    )


def _list(request: web.Request, name: str) -> list[str]:
    return [value[:500] for value in request.query.getall(name, []) if value]


def _integer(request: web.Request, name: str) -> int | None:
    text = request.query.get(name)
    if not text:
        return None
    if not re.fullmatch(r"-?[0-9]{1,15}", text):
        raise FilterError(f"{name} is a whole number, not {text[:40]!r}")
    return int(text)


def _number(request: web.Request, name: str) -> float | None:
    text = request.query.get(name)
    if not text:
        return None
    try:
        return float(text)
    except ValueError:
        raise FilterError(f"{name} is a number, not {text[:40]!r}") from None


def _place(request: web.Request) -> tuple[str, str, int]:
    given = request.match_info
    return given["run"], given["file"], int(given["row"])


def _parsed_place(text: str) -> tuple[str, str, int]:
    """An episode as an address names it: run/file/row."""
    run, _, rest = text.partition("/")
    file, _, row = rest.partition("/")
    if not row.isdecimal() or len(row) > 9:
        raise FilterError(f"an episode is run/file/row, not {text[:80]!r}")
    return run, file, int(row)


def _body_place(raw: Any) -> tuple[str, str, int]:
    if not isinstance(raw, dict) or not isinstance(raw.get("row"), int):
        raise LabelError('an episode is {"run": ..., "file": ..., "row": ...}')
    return str(raw.get("run")), str(raw.get("file")), raw["row"]


def _place_json(place: tuple[str, str, int]) -> Json:
    return dict(zip(("run", "file", "row"), place, strict=True))


async def _body(request: web.Request) -> Json:
    try:
        body = await request.json()
    except (ValueError, RecursionError):
        raise FilterError("the body is not JSON") from None
    if not isinstance(body, dict):
        raise FilterError("the body is a JSON object")
    return body


def _json(value: Any, status: int = 200) -> web.Response:
    return web.Response(
        body=dump_json(value), status=status, content_type="application/json", charset="utf-8"
    )


def _error(status: int, message: str) -> web.Response:
    return _json({"error": message}, status)


def _picture_response(data: bytes | None) -> web.Response:
    kind = picture_type(data) if data is not None else None
    if data is None or kind is None:
        raise NotFound("there is no such picture; only its hash was kept")
    headers = {
        "Content-Security-Policy": "sandbox; default-src 'none'",
        "Cache-Control": "private, max-age=86400",
    }
    return web.Response(body=data, content_type=kind, headers=headers)


def _equal(given: str, token: str) -> bool:
    return hmac.compare_digest(given.encode("utf-8", "replace"), token.encode())


def _is_loopback_host(host: str) -> bool:
    name = host.rpartition(":")[0] if re.search(r":[0-9]+$", host) else host
    return is_loopback(name.strip("[]").lower())
