"""`VllmEngine`: a vLLM server as the engine of training. Token ids go in and out; weights come as a folder.

It has weights of its own, in a server that was started before the run
(`ludus serve vllm RECIPE`, docs/distributed.md). Tokens are exactly as sampled, log-probabilities are those of
the trained distribution, and every token has the version of the weights that it was sampled with, through
updates in flight.

Who waits for whom: each `generate` awaits its own HTTP request, with its attempts within one deadline. The
server has the queue. While it is paused, requests in flight keep their connections and their deadlines stand
still. A call that is cancelled closes its connection, which ends the request on the server.

What a session is: nothing. The server finds the longest known prefix of every request in its cache (in whole
blocks: 16 tokens on a GPU, 128 on a CPU), for any request. So a fork costs nothing, and a release frees
nothing: what was not used for the longest time goes first.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file

from ludus.core.failures import ConfigError, EngineError
from ludus.core.generation import Completion, Sampling, checked_context
from ludus.core.messages import MediaSpan
from ludus.core.tokenizer import Tokenizer
from ludus.engine.config import EngineSetup
from ludus.engine.servers.client import ServerEngine
from ludus.engine.servers.vllm_api import (
    WeightLabel,
    generate_body,
    read_completion,
    read_scores,
    score_body,
)
from ludus.engine.servers.vllm_server import VllmOptions, VllmServer, model_config
from ludus.llm.remote import Address
from ludus.model.hf_model import vocabulary_size
from ludus.remote.client import BadResponse, ConnectionFailed

log = logging.getLogger(__name__)

HEAD = "lm_head.weight"
"""Every update has it, also of models whose head is tied to the embedding, which save one tensor for both. On a
CPU, vLLM keeps a packed copy of the head, and makes it anew only where it is given a head: with the embedding
alone an update reports success, and what is sampled comes from a model that is half old (0.03 to 0.5 nats)."""
_EMBEDDING = "embed_tokens.weight"
_ABORT_AGAIN = 0.2
"""Seconds between two aborts: a request that has not reached the server yet is not known there."""


class VllmEngine(ServerEngine):
    """An engine over a vLLM server, whose weights it replaces."""

    def __init__(
        self,
        address: Address | str,
        tokenizer: Tokenizer,
        *,
        vocabulary: int | None = None,
        key: str | None = None,
        options: VllmOptions | None = None,
    ) -> None:
        """`vocabulary` is how many tokens the model has: as many as the tokenizer when left out.

        The key is `LUDUS_API_KEY` from the environment when left out; vLLM knows it as --api-key.
        """
        super().__init__()
        parsed = Address.parse(address) if isinstance(address, str) else address
        self._server = VllmServer(parsed, key, options)
        self._options = self._server.options
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary or tokenizer.vocabulary_size
        self._label = WeightLabel(uuid.uuid4().hex[:12])
        self._version = 0
        self._is_paused = self._is_loading = False

    @classmethod
    def of_run(cls, setup: EngineSetup) -> VllmEngine:
        """The engine of a run over one of the servers in `cluster.servers`."""
        if setup.address is None:
            raise ConfigError(
                'cluster.engine = "vllm" samples from servers: name them in cluster.servers'
            )
        return cls(setup.address, setup.tokenizer, vocabulary=vocabulary_size(setup.model))

    @property
    def name(self) -> str:
        return self._server.name

    @property
    def policy_version(self) -> int:
        return self._version

    async def _complete(
        self, tokens: Sequence[int], sampling: Sampling, request: str, session: str | None
    ) -> Completion:
        body = generate_body(self._checked(tokens), sampling, request, self._server.address.model)
        return await self._server.generate(
            body,
            lambda answer: read_completion(
                answer,
                sampling,
                vocabulary=self._vocabulary,
                decode=self._tokenizer.decode,
                label=self._label,
                version=self._version,
            ),
            session,
        )

    async def score(self, tokens: Sequence[int], *, media: Sequence[MediaSpan] = ()) -> list[float]:
        self._check(media)
        given = self._checked(tokens)
        body = score_body(given, uuid.uuid4().hex, self._server.address.model)
        return await self._server.generate(body, lambda answer: read_scores(answer, given))

    async def abort(self, session: str) -> None:
        """The server gives back what there is; where it does not, the connection is closed."""
        running = dict(self._tasks.get(session, {}))
        try:
            async with asyncio.timeout(self._options.abort_seconds):
                while any(not task.done() for task in running.values()):
                    await self._server.abort(list(running))
                    await asyncio.wait(running.values(), timeout=_ABORT_AGAIN)
        except (ConnectionFailed, TimeoutError):
            pass  # it is slow or dead: what it has is lost
        finally:
            for task in running.values():
                task.cancel()

    async def pause(self) -> None:
        self._is_paused = True
        self._server.deadlines.hold()
        await self._server.pause()

    async def resume(self) -> None:
        self._is_paused = False
        await self._server.resume()
        self._server.deadlines.go_on()

    async def forget(self) -> None:
        await self._server.forget()

    async def load_weights(self, folder: Path, version: int) -> None:
        """The server reads the folder itself: it must see it under the same path."""
        self._check()
        self._is_loading = True
        self._server.deadlines.hold()
        try:
            await self._server.pause()
            await self._load(folder)
            await self._server.set_label(self._label.of(version))
            self._version = version
            if not self._is_paused:
                await self._server.resume()
        finally:
            self._is_loading = False
            if not self._is_paused:
                self._server.deadlines.go_on()

    async def _load(self, folder: Path) -> None:
        folder = await asyncio.to_thread(folder.resolve)
        source = with_head(folder)
        path = await asyncio.to_thread(source.__enter__)
        try:
            await self._server.load(path)
        except EngineError as error:
            raise EngineError(
                f"{self.name} could not load the weights in {folder} and must be started again: {error}. Does "
                "it see that folder under the same path (on one machine, or on a shared file system), and does "
                "it serve the model that is trained?"
            ) from error
        finally:
            await asyncio.to_thread(source.__exit__, None, None, None)

    async def start(self, folder: Path, version: int) -> None:
        """Wait for the server, check it, and give it these weights."""
        self._is_closed = False
        self._is_paused = False
        problem = await self._server.ailment()
        if problem is not None:
            log.warning("waiting for %s: %s", self.name, problem)
        while problem is not None:
            await asyncio.sleep(self._options.watch_seconds)
            problem = await self._server.ailment()
        await self._server.check(await asyncio.to_thread(model_config, folder))
        await self._probe()
        await self.load_weights(folder, version)

    async def _probe(self) -> None:
        """Ask for the largest token: the vocabulary must be as large as the trained model's."""
        await self._server.resume()  # a run that used it before may have died in an update
        try:
            await self.score([self._vocabulary - 1])
        except EngineError as error:
            if "out of vocabulary" not in str(error):
                raise
            raise ConfigError(
                f"{self.name} cannot be trained on: its model has fewer tokens than the trained one, which has "
                f"{self._vocabulary}"
            ) from error

    async def ended(self) -> str:
        """Asks the server again and again. One that was started again does not have this run's weights."""
        failures = 0
        while True:
            await asyncio.sleep(self._options.watch_seconds)
            problem = await self._server.ailment() or await self._stranger()
            failures = 0 if problem is None else failures + 1
            if problem is not None and failures > 1:  # it may have been busy, or taking weights, once
                return f"{self.name}: {problem}"

    async def _stranger(self) -> str | None:
        """Why the weights are not those that this run has loaded; None where they are."""
        if self._is_loading:
            return None
        try:
            self._label.version(await self._server.label())
        except (BadResponse, EngineError) as error:
            return None if self._is_loading else str(error)
        return None

    async def close(self) -> None:
        """Leave the server as others can use it; it is not ended."""
        if self._is_paused:
            self._is_paused = False
            with contextlib.suppress(EngineError, ConfigError, TimeoutError):
                async with asyncio.timeout(self._options.abort_seconds):
                    await self._server.resume()
        await super().close()
        await self._server.close()

    def _checked(self, tokens: Sequence[int]) -> list[int]:
        """Requests that the server would refuse, or worse."""
        given: list[int] = checked_context(tokens, self._vocabulary).tolist()
        return given


@contextlib.contextmanager
def with_head(folder: Path) -> Iterator[Path]:
    """A folder with the same weights, and the head among them; it is gone afterwards."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise EngineError(f"there are no weights (*.safetensors) in {folder}", retriable=False)
    source = _embedding_without_head(files)
    if source is None:
        yield folder
        return
    # beside the folder: a server that sees that sees this, and files can be linked
    made = Path(tempfile.mkdtemp(prefix=f"{folder.name}-with-head-", dir=folder.parent))
    try:
        made.chmod(0o755)  # the server may be another user's
        for file in [*files, folder / "config.json"]:
            if file.is_file():
                try:
                    os.link(file, made / file.name)
                except OSError:  # a file system without links, or a file of another user
                    shutil.copyfile(file, made / file.name)
        with safe_open(source[0], "pt") as tensors:
            head = {HEAD: tensors.get_tensor(source[1])}
            save_file(head, made / "head.safetensors", metadata={"format": "pt"})
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _embedding_without_head(files: list[Path]) -> tuple[Path, str] | None:
    """The file and the name of the embedding, where there is no head."""
    found: tuple[Path, str] | None = None
    for file in files:
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - it is no mapping
                if name.endswith(HEAD):
                    return None
                if name.endswith(_EMBEDDING):
                    found = file, name
    return found
