"""The engine over a vLLM server: exact tokens and versions, weights from folders, and what servers do wrong."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_models import make, plain_logprobs, until
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from vllm_server import VllmTestServer, vllm_server

from ludus.core import ByteTokenizer, ConfigError, Engine, EngineError, FinishReason, Sampling
from ludus.core.generation import Completion, VersionSpan
from ludus.engine import EmbeddedEngine
from ludus.engine.servers.vllm import HEAD, VllmEngine, with_head
from ludus.engine.servers.vllm_api import WeightLabel, read_completion, read_scores
from ludus.engine.servers.vllm_server import (
    ServeOptions,
    VllmOptions,
    VllmServer,
    serve_command,
    shell_line,
)
from ludus.llm import Address
from ludus.remote.client import BadResponse

TOKENIZER = ByteTokenizer()
VOCABULARY = TOKENIZER.vocabulary_size
FAST = VllmOptions(
    seconds=20, control_seconds=20, first_pause=0.001, watch_seconds=0.01, abort_seconds=2
)
PROMPT = TOKENIZER.encode("Where is the key?")


def tied_model() -> Any:
    return make("smollm2", vocab_size=VOCABULARY, tie_word_embeddings=True)


def moved(model: Any, by: float = 0.01) -> Any:
    """The same model a few optimizer steps later."""
    other = copy.deepcopy(model)
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in other.parameters():
            weight.add_(by * torch.randn_like(weight))
    return other


def with_own_head(model: Any) -> Any:
    """As a server has it: head and embedding are two tensors."""
    other = copy.deepcopy(model)
    other.config.tie_word_embeddings = False
    other.lm_head.weight = torch.nn.Parameter(other.lm_head.weight.detach().clone())
    return other


@pytest.fixture(scope="module")
def model() -> Any:
    return tied_model()


@pytest.fixture
def server(model: Any) -> Iterator[VllmTestServer]:
    with vllm_server(with_own_head(model), TOKENIZER) as running:
        yield running


@pytest.fixture(scope="module")
def folders(model: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The weights of two versions."""
    found = []
    for number, one in enumerate((model, moved(model))):
        folder = tmp_path_factory.mktemp("weights") / str(number)
        one.save_pretrained(folder)
        found.append(folder)
    return found[0], found[1]


@asynccontextmanager
async def engine_at(
    server: VllmTestServer, folder: Path | None = None, options: VllmOptions = FAST, **more: Any
) -> AsyncIterator[VllmEngine]:
    engine = VllmEngine(server.url, TOKENIZER, options=options, **more)
    try:
        if folder is not None:
            await engine.start(folder, 3)
        yield engine
    finally:
        await engine.close()


def test_tokens_and_logprobs_are_those_of_the_trained_distribution(
    server: VllmTestServer, model: Any, folders: tuple[Path, Path]
) -> None:
    async def scenario() -> None:
        async with engine_at(server, folders[1]) as engine:
            assert isinstance(engine, Engine)
            current = moved(model)
            for temperature in (0.0, 1.0, 0.6):
                sampling = Sampling(max_tokens=20, temperature=temperature, seed=2**64 - 3)
                made = await engine.generate(PROMPT, sampling)
                again = await engine.generate(PROMPT, sampling)
                assert made.tokens == again.tokens
                assert made.versions == (VersionSpan(0, 3),)
                assert made.finish is FinishReason.LENGTH
                whole = [*PROMPT, *made.tokens]
                expected = plain_logprobs(current, whole, temperature or 1.0)
                assert made.logprobs == pytest.approx(expected[len(PROMPT) :], abs=1e-4)
                scored = await engine.score(whole)
                assert scored == pytest.approx(plain_logprobs(current, whole), abs=1e-4)

    asyncio.run(scenario())


def test_versions_are_exact_through_an_update_in_flight(
    server: VllmTestServer, model: Any, folders: tuple[Path, Path]
) -> None:
    async def scenario() -> Completion:
        async with engine_at(server, folders[0]) as engine:
            before = server.engine.stats.generated_tokens
            request = asyncio.ensure_future(
                engine.generate(PROMPT, Sampling(max_tokens=220), session="one")
            )
            await until(lambda: server.engine.stats.generated_tokens > before + 5)
            await engine.load_weights(folders[1], 4)
            assert engine.policy_version == 4
            return await request

    made = asyncio.run(scenario())
    assert [span.version for span in made.versions] == [3, 4]
    switch = made.versions[1].start
    whole, start = [*PROMPT, *made.tokens], len(PROMPT)
    old, new = plain_logprobs(model, whole)[start:], plain_logprobs(moved(model), whole)[start:]
    assert made.logprobs[:switch] == pytest.approx(old[:switch], abs=1e-4)
    assert made.logprobs[switch:] == pytest.approx(new[switch:], abs=1e-4)
    assert made.logprobs[switch:] != pytest.approx(old[switch:], abs=1e-2)


@pytest.mark.parametrize("ignores", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_stops_are_those_of_the_embedded_engine(
    server: VllmTestServer, model: Any, folders: tuple[Path, Path], ignores: bool, temperature: float
) -> None:
    """Also where the server knows nothing of stop strings, or finds them later."""
    server.faults.ignores_stop_strings = ignores

    async def scenario() -> None:
        embedded = EmbeddedEngine(copy.deepcopy(model), TOKENIZER)
        async with engine_at(server, folders[0]) as engine:
            free = await embedded.generate(PROMPT, Sampling(max_tokens=40, temperature=temperature))
            said = TOKENIZER.decode(free.tokens)
            stops = [
                {"stop": (said[6:8], said[20:23])},
                {"stop_tokens": (free.tokens[9], 260)},
                {"stop": (said[12:13],), "stop_tokens": (free.tokens[3],)},
                {"stop": ("never said",)},
            ]
            for stop in stops:
                sampling = Sampling(max_tokens=40, temperature=temperature, **stop)
                expected = await embedded.generate(PROMPT, sampling)
                found = await engine.generate(PROMPT, sampling)
                assert (found.tokens, found.finish, found.stop) == (
                    expected.tokens,
                    expected.finish,
                    expected.stop,
                )
                assert found.logprobs == pytest.approx(expected.logprobs, abs=1e-5)
                assert len(found.versions) == 1
        await embedded.close()

    asyncio.run(scenario())


def test_an_abort_gives_back_what_there_is(server: VllmTestServer, folders: tuple[Path, Path]) -> None:
    async def scenario() -> None:
        async with engine_at(server, folders[0]) as engine:
            before = server.engine.stats.generated_tokens
            request = asyncio.ensure_future(
                engine.generate(PROMPT, Sampling(max_tokens=230), session="a")
            )
            await until(lambda: server.engine.stats.generated_tokens > before + 3)
            await engine.abort("a")
            made = await request
            assert made.finish is FinishReason.ABORTED
            assert 0 < len(made.tokens) == len(made.logprobs) < 230
            await engine.abort("a")
            await engine.abort("nobody")
        server.faults.hangs = True  # it does not even answer an abort with what there is
        async with engine_at(server, options=replace(FAST, abort_seconds=0.05)) as engine:
            request = asyncio.ensure_future(engine.generate(PROMPT, Sampling(), session="b"))
            await until(lambda: server.asked[-1][0] == "b")
            await engine.abort("b")
            assert await request == Completion([], [], FinishReason.ABORTED, (VersionSpan(0, 0),))

    asyncio.run(scenario())


def test_a_cancelled_caller_ends_the_request_on_the_server(
    server: VllmTestServer, folders: tuple[Path, Path]
) -> None:
    async def scenario() -> None:
        async with engine_at(server, folders[0]) as engine:
            server.faults.hangs = True
            request = asyncio.ensure_future(engine.generate(PROMPT, Sampling()))
            seen = len(server.asked)
            await until(lambda: len(server.asked) > seen)
            request.cancel()
            with pytest.raises(asyncio.CancelledError):
                await request
            await until(lambda: server.disconnected == 1)

    asyncio.run(scenario())


def test_deadlines_stand_still_while_the_server_is_paused(
    server: VllmTestServer, folders: tuple[Path, Path]
) -> None:
    async def scenario() -> None:
        async with engine_at(server, folders[0], replace(FAST, seconds=0.4)) as engine:
            await engine.pause()
            request = asyncio.ensure_future(engine.generate(PROMPT, Sampling(max_tokens=3)))
            done, _ = await asyncio.wait([request], timeout=0.6)
            assert not done
            await engine.load_weights(folders[1], 4)
            assert server.is_paused and not request.done()
            await engine.resume()
            assert (await request).versions == (VersionSpan(0, 4),)
            server.faults.hangs = True
            with pytest.raises(EngineError, match=r"no answer within 0\.4 seconds") as caught:
                await engine.generate(PROMPT, Sampling())
            assert caught.value.retriable

    asyncio.run(scenario())


GARBAGE: list[Any] = [
    b"",
    b"<html>",
    b"[]",
    {},
    {"choices": []},
    {"choices": [{"token_ids": None}]},
    {"choices": [{"token_ids": [1.5]}]},
    {"choices": [{"token_ids": [VOCABULARY], "finish_reason": "length"}]},
    {"choices": [{"token_ids": [3], "logprobs": {"content": []}}]},
    500,
    503,
    429,
]


@pytest.mark.parametrize("answer", GARBAGE, ids=str)
def test_garbage_is_asked_for_again_and_then_a_typed_failure(
    server: VllmTestServer, folders: tuple[Path, Path], answer: Any
) -> None:
    async def scenario() -> None:
        async with engine_at(server, folders[0]) as engine:
            server.faults.answers = [answer]
            assert len((await engine.generate(PROMPT, Sampling(max_tokens=4))).tokens) == 4
            server.faults.answers = [answer] * 3
            with pytest.raises(EngineError, match="in 3 attempts") as caught:
                await engine.generate(PROMPT, Sampling(max_tokens=4))
            assert caught.value.retriable and server.url in str(caught.value)

    asyncio.run(scenario())


def test_a_bad_request_is_not_repeated(server: VllmTestServer, folders: tuple[Path, Path]) -> None:
    async def scenario() -> None:
        async with engine_at(server, folders[0]) as engine:
            server.faults.answers = [400]
            for tokens, what in [
                (PROMPT, "as the test wants it"),
                ([], "non-empty"),
                ([VOCABULARY], "not in the model's vocabulary"),
            ]:
                with pytest.raises(EngineError, match=what) as caught:
                    await engine.generate(tokens, Sampling())
                assert not caught.value.retriable
            with pytest.raises(EngineError, match="top_p"):
                await engine.generate(PROMPT, Sampling(top_p=0.5))
            with pytest.raises(EngineError, match="load_weights"):
                await engine.update_weights()

    asyncio.run(scenario())


def test_a_server_that_dies_and_comes_back_has_strange_weights(
    server: VllmTestServer, folders: tuple[Path, Path]
) -> None:
    async def scenario() -> None:
        async with engine_at(server, folders[0]) as engine:
            ended = asyncio.ensure_future(engine.ended())
            server.faults.hangs = True
            request = asyncio.ensure_future(engine.generate(PROMPT, Sampling()))
            seen = len(server.asked)
            await until(lambda: len(server.asked) > seen)
            await asyncio.to_thread(server.die)
            with pytest.raises(EngineError) as caught:
                await request
            assert caught.value.retriable
            assert "Connect" in await ended
            server.faults.hangs = False
            await asyncio.to_thread(server.start)
            with pytest.raises(EngineError, match="weights that this run has not given it") as caught:
                await engine.generate(PROMPT, Sampling(max_tokens=3))
            assert caught.value.retriable
            assert "started again" in await engine.ended()
            await engine.start(folders[1], 9)
            assert (await engine.generate(PROMPT, Sampling(max_tokens=3))).versions == (
                VersionSpan(0, 9),
            )

    asyncio.run(scenario())


def test_weights_that_are_refused_are_not_used(
    server: VllmTestServer, folders: tuple[Path, Path]
) -> None:
    async def scenario() -> None:
        async with engine_at(server, folders[0]) as engine:
            server.faults.refuses_weights = True
            with pytest.raises(EngineError, match="under the same path"):
                await engine.load_weights(folders[1], 4)
            assert engine.policy_version == 3
            with pytest.raises(EngineError, match="no weights"):
                await engine.load_weights(folders[1].parent, 4)

    asyncio.run(scenario())


def _set(**changes: Any) -> Callable[[VllmTestServer], None]:
    def change(server: VllmTestServer) -> None:
        server.faults = replace(server.faults, **changes)
        if "dev_mode" in changes:
            server.die()
            server.start()

    return change


@pytest.mark.parametrize(
    ("change", "fix"),
    [
        (_set(scale_out=False), "--enable-scale-out"),
        (_set(dev_mode=False), "VLLM_SERVER_DEV_MODE=1"),
        (_set(logprobs_mode="raw_logprobs"), "--logprobs-mode processed_logprobs"),
        (_set(dtype="torch.bfloat16"), "--dtype float32"),
        (_set(chunked_prefill=True), "--no-enable-chunked-prefill --max-num-batched-tokens 2048"),
        (lambda server: setattr(server, "key", "secret"), "LUDUS_API_KEY"),
    ],
)
def test_a_server_that_cannot_be_trained_on_is_refused_with_the_fix(
    server: VllmTestServer,
    folders: tuple[Path, Path],
    change: Callable[[VllmTestServer], None],
    fix: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("LUDUS_API_KEY", raising=False)
    change(server)

    async def scenario() -> None:
        async with engine_at(server) as engine:
            with pytest.raises(ConfigError, match=fix):
                await engine.start(folders[0], 0)

    asyncio.run(scenario())


def test_the_key_comes_from_the_environment(
    model: Any, folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LUDUS_API_KEY", "secret")

    async def scenario() -> None:
        with vllm_server(with_own_head(model), TOKENIZER, key="secret") as server:
            async with engine_at(server, folders[0]) as engine:
                assert engine.policy_version == 3

    asyncio.run(scenario())


def test_a_server_with_another_model_is_refused(
    model: Any, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    other = make("llama", vocab_size=VOCABULARY - 7, num_hidden_layers=1)
    other.save_pretrained(tmp_path)

    async def scenario() -> None:
        with vllm_server(other, TOKENIZER, tmp_path) as server:
            async with engine_at(server) as engine:
                with pytest.raises(ConfigError, match="num_hidden_layers = 1, and the trained one 2"):
                    await engine.start(folders[0], 0)
            server.folder = Path("/not/here")  # on another machine
            async with engine_at(server) as engine:
                with pytest.raises(ConfigError, match="fewer tokens"):
                    await engine.start(folders[0], 0)

    asyncio.run(scenario())


def test_nobody_there_is_an_error_before_the_run() -> None:
    async def scenario() -> None:
        there = VllmServer(Address.parse("http://127.0.0.1:9/v1"), options=FAST)
        with pytest.raises(
            ConfigError, match=r"no vLLM server at http://127.0.0.1:9: .*ludus serve vllm"
        ):
            await there.check()
        await there.close()
        engine = VllmEngine("http://127.0.0.1:9", TOKENIZER, options=FAST)
        await engine.close()
        with pytest.raises(EngineError, match="closed"):
            await engine.generate(PROMPT, Sampling())

    asyncio.run(scenario())


def test_a_server_that_was_left_paused_goes_on(
    server: VllmTestServer, folders: tuple[Path, Path]
) -> None:
    async def scenario() -> None:
        async with engine_at(server, folders[0]) as engine:
            await engine.pause()  # and the trainer is killed
        assert not server.is_paused, "closing lets it go on"
        async with engine_at(server, folders[0]) as engine:
            await engine.pause()
            async with engine_at(server, folders[0]) as other:
                await other.generate(PROMPT, Sampling(max_tokens=2))

    asyncio.run(scenario())


# -- weights -------------------------------------------------------------------------------------------------


def test_an_update_has_the_head_of_a_tied_model(model: Any, folders: tuple[Path, Path]) -> None:
    assert HEAD not in load_file(folders[0] / "model.safetensors")
    with with_head(folders[0]) as folder:
        state = {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}
        assert torch.equal(state[HEAD], state["model.embed_tokens.weight"])
        assert json.loads((folder / "config.json").read_text())["vocab_size"] == VOCABULARY
    assert not folder.exists()
    assert [path.name for path in folders[0].parent.iterdir()] == [folders[0].name]


def test_an_update_of_an_untied_model_is_the_folder_itself(model: Any, tmp_path: Path) -> None:
    with_own_head(model).save_pretrained(tmp_path)
    with with_head(tmp_path) as folder:
        assert folder == tmp_path


# -- answers, without a server -------------------------------------------------------------------------------

LABEL = WeightLabel("run")
GOOD: dict[str, Any] = {
    "choices": [
        {
            "index": 0,
            "finish_reason": "length",
            "stop_reason": None,
            "token_ids": [5, 6, 7],
            "logprobs": {"content": [{"token_id": t, "logprob": -0.5 * t} for t in (5, 6, 7)]},
            "weight_versions": [
                {"version": LABEL.of(1), "start": 0, "end": 2},
                {"version": LABEL.of(2), "start": 2, "end": 3},
            ],
        }
    ],
    "usage": {"prompt_tokens_details": {"cached_tokens": 4}},
}


def read(body: Any, **changes: Any) -> Completion:
    sampling = Sampling(**{"max_tokens": 3, **changes})
    return read_completion(
        body, sampling, vocabulary=VOCABULARY, decode=TOKENIZER.decode, label=LABEL, version=9
    )


def test_a_good_answer_is_read_whole() -> None:
    expected = (VersionSpan(0, 1), VersionSpan(2, 2))
    assert read(GOOD) == Completion(
        [5, 6, 7], [-2.5, -3.0, -3.5], FinishReason.LENGTH, expected, None, 4
    )
    cut = read(GOOD, stop_tokens=(6,))
    assert (cut.tokens, cut.finish, cut.versions) == (
        [5, 6],
        FinishReason.STOP_TOKEN,
        (VersionSpan(0, 1),),
    )


PLACES = [
    ("choices",), ("choices", 0), ("choices", 0, "token_ids"), ("choices", 0, "token_ids", 1),
    ("choices", 0, "logprobs"), ("choices", 0, "logprobs", "content"), ("choices", 0, "logprobs", "content", 2),
    ("choices", 0, "logprobs", "content", 0, "logprob"), ("choices", 0, "logprobs", "content", 1, "token_id"),
    ("choices", 0, "weight_versions"), ("choices", 0, "weight_versions", 1), ("usage",),
    ("choices", 0, "weight_versions", 0, "end"), ("choices", 0, "weight_versions", 1, "start"),
    ("choices", 0, "weight_versions", 1, "version"), ("choices", 0, "finish_reason"),
    ("usage", "prompt_tokens_details"),
]  # fmt: skip
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(),
    st.text(max_size=5),
    st.lists(st.integers(0, 9), max_size=4),
    st.just({}),
    st.just("ludus-other-3"),
    st.just("ludus-run-x"),
)


@given(st.sampled_from(PLACES), VALUES)
def test_an_answer_is_either_right_or_refused(place: tuple[Any, ...], value: Any) -> None:
    """Whatever is put in one place of an answer: nothing but `BadResponse` comes, or a sound completion."""
    body = copy.deepcopy(GOOD)
    at: Any = body
    for step in place[:-1]:
        at = at[step]
    at[place[-1]] = value
    try:
        made = read(body)
    except BadResponse:
        return
    assert len(made.tokens) == len(made.logprobs) == 3
    assert all(isinstance(token, int) and 0 <= token < VOCABULARY for token in made.tokens)
    assert all(-9000 < logprob <= 0 for logprob in made.logprobs)
    assert made.versions[0].start == 0 and {span.version for span in made.versions} <= {1, 2}


@given(VALUES)
def test_scores_are_either_right_or_refused(value: Any) -> None:
    for body in (
        {"prompt_logprobs": value},
        {"prompt_logprobs": [None, value]},
        {"prompt_logprobs": [None, {"7": value}]},
        {"prompt_logprobs": [None, {"7": {"logprob": value}}]},
    ):
        try:
            scores = read_scores(body, [3, 7])
        except BadResponse:
            continue
        assert len(scores) == 2 and -9000 < scores[1] <= 0


def test_the_command_that_starts_a_server_has_all_that_training_needs() -> None:
    options = ServeOptions(port=8123, extra=("--enforce-eager",))
    line = shell_line(*serve_command("python", Path("/a b"), "float32", 512, True, options))
    assert line == (
        "VLLM_SERVER_DEV_MODE=1 python -m vllm.entrypoints.openai.api_server --model '/a b' "
        "--served-model-name policy --host 127.0.0.1 --port 8123 --dtype float32 --enable-scale-out "
        "--logprobs-mode processed_logprobs --max-model-len 512 "
        "--no-enable-chunked-prefill --max-num-batched-tokens 2048 --enforce-eager"
    )
