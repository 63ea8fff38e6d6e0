"""The program of a replica's process: one event loop, one `EmbeddedEngine`, requests over a socket.

Who waits for whom: the main coroutine reads frames; each request is a task of its own, which writes its reply
when it is done. The process ends, with all it has started, when its parent does.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ludus.core import process_worker
from ludus.core.failures import InfraError, LudusError
from ludus.core.generation import Sampling
from ludus.core.messages import Json
from ludus.engine.config import EngineConfig
from ludus.engine.engine import EmbeddedEngine
from ludus.engine.replicas.frames import (
    pack_completion,
    pack_frame,
    pack_logprobs,
    read_frame,
    unpack_tokens,
)
from ludus.engine.replicas.weight_loading import load_into, load_model


class _Decoder:
    """The folder's tokenizer, loaded when a request has the first stop string."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tokenizer: Any = None

    def prepare(self) -> None:
        """While the folder is there: it goes when there are newer weights."""
        from transformers import AutoTokenizer

        if any(self._folder.glob("tokenizer*")):
            self._tokenizer = AutoTokenizer.from_pretrained(str(self._folder))

    def __call__(self, tokens: Sequence[int]) -> str:
        if self._tokenizer is None:
            raise LudusError("stop strings need a tokenizer, and the model's folder has none")
        options = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
        return str(self._tokenizer.decode(list(tokens), **options))


class _Program:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._engine: EmbeddedEngine | None = None

    async def run(self) -> None:
        setup, _ = await read_frame(self._reader)
        sys.path[:] = setup["path"]
        while True:
            try:
                head, body = await read_frame(self._reader)
            except (asyncio.IncompleteReadError, ConnectionError):
                return
            self._take(head["number"], head, body)

    def _take(self, number: int, head: Json, body: bytes) -> None:
        if head["operation"] != "cancel":
            self._tasks[number] = asyncio.create_task(self._answer(number, head, body))
            self._tasks[number].add_done_callback(lambda _: self._tasks.pop(number, None))
        elif number in self._tasks:
            self._tasks[number].cancel()

    async def _answer(self, number: int, head: Json, body: bytes) -> None:
        try:
            reply, found = await self._perform(head["operation"], head, body)
        except Exception as error:  # noqa: BLE001 - raised again where the request came from
            retriable = not isinstance(error, LudusError) or (
                isinstance(error, InfraError) and error.retriable
            )
            message = str(error) if isinstance(error, LudusError) else f"{type(error).__name__}: {error}"
            reply, found = {"error": {"message": message, "retriable": retriable}}, b""
        self._writer.write(pack_frame({"number": number, **reply}, found))
        await self._writer.drain()

    async def _perform(self, operation: str, head: Json, body: bytes) -> tuple[Json, bytes]:
        if operation == "start":
            await asyncio.to_thread(self._start, head)
            return {}, b""
        engine = self._engine
        assert engine is not None, "a replica is started before it is asked"
        match operation:
            case "generate":
                sampling = head["sampling"]
                sampling |= {
                    "stop": tuple(sampling["stop"]),
                    "stop_tokens": tuple(sampling["stop_tokens"]),
                }
                return pack_completion(
                    await engine.generate(
                        unpack_tokens(body), Sampling(**sampling), session=head["session"]
                    )
                )
            case "score":
                scored = await engine.score(unpack_tokens(body), temperature=head["temperature"])
                return {}, pack_logprobs(scored)
            case "ping":
                await engine.score([0])  # which the engine's thread answers between two steps
            case "load_weights":
                model, folder = engine.model, Path(head["folder"])
                await engine.replace_weights(lambda: load_into(model, folder), head["version"])
            case "fork":
                await engine.fork(head["session"], head["into"])
            case "release":
                await engine.release(head["session"])
            case "abort":
                await engine.abort(head["session"])
            case "pause":
                await engine.pause()
            case "resume":
                await engine.resume()
            case "forget":
                await engine.forget()
            case _:
                raise LudusError(f"a replica knows no operation {operation!r}")
        return {}, b""

    def _start(self, setup: Json) -> None:
        import torch

        if setup["threads"] is not None:
            torch.set_num_threads(setup["threads"])
        folder = Path(setup["folder"])
        model = load_model(folder, setup["dtype"], setup["device"])
        decoder = _Decoder(folder)
        decoder.prepare()
        # nobody else uses this device: a pause need not hand the KV cache's memory to a trainer
        config = EngineConfig.model_validate({**setup["engine"], "release_memory": "never"})
        self._engine = EmbeddedEngine(model, decoder, config, version=setup["version"])


async def _main(connection: socket.socket) -> None:
    reader, writer = await asyncio.open_connection(sock=connection)
    try:
        await _Program(reader, writer).run()
    finally:
        writer.close()


def main() -> None:
    """Serve until the parent closes the connection or dies."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    process_worker.end_with_parent(int(sys.argv[2]))
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # everything comes from folders
    asyncio.run(_main(connection))
    os._exit(0)  # requests that still run have nobody to answer to


if __name__ == "__main__":
    main()
