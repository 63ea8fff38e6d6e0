"""Routes of the viewer, and its server: it checks who could reach it, listens, and stops on Ctrl-C.

Who may use a route: `requests`. Blocking work (DuckDB, Parquet, tokenizers) runs in threads, a few at a time.
"""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from aiohttp import web

from ludus.core.failures import LudusError
from ludus.core.messages import Json
from ludus.core.trajectory import Trajectory
from ludus.observe import read_regular
from ludus.observe.episodes import MediaStore
from ludus.serve.admission import RequestError
from ludus.serve.app import AppServer, HttpApi, check_exposure, is_on_loopback, serve_until_told
from ludus.serve.service import ServerConfig
from ludus.training.config.parts import Parts
from ludus.training.config.recipe import Recipe
from ludus.training.evaluation.runs import recipe_difference
from ludus.viewer.episode_index import EpisodeIndex, FilterError
from ludus.viewer.episode_view import EpisodeReader, export_page
from ludus.viewer.labels import LabelError, LabelStore
from ludus.viewer.play import Move, PlayError, PlayRoom
from ludus.viewer.requests import (
    HEADERS,
    Place,
    admit,
    body_place,
    episode_place,
    episode_query,
    index_page,
    integer,
    json_response,
    parsed_body,
    parsed_place,
    picture_response,
    place_json,
    static_response,
    texts,
)
from ludus.viewer.run_view import (
    RunReader,
    evaluated_steps,
    paired_runs,
    task_history,
)
from ludus.viewer.workspace import NotFound, Workspace

_log = logging.getLogger(__name__)

T = TypeVar("T")

_THREADS = 4
_DATA = re.compile("/(api|static|export)(/|$)")
"""What programs ask for; all else is a page."""
_PAGES = ("/", "/run/{run}", "/episodes", "/episode/{run}/{file}/{row}", "/compare", "/play", "/labels")


class ViewerApi(HttpApi):
    """All handlers."""

    def __init__(
        self,
        workspace: Workspace,
        config: ServerConfig,
        *,
        token: str | None,
        play: PlayRoom | None = None,
        every: float = 1.5,
    ) -> None:
        super().__init__(config)
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
        app = super().application()
        app.on_startup.append(self._begin)
        app.on_cleanup.append(self._end)
        return app

    def routes(self) -> Iterable[web.RouteDef]:
        get, post = web.get, web.post
        episode, played = "/{run}/{file}/{row:[0-9]{1,9}}", "/api/play/{id:[0-9a-f]{16}}"
        return [
            *(get(path, self._page) for path in _PAGES),
            get("/static/{name}", self._static),
            get("/api/runs", self._list_runs),
            get("/api/run/{run}", self._run),
            get("/api/series", self._series),
            get("/api/diff", self._diff),
            get("/api/episodes", self._episodes),
            get("/api/facets", self._facets),
            get("/api/steps/{run}", self._steps),
            get("/api/history/{run}", self._history),
            get("/api/paired", self._paired),
            get("/api/episode" + episode, self._episode),
            get("/api/neighbours" + episode, self._neighbours),
            get("/api/tokens" + episode, self._tokens),
            get("/api/text" + episode, self._text),
            get("/api/transcript" + episode, self._transcript),
            get("/api/media/{run}/{sha256:[0-9a-f]{64}}", self._media),
            get("/export/episode.html", self._export_html),
            get("/export/episode.json", self._export_json),
            get("/api/labels", self._list_labels),
            post("/api/label", self._label),
            post("/api/prefer", self._prefer),
            get("/api/play", self._describe_play),
            post("/api/play/start", self._start_play),
            post(played + "/move", self._move),
            post(played + "/save", self._save_played),
            get(played, self._play_state),
            get(played + "/media/{sha256:[0-9a-f]{64}}", self._play_media),
        ]

    def admit(self, request: web.Request) -> web.Response | None:
        return admit(request, self._token)

    def problem(self, request: web.Request, error: Exception) -> web.Response:
        match error:
            case RequestError():
                status, message = error.kind.status, str(error)
            case web.HTTPNotFound() if not _DATA.match(request.path):
                return index_page(404)  # it says that there is no such page, with a way home
            case web.HTTPException():
                status, message = error.status, error.reason
            case NotFound():
                status, message = 404, str(error)
            case FilterError() | PlayError() | LabelError():
                status, message = 400, str(error)
            case LudusError():
                status, message = 409, str(error)
            case _:
                _log.error("%s %s", request.method, request.path, exc_info=error)
                status, message = 500, "the viewer failed at this request; its log says why"
        return json_response({"error": message}, status)

    def answered(self, request: web.Request, answer: web.StreamResponse, seconds: float) -> None:
        for name, value in HEADERS.items():
            answer.headers.setdefault(name, value)
        answer.headers.setdefault("Cache-Control", "no-store")

    async def _json(self, request: web.Request) -> Json:
        return parsed_body(await self.bodies.read(request))

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

    async def _answer(self, function: Callable[..., Any], *args: Any) -> web.StreamResponse:
        return json_response(await self._in_thread(function, *args))

    # Pages.

    async def _page(self, request: web.Request) -> web.StreamResponse:
        return index_page()

    async def _static(self, request: web.Request) -> web.StreamResponse:
        return static_response(request.match_info["name"])

    # Runs.

    async def _list_runs(self, request: web.Request) -> web.StreamResponse:
        found = await self._in_thread(self._runs.overview)
        return json_response(found | {"index": self._index_state(), "play": self._play is not None})

    async def _run(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(self._runs.detail, request.match_info["run"])

    async def _series(self, request: web.Request) -> web.StreamResponse:
        names = texts(request, "name")[:100]
        runs = texts(request, "run")[:20]
        first, last = integer(request, "first"), integer(request, "last")
        apart = request.query.get("apart") == "1"
        return await self._answer(partial(self._runs.series, runs, names, first, last, apart=apart))

    async def _diff(self, request: web.Request) -> web.StreamResponse:
        runs = texts(request, "run")[:10]

        def difference() -> list[Json]:
            return recipe_difference({run: self._workspace.recipe(run) for run in runs})

        return json_response({"runs": runs, "settings": await self._in_thread(difference)})

    # Episodes.

    async def _episodes(self, request: web.Request) -> web.StreamResponse:
        query = episode_query(request)
        await self._first_sync.wait()
        state = self._index_state()  # before the query, which may find more than it says
        rows, summary = await self._in_thread(self._index.page, query)
        return json_response(
            {"episodes": rows, "summary": summary, "offset": query.offset, "index": state}
        )

    async def _facets(self, request: web.Request) -> web.StreamResponse:
        await self._first_sync.wait()
        return await self._answer(self._index.facets, texts(request, "run"))

    async def _steps(self, request: web.Request) -> web.StreamResponse:
        return json_response(
            {"steps": await self._in_thread(evaluated_steps, self._index, request.match_info["run"])}
        )

    async def _history(self, request: web.Request) -> web.StreamResponse:
        run, task = request.match_info["run"], request.query.get("task", "")
        return json_response({"episodes": await self._in_thread(task_history, self._index, run, task)})

    async def _paired(self, request: web.Request) -> web.StreamResponse:
        def side(name: str) -> Json:
            return {
                "run": request.query.get(f"{name}_run"),
                "split": request.query.get(f"{name}_split"),
                "step": integer(request, f"{name}_step"),
            }

        return await self._answer(paired_runs, self._index, side("a"), side("b"))

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
        return await self._answer(self._reader.view, *episode_place(request))

    async def _neighbours(self, request: web.Request) -> web.StreamResponse:
        query = episode_query(request)
        return await self._answer(self._index.neighbours, query, *episode_place(request))

    async def _tokens(self, request: web.Request) -> web.StreamResponse:
        sequence, offset = integer(request, "sequence") or 0, integer(request, "offset") or 0
        return await self._answer(self._reader.tokens, *episode_place(request), sequence, max(0, offset))

    async def _text(self, request: web.Request) -> web.StreamResponse:
        message, offset = integer(request, "message") or 0, integer(request, "offset") or 0
        return await self._answer(
            self._reader.message_text, *episode_place(request), message, max(0, offset)
        )

    async def _transcript(self, request: web.Request) -> web.StreamResponse:
        text = await self._in_thread(self._reader.transcript, *episode_place(request))
        return web.Response(
            body=text.encode("utf-8", "backslashreplace"), content_type="text/plain", charset="utf-8"
        )

    async def _media(self, request: web.Request) -> web.StreamResponse:
        run, sha256 = request.match_info["run"], request.match_info["sha256"]
        data = await self._in_thread(self._picture, run, sha256)
        return picture_response(data)

    def _picture(self, run: str, sha256: str) -> bytes | None:
        path = MediaStore(self._workspace.run(run).media_path).path(sha256)
        if path is None or not path.resolve().is_relative_to(self._workspace.root):
            return None
        with suppress(OSError):
            return read_regular(path)
        return None

    # Export.

    async def _export_html(self, request: web.Request) -> web.StreamResponse:
        places = [parsed_place(text) for text in texts(request, "episode")[:16]]

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
        places = [parsed_place(text) for text in texts(request, "episode")[:16]]

        def views() -> list[Json]:
            return [
                self._reader.view(*place) | {"tokens": self._reader.tokens(*place, 0, 0)["segments"]}
                for place in places
            ]

        answer = json_response({"episodes": await self._in_thread(views)})
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

        return await self._answer(found)

    async def _label(self, request: web.Request) -> web.StreamResponse:
        body = await self._json(request)
        place = body_place(body.get("episode"))
        score, note = body.get("score"), body.get("note") or ""
        is_number = isinstance(score, int | float) and not isinstance(score, bool) and abs(score) < 1e300
        if not (score is None or is_number) or not isinstance(note, str):
            raise LabelError("a score is a finite number, and a note is text")

        def write() -> Json:
            played = self._trajectory(place)
            return self._labels.label(
                place_json(place), played, body.get("label"), score=score, note=note
            )

        return await self._answer(write)

    async def _prefer(self, request: web.Request) -> web.StreamResponse:
        body = await self._json(request)
        chosen, rejected = body_place(body.get("chosen")), body_place(body.get("rejected"))
        note = body.get("note") or ""

        def write() -> Json:
            return self._labels.prefer(
                (place_json(chosen), self._trajectory(chosen)),
                (place_json(rejected), self._trajectory(rejected)),
                str(note),
            )

        return await self._answer(write)

    def _trajectory(self, place: Place) -> Trajectory:
        return self._reader.trajectory(*place)[1]

    # Play.

    def _room(self) -> PlayRoom:
        if self._play is None:
            raise NotFound(
                "start the viewer with --play recipe.toml (or a run's folder) to play by hand"
            )
        return self._play

    async def _describe_play(self, request: web.Request) -> web.StreamResponse:
        return json_response(self._room().describe())

    async def _start_play(self, request: web.Request) -> web.StreamResponse:
        body = await self._json(request)
        number = body.get("number")
        if not isinstance(number, int):
            raise PlayError("number is a task's number")
        return json_response(
            await self._room().start(str(body.get("set")), str(body.get("split")), number)
        )

    async def _move(self, request: web.Request) -> web.StreamResponse:
        session = self._room().session(request.match_info["id"])
        return json_response(await session.move(Move.parse(await self._json(request))))

    async def _play_state(self, request: web.Request) -> web.StreamResponse:
        return json_response(await self._room().session(request.match_info["id"]).state())

    async def _play_media(self, request: web.Request) -> web.StreamResponse:
        media = self._room().session(request.match_info["id"]).picture(request.match_info["sha256"])
        return picture_response(media.data if media is not None else None)

    async def _save_played(self, request: web.Request) -> web.StreamResponse:
        """Keep a played episode as a demonstration, good or bad."""
        session = self._room().session(request.match_info["id"])
        body = await self._json(request)
        trajectory = session.trajectory
        if trajectory is None:
            raise PlayError("the episode is not over yet")
        place = {"run": "(played by hand)", "file": session.id, "row": 0}
        label = body.get("label", True)
        return await self._answer(lambda: self._labels.label(place, trajectory, label))


_MOST_BODY = 1_000_000


@dataclass(frozen=True, slots=True)
class ViewerConfig:
    """Settings of the viewer: the folder, the address, access, what can be played."""

    root: Path
    host: str = "127.0.0.1"
    port: int = 0
    """0 is any free port."""
    token: str | None = None
    """Required from every client; generated where other machines reach the address, or tools can be called."""
    play: tuple[Recipe, Parts] | None = None
    sync_seconds: float = 1.5
    """How often to look for new episodes."""


class ViewerServer(AppServer):
    """The viewer in this event loop: `start`, then `drain_and_stop`; or `async with`."""

    def __init__(self, config: ViewerConfig) -> None:
        super().__init__(ServerConfig(host=config.host, port=config.port, max_body_bytes=_MOST_BODY))
        self.token = config.token
        if self.token is None and (config.play is not None or not is_on_loopback(config.host)):
            self.token = secrets.token_urlsafe(24)
        check_exposure(config.host, self.token)
        self._room = PlayRoom(*config.play) if config.play is not None else None
        self._api = ViewerApi(
            Workspace(config.root),
            self._config,
            token=self.token,
            play=self._room,
            every=config.sync_seconds,
        )

    async def start(self) -> str:
        """Load what is to be played, listen, and return the address to open."""
        if self._room is not None:
            await self._room.open()
        try:
            address = await self._listen(self._api)
        except BaseException:
            if self._room is not None:
                await self._room.close()
            raise
        return address if self.token is None else f"{address}/?token={self.token}"

    async def drain_and_stop(self) -> None:
        if self._room is not None:
            await self._room.close()
        await self._hang_up()


async def serve_viewer(config: ViewerConfig, on_ready: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM; `on_ready` gets the address to open."""
    await serve_until_told(ViewerServer(config), on_ready)
