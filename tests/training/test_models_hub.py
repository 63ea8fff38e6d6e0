"""Names of models on a hub are looked up before anything is made, at a hub that is a real server here."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import ludus
from ludus.core import ConfigError
from ludus.training import ModelConfig, check_source, load_model
from ludus.training.models import loading as models


class Hub(ThreadingHTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.asked: list[str] = []

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Answers(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        if self.path.startswith("/api/models/"):  # the client has questions of its own
            self.server.asked.append(self.path)
        if self.path == "/api/models/somebody/model":
            return self._say(200, {"id": "somebody/model", "_id": "1", "siblings": []})
        if self.path.startswith("/api/models/busy/"):
            return self._say(501, {"error": "this mirror has files only"})
        return self._say(404, {"error": "Repository not found"}, code="RepoNotFound")

    def _say(self, status: int, body: dict[str, object], code: str | None = None) -> None:
        text = json.dumps(body).encode()
        self.send_response(status)
        if code is not None:
            self.send_header("X-Error-Code", code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: object) -> None:
        """Not on the terminal."""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    running = Hub()
    thread = threading.Thread(target=running.serve_forever, daemon=True)
    thread.start()
    ask(monkeypatch, running.address)
    yield running
    running.shutdown()
    running.server_close()
    thread.join()


def ask(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(models, "_known", set())


def test_a_known_name_is_asked_for_once(server: Hub) -> None:
    for _ in range(3):
        check_source(ModelConfig(name="somebody/model"))
    assert server.asked == ["/api/models/somebody/model"]


def test_an_unknown_name_is_refused_before_there_is_a_folder(
    server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tasks = [ludus.Task.of("?", "!")]
    with pytest.raises(ConfigError, match=r"'somebody/modle'.*look at its spelling, or log in"):
        ludus.train(model="somebody/modle", tasks=tasks, rewards=["exact_match"])
    assert not list(tmp_path.iterdir())
    assert len(server.asked) == 1


def test_what_no_hub_could_have_is_not_asked_for(server: Hub) -> None:
    for name in ("./nowhere", "-somebody/model", "a/b/c"):
        with pytest.raises(ConfigError, match="nor a name that a hub could have"):
            load_model(ModelConfig(name=name), seed=0)
    assert not server.asked


def test_loading_asks_too(server: Hub) -> None:
    with pytest.raises(ConfigError, match="look at its spelling"):
        load_model(ModelConfig(name="somebody/modle"), seed=0)


def test_a_mirror_that_does_not_answer_the_question_may_have_the_files(server: Hub) -> None:
    check_source(ModelConfig(name="busy/model"))
    assert server.asked == ["/api/models/busy/model"]


def test_a_hub_that_cannot_be_reached_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = Hub()
    closed.server_close()
    ask(monkeypatch, closed.address)
    with pytest.raises(ConfigError, match=rf"{closed.address} cannot be reached.*HF_ENDPOINT"):
        check_source(ModelConfig(name="somebody/model"))


def test_what_is_in_the_cache_needs_no_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    closed = Hub()
    closed.server_close()
    ask(monkeypatch, closed.address)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    cached = tmp_path / "models--somebody--model"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("abc")
    (cached / "snapshots" / "abc").mkdir(parents=True)
    (cached / "snapshots" / "abc" / "config.json").write_text("{}")
    check_source(ModelConfig(name="somebody/model"))


def test_offline_mode_is_told(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE forbids"):
        check_source(ModelConfig(name="somebody/model"))
    assert not server.asked
