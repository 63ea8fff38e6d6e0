"""An episode played again elsewhere: plain transformers, and vLLM's chat API, on an exported model.

    LUDUS_VLLM_PYTHON=vllm-venv/bin/python pytest -m slow tests/training/test_export_round_trip.py

docs/vllm.md says how that interpreter gets vLLM.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from export_parts import desk_of, recipe
from test_vllm_real import PYTHON, free_port, is_well

import ludus
from ludus.core import SegmentKind, Trajectory
from ludus.observe import RunFolder
from ludus.training.config.parts import load_parts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

STEPS = 200


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    folder = tmp_path_factory.mktemp("runs") / "desks-001"
    made = recipe(folder, STEPS)
    asyncio.run(ludus.training.train_async(made, load_parts(made)))
    return RunFolder(folder)


@pytest.fixture(scope="module")
def exported(run: RunFolder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported") / "desks"
    words = [sys.executable, "-m", "ludus", "export", str(run.path), "--out", str(folder)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert "8 of 8 first prompts and 8 of 8 later ones, token for token" in done.stdout
    return folder


def episodes(run: RunFolder) -> list[Trajectory]:
    """Greedy ones, each with a call, its result and an answer."""
    found = list(run.trajectories(STEPS, "eval"))
    assert [one.reward for one in found] == [1.0] * 8 and [one.turns for one in found] == [2] * 8
    return found


def turns(episode: Trajectory) -> Iterator[tuple[list[int], list[int]]]:
    """What the model had read before each action, and what it said."""
    read: list[int] = []
    for segment in episode.sequences[0].segments:
        if segment.kind is SegmentKind.ACTION:
            yield list(read), segment.tokens
        read += segment.tokens


def asked(episode: Trajectory) -> list[dict[str, Any]]:
    """The question alone: the system prompt and the tools are the template's."""
    return [message.as_chat() for message in episode.asked if message.role == "user"]


def test_plain_transformers_plays_the_same_episodes(run: RunFolder, exported: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(exported),
        AutoTokenizer.from_pretrained(exported),
    )
    for episode in episodes(run):
        messages = asked(episode)
        for number, (read, said) in enumerate(turns(episode)):
            prompt = tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
            )
            assert prompt["input_ids"][0].tolist() == read
            with torch.no_grad():
                made = model.generate(**prompt, do_sample=False)[0, len(read) :].tolist()
            assert made == said
            if number == 0:
                text = tokenizer.decode(made, skip_special_tokens=True)
                call = json.loads(text.partition("<tool_call>")[2].partition("</tool_call>")[0])
                messages += [
                    {"role": "assistant", "tool_calls": [{"type": "function", "function": call}]},
                    {"role": "tool", "content": desk_of(**call["arguments"])},
                ]


@pytest.fixture(scope="module")
def server(exported: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """`ludus serve vllm` on the exported model, until it answers."""
    log, port = tmp_path_factory.mktemp("vllm") / "log", free_port()
    words = [sys.executable, "-m", "ludus", "serve", "vllm", str(exported), "--python", str(PYTHON)]
    words += [
        "--name",
        "desks",
        "--port",
        str(port),
        "--extra=--enforce-eager",
        "--extra=--max-num-seqs=8",
    ]
    own = {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    url = f"http://127.0.0.1:{port}"
    with log.open("w") as output:
        environment = {**os.environ, **own, "VLLM_NO_USAGE_STATS": "1"}
        process = subprocess.Popen(words, stdout=output, stderr=output, env=environment)
        try:
            deadline = time.monotonic() + 400
            while not is_well(url):
                assert process.poll() is None, log.read_text()[-3000:]
                assert time.monotonic() < deadline, "vLLM did not come up within 400 seconds"
                time.sleep(1)
            yield url
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@pytest.mark.skipif(PYTHON is None, reason="LUDUS_VLLM_PYTHON names no interpreter with vLLM")
def test_vllm_plays_the_same_episodes_with_tools(run: RunFolder, server: str) -> None:
    """Through its chat completions API: prompts, the call that it parses, and the answer."""

    def complete(messages: list[dict[str, Any]]) -> tuple[dict[str, Any], list[int], list[int]]:
        body = {"model": "desks", "messages": messages, "temperature": 0, "return_token_ids": True}
        body["tools"] = [desk_of.spec.as_openai()]
        request = urllib.request.Request(
            f"{server}/v1/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            reply = json.load(answer)
        choice = reply["choices"][0]
        return choice["message"], reply["prompt_token_ids"], choice["token_ids"]

    for episode in episodes(run):
        messages = asked(episode)
        (first_read, first_said), (read, said) = turns(episode)
        message, prompt, made = complete(messages)
        assert (prompt, made) == (first_read, first_said)
        (call,) = message["tool_calls"]
        result = desk_of(**json.loads(call["function"]["arguments"]))
        kept = {"role": "assistant", "content": message["content"], "tool_calls": [call]}
        messages += [kept, {"role": "tool", "tool_call_id": call["id"], "content": result}]
        message, prompt, made = complete(messages)
        assert (prompt, made) == (read, said)
        assert message["content"] == episode.answer and not message.get("tool_calls")
