"""A server that speaks vLLM's routes, over real sockets, with a real model behind it; it can also misbehave.

It has weights of its own, which it reads from a folder. A request in flight goes on through an update, and
every token has the label of the weights that it was sampled with, as in vLLM 0.32.
"""

from __future__ import annotations

import asyncio
import copy
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from aiohttp import web
from safetensors.torch import load_file

from ludus.core.generation import FinishReason, Sampling
from ludus.core.tokenizer import Tokenizer
from ludus.engine import EmbeddedEngine, EngineConfig

Json = dict[str, Any]


@dataclass
class Faults:
    """What a server does wrong."""

    scale_out: bool = True
    dev_mode: bool = True
    logprobs_mode: str = "processed_logprobs"
    dtype: str = "torch.float32"
    chunked_prefill: bool = False
    stale_head: bool = False
    """A new head is ignored, and success reported."""
    ignores_stop_strings: bool = False
    raw_label: str | None = None
    """The label that every token has."""
    answers: list[Any] = field(default_factory=list)
    """What the next generations get instead: a JSON body, bytes, or a number for a status."""
    hangs: bool = False
    """Whether generations are never answered."""
    refuses_weights: bool = False


class VllmTestServer:
    """One server on a thread and an event loop of its own."""

    def __init__(self, model: Any, tokenizer: Tokenizer, folder: Path, key: str | None) -> None:
        self.faults = Faults()
        self.tokenizer, self.folder, self.key = tokenizer, folder, key
        self._given = model
        self.asked: list[tuple[str, Json]] = []
        self.disconnected = 0
        self.port = 0
        self._loop = asyncio.new_event_loop()
        self._thread: threading.Thread | None = None
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start, with the weights that it was given at first; again after `die`, at the same port."""
        self.model = copy.deepcopy(self._given)
        self.engine = EmbeddedEngine(self.model, self.tokenizer, EngineConfig(cache_tokens=8192))
        self.labels, self.label, self.is_paused = {0: "default"}, "default", False
        self._running: dict[str, str] = {}
        ready = threading.Event()
        self._thread = threading.Thread(target=self._serve, args=(ready,), daemon=True)
        self._thread.start()
        assert ready.wait(10)

    def die(self) -> None:
        """Every connection is cut, and nobody answers any more."""
        assert self._thread is not None
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._thread = None

    def close(self) -> None:
        if self._thread is not None:
            self.die()
        self._loop.close()

    async def _stop(self) -> None:
        for connection in list(self._server.connections):
            if connection.transport is not None:
                connection.transport.abort()
        await self.engine.close()
        await self._runner.cleanup()

    def _serve(self, ready: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._listen())
        ready.set()
        self._loop.run_forever()

    async def _listen(self) -> None:
        app = web.Application(middlewares=[self._guard])
        app.router.add_get("/health", self._nothing)
        app.router.add_post("/inference/v1/generate", self._generate)
        app.router.add_post("/inference/v1/abort_requests", self._abort)
        if self.faults.dev_mode:
            app.router.add_post("/pause", self._pause)
            app.router.add_post("/resume", self._resume)
            app.router.add_post("/reset_prefix_cache", self._forget)
            app.router.add_post("/collective_rpc", self._rpc)
            app.router.add_post("/update_weight_version", self._set_label)
            app.router.add_get("/weight_info", self._weight_info)
            app.router.add_get("/server_info", self._server_info)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        assert self._runner.server is not None
        self._server = self._runner.server
        self.port = self._runner.addresses[0][1]

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        if self.key is not None and request.headers.get("Authorization") != f"Bearer {self.key}":
            return _error(401, "Unauthorized")
        response: web.StreamResponse = await handler(request)
        return response

    async def _nothing(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _pause(self, request: web.Request) -> web.Response:
        assert request.query["mode"] == "keep" and request.query["clear_cache"] == "true"
        self.is_paused = True
        await self.engine.pause()
        return web.json_response({"status": "paused"})

    async def _resume(self, request: web.Request) -> web.Response:
        self.is_paused = False
        await self.engine.resume()
        return web.json_response({"status": "resumed"})

    async def _forget(self, request: web.Request) -> web.Response:
        await self.engine.forget()
        return web.json_response({"success": True})

    async def _rpc(self, request: web.Request) -> web.Response:
        call = await request.json()
        assert call["method"] == "reload_weights" and self.is_paused
        state = _weights(Path(call["kwargs"]["weights_path"]))
        if self.faults.refuses_weights or not state:
            return _error(500, "Call to collective_rpc method failed: no such folder")
        own = self.model.state_dict()
        with torch.no_grad():
            for name, tensor in state.items():
                if not (self.faults.stale_head and name == "lm_head.weight"):
                    own[name].copy_(tensor)
        await self.engine.update_weights()
        self.labels[self.engine.policy_version] = self.label
        return web.json_response({"results": [None]})

    async def _set_label(self, request: web.Request) -> web.Response:
        self.label = (await request.json())["new_version"]
        self.labels[self.engine.policy_version] = self.label
        return web.json_response({"success": True, "new_version": self.label})

    async def _weight_info(self, request: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.label})

    async def _server_info(self, request: web.Request) -> web.Response:
        model = {
            "logprobs_mode": self.faults.logprobs_mode,
            "dtype": self.faults.dtype,
            "max_model_len": 256,
            "quantization": None,
            "model": str(self.folder),
        }
        config = {
            "model_config": model,
            "device_config": {"device": "cpu"},
            "scheduler_config": {"enable_chunked_prefill": self.faults.chunked_prefill},
        }
        return web.json_response({"vllm_config": config})

    async def _abort(self, request: web.Request) -> web.Response:
        for name in (await request.json())["request_ids"]:
            if name in self._running:
                await self.engine.abort(self._running[name])
        return web.Response()

    async def _generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.asked.append((request.headers.get("X-Session-ID", ""), body))
        if not self.faults.scale_out:
            return _error(403, "Scale-out endpoints are disabled. Restart with --enable-scale-out.")
        if self.faults.answers:
            return _misbehaved(self.faults.answers.pop(0))
        if "token_ids" not in body:
            return _error(400, "Field required: token_ids")
        tokens, fields = body["token_ids"], body["sampling_params"]
        if max(tokens) >= self.engine.model.config.vocab_size:  # type: ignore[union-attr]
            return _error(400, f"Token id {max(tokens)} is out of vocabulary")
        try:
            if self.faults.hangs:
                await asyncio.sleep(3600)
            if "prompt_logprobs" in fields:
                return await self._scored(tokens)
            return await self._completed(body["request_id"], tokens, fields)
        except asyncio.CancelledError:
            self.disconnected += 1
            raise

    async def _scored(self, tokens: list[int]) -> web.Response:
        scores = await self.engine.score(tokens)
        listed = [
            None if i == 0 else {str(token): {"logprob": score, "rank": 1, "decoded_token": None}}
            for i, (token, score) in enumerate(zip(tokens, scores, strict=True))
        ]
        return web.json_response({"prompt_logprobs": listed, "choices": [{}]})

    async def _completed(self, name: str, tokens: list[int], fields: Json) -> web.Response:
        stop = () if self.faults.ignores_stop_strings else tuple(fields.get("stop", ()))
        sampling = Sampling(
            max_tokens=fields["max_tokens"],
            temperature=fields["temperature"],
            seed=fields["seed"],
            stop=stop,
            stop_tokens=tuple(fields["stop_token_ids"]),
        )
        self._running[f"generate-tokens-{name}"] = name
        try:
            made = await self.engine.generate(tokens, sampling, session=name)
        finally:
            del self._running[f"generate-tokens-{name}"]
            await self.engine.release(name)
        count = len(made.tokens)
        ends = [*(span.start for span in made.versions[1:]), count]
        spans = [
            {
                "version": self.faults.raw_label or self.labels[span.version],
                "start": span.start,
                "end": end,
            }
            for span, end in zip(made.versions, ends, strict=True)
        ]
        reasons = {FinishReason.LENGTH: "length", FinishReason.ABORTED: "abort"}
        content = [
            {"token_id": token, "logprob": logprob, "rank": 1, "top_logprobs": []}
            for token, logprob in zip(made.tokens, made.logprobs, strict=True)
        ]
        choice = {
            "index": 0,
            "finish_reason": reasons.get(made.finish, "stop"),
            "stop_reason": made.stop,
            "token_ids": made.tokens,
            "weight_versions": spans if count else None,
            "logprobs": {"content": content},
        }
        usage = {"prompt_tokens_details": {"cached_tokens": made.cached_tokens}}
        return web.json_response({"choices": [choice], "usage": usage})


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    files = folder.glob("*.safetensors")
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "code": status}}, status=status)


def _misbehaved(what: Any) -> web.Response:
    if isinstance(what, int):
        return _error(what, "as the test wants it")
    if isinstance(what, bytes):
        return web.Response(body=what, content_type="application/json")
    return web.json_response(what)


@contextmanager
def vllm_server(
    model: Any, tokenizer: Tokenizer, folder: Path | None = None, key: str | None = None
) -> Iterator[VllmTestServer]:
    """A server with a copy of the model; `folder` is where it says that it has it from."""
    server = VllmTestServer(model, tokenizer, folder or Path("/nowhere"), key)
    try:
        yield server
    finally:
        server.close()
